"""Bytes that transfers may put on the wire per step, so that they do not slow the model's own traffic."""

from __future__ import annotations

import sys
import threading


class ByteBudget:
    """Filled at each step boundary, drawn from by the transfer thread.

    Parameters
    ----------
    bytes_per_step
        ``None`` sets no limit. A chunk larger than one step's share waits for several steps.
    """

    def __init__(self, bytes_per_step: int | None) -> None:
        self._bytes_per_step = bytes_per_step
        self._left = 0
        self._changed = threading.Condition()

    def refill(self) -> None:
        """A step has gone by. What was not used is not saved up."""
        if self._bytes_per_step is None:
            return
        with self._changed:
            self._left = min(self._left, 0) + self._bytes_per_step
            self._changed.notify()

    def open(self) -> None:
        """Admit whatever is asked for until the next ``refill``: the model makes no steps that could be slowed."""
        with self._changed:
            self._left = sys.maxsize
            self._changed.notify()

    def draw(self, size: int, timeout: float) -> bool:
        """Wait until the budget admits ``size`` bytes; ``False`` past ``timeout`` seconds."""
        if self._bytes_per_step is None:
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, timeout):
                return False
            self._left -= size
            return True
