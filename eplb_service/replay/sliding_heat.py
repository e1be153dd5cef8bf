"""Reads a trace from front to back, keeping no more than the steps that are still needed."""

from __future__ import annotations

import numpy as np

from eplb_service.heat.window import Counts
from eplb_service.io.trace import Trace


class SlidingHeat:
    """Heat of ``trace`` by stretches of steps, each step read once.

    Parameters
    ----------
    trace
        Where it is read from.
    slack
        Steps by which a stretch may begin before the latest beginning so far; what lies further back is forgotten.
    """

    def __init__(self, trace: Trace, slack: int = 0) -> None:
        self._trace = trace
        self._slack = slack
        self._latest = 0
        self._first = 0
        self._kept: Counts | None = None

    def heat(self, first: int, last: int) -> Counts:
        """Steps ``first`` to ``last`` (not included), ``[t, L, E]``."""
        last = min(last, self._trace.steps)
        assert first >= self._first, "steps are forgotten once a later stretch has been read"
        self._latest = max(self._latest, first)
        self._forget(max(0, min(first, self._latest - self._slack)))
        if self._kept is None:
            self._kept = self._trace.heat(self._first, last)
        end = self._first + len(self._kept)
        if last > end:
            self._kept = np.concatenate([self._kept, self._trace.heat(end, last)])
        return self._kept[first - self._first : last - self._first]

    def _forget(self, before: int) -> None:
        if before <= self._first:
            return
        if self._kept is not None:
            kept = self._kept[before - self._first :]
            self._kept = kept if len(kept) else None
        self._first = before
