"""The most memory that a process and its children hold at a time, looked up every so often."""

from __future__ import annotations

import threading
from pathlib import Path

_SECONDS = 0.05
_KIB = 1024


class PeakMemory:
    """Watches process ``pid`` from now until ``stop``; Linux alone shows it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The peak in bytes."""
        self._over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._over.wait(_SECONDS):
            self._peak = max(self._peak, sum(map(_held, _family(self._pid))))


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(int(child)))]


def _held(pid: int) -> int:
    """Resident bytes of its own; pages of files that others map too are left out."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * _KIB for line in lines if line.startswith("RssAnon:"))
