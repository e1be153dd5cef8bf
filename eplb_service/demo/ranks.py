"""Starts the demo's rank processes and reads what they report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STOP_SECONDS = 5.0
_KEPT_STDERR_LINES = 12


class RankDiedError(RuntimeError):
    """A rank process ended with an error; the message holds its last lines of stderr."""


class RankProcesses:
    """R processes, their progress lines, and their ends."""

    def __init__(self, program: str, task: Path, ranks: int) -> None:
        command = [sys.executable, "-m", program, str(task)]
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._errors: list[list[str]] = [[] for _ in range(ranks)]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)],
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
        """The next progress line of any rank, or ``None`` after ``timeout`` seconds.

        Raises
        ------
        RankDiedError
            Once a rank has failed.
        """
        self._check_alive()
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    @property
    def running(self) -> bool:
        """Whether a rank still runs or has lines that were not taken."""
        alive = any(process.poll() is None for process in self._processes)
        return alive or any(thread.is_alive() for thread in self._readers) or not self._lines.empty()

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            if process.poll() is None:
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

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() not in (None, 0):
                last_lines = " | ".join(self._errors[rank][-3:]) or "nothing on stderr"
                raise RankDiedError(f"rank {rank} ended with exit code {process.returncode}: {last_lines}")

    def _read_progress(self, rank: int) -> None:
        for line in _lines_of(self._processes[rank].stdout):
            self._lines.put(json.loads(line))

    def _read_errors(self, rank: int) -> None:
        for line in _lines_of(self._processes[rank].stderr):
            self._errors[rank] = [*self._errors[rank][1 - _KEPT_STDERR_LINES :], line]


def _lines_of(pipe: Any) -> Sequence[str] | Iterator[str]:
    return (line.strip() for line in pipe)


@contextmanager
def rank_processes(program: str, task: Path, ranks: int) -> Iterator[RankProcesses]:
    """Processes of the module ``program``, with the orders in ``task``, ended when the context is left."""
    processes = RankProcesses(program, task, ranks)
    try:
        yield processes
    finally:
        processes.stop()
