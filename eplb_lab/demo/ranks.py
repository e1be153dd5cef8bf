"""Rank processes of the demo, and the lines in which they report."""

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
    """A rank process ended with an error; the message holds its last lines of stderr."""


def rank_reports(program: str, task: Path, ranks: int) -> Generator[dict[str, Any], None, None]:
    """Run R processes of the module ``program`` with the orders in ``task``, and yield their lines as they come.

    Raises ``RankDiedError`` once a rank has failed. Closing the iterator ends the processes.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    processes = [_started(program, task, rank) for rank in range(ranks)]
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
                    last_lines = _errors(task, rank).read_text().strip().splitlines()[-_SHOWN_STDERR_LINES:]
                    reason = " | ".join(last_lines) or "nothing on stderr"
                    raise RankDiedError(f"rank {rank} ended with exit code {process.returncode}: {reason}")
    finally:
        for process in processes:
            process.terminate()
        for process, reader in zip(processes, readers, strict=True):
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()


def _started(program: str, task: Path, rank: int) -> subprocess.Popen[str]:
    with _errors(task, rank).open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", program, str(task), str(rank)],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
        )


def _errors(task: Path, rank: int) -> Path:
    """File of a rank's stderr, beside its orders."""
    return task.with_name(f"rank{rank}.stderr")


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Pass on the lines of a process, and nothing once it has ended."""
    with process:
        for line in process.stdout or ():
            lines.put(line)
    lines.put(None)
