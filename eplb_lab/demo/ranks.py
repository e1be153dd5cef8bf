"""Rank processes of the demo and the JSON lines that they report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

_STOP_SECONDS = 5.0
_SHOWN_STDERR_LINES = 3


class RankDiedError(RuntimeError):
    """Raised if a rank process fails. The message contains the last lines of its stderr."""


def rank_reports(program: str, task: Path, ranks: int) -> Generator[dict[str, Any], None, None]:
    """Run rank processes and yield their reports as they arrive.

    Raises ``RankDiedError`` if a rank fails. Closing the iterator terminates the processes.

    Parameters
    ----------
    program
        Module that each process runs.
    task
        File that contains the ranks' task. Each rank's stderr is written next to it.
    ranks
        R, the number of processes.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    processes = [_start_rank(program, task, rank) for rank in range(ranks)]
    readers = [threading.Thread(target=_read, args=(process, lines), daemon=True) for process in processes]
    for reader in readers:
        reader.start()
    try:
        ended = 0
        while ended < ranks:
            line = lines.get()
            if line is not None:
                yield json.loads(line)
                continue
            ended += 1
            for rank, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    last_lines = (
                        _stderr_file(task, rank).read_text().strip().splitlines()[-_SHOWN_STDERR_LINES:]
                    )
                    reason = " | ".join(last_lines) or "no output on stderr"
                    raise RankDiedError(f"rank {rank} exited with code {process.returncode}: {reason}")
    finally:
        for process in processes:
            process.terminate()
        for process, reader in zip(processes, readers, strict=True):
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()


def _start_rank(program: str, task: Path, rank: int) -> subprocess.Popen[str]:
    with _stderr_file(task, rank).open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", program, str(task), str(rank)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def _stderr_file(task: Path, rank: int) -> Path:
    """Return the path of a rank's stderr file, which is in the task file's directory."""
    return task.with_name(f"rank{rank}.stderr")


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Enqueue each line of a process's output, then ``None`` once the process has closed its output."""
    with process:
        for line in process.stdout or ():
            lines.put(line)
    lines.put(None)
