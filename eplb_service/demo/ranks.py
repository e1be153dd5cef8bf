"""Rank processes of the demo, and the lines in which they report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STOP_SECONDS = 5.0
_KEPT_STDERR_LINES = 3


class RankDiedError(RuntimeError):
    """A rank process ended with an error; the message holds its last lines of stderr."""


class _RankProcesses:
    """R processes of one program, their progress lines, and their ends."""

    def __init__(self, program: str, task: Path, ranks: int) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._errors = [deque[str](maxlen=_KEPT_STDERR_LINES) for _ in range(ranks)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", program, str(task), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]
        self._readers = [
            threading.Thread(target=reader, args=(rank,), daemon=True)
            for rank in range(ranks)
            for reader in (self._read_progress, self._read_errors)
        ]
        for thread in self._readers:
            thread.start()

    def take(self, timeout: float) -> dict[str, Any] | None:
        """Return the next progress line of any rank, or ``None`` after ``timeout`` seconds.

        Raises ``RankDiedError`` once a rank has failed.
        """
        for rank, process in enumerate(self._processes):
            if process.poll() not in (None, 0):
                last_lines = " | ".join(self._errors[rank]) or "nothing on stderr"
                raise RankDiedError(f"rank {rank} ended with exit code {process.returncode}: {last_lines}")
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    @property
    def running(self) -> bool:
        """A rank still runs, or has lines that were not taken."""
        alive = any(process.poll() is None for process in self._processes)
        return alive or any(thread.is_alive() for thread in self._readers) or not self._lines.empty()

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._readers:
            thread.join(_STOP_SECONDS)
        for process in self._processes:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def _read_progress(self, rank: int) -> None:
        for line in self._processes[rank].stdout or ():
            self._lines.put(json.loads(line))

    def _read_errors(self, rank: int) -> None:
        for line in self._processes[rank].stderr or ():
            self._errors[rank].append(line.strip())


@contextmanager
def rank_processes(program: str, task: Path, ranks: int) -> Iterator[_RankProcesses]:
    """Processes of the module ``program``, with the orders in ``task``, ended when the context is left."""
    processes = _RankProcesses(program, task, ranks)
    try:
        yield processes
    finally:
        processes.stop()
