"""Reads a trace from front to back, keeping no more than the steps that are still needed."""

from __future__ import annotations

import numpy as np

from eplb_service.traces.trace import Heat, Trace


class SlidingHeat:
    """Heat of ``trace`` by stretches of steps whose beginnings never go back; each step is read once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._first = 0
        self._kept: Heat | None = None

    def heat(self, first: int, last: int) -> Heat:
        """Steps ``first`` to ``last`` (not included), ``[t, L, E]``; what lies before ``first`` is forgotten."""
        last = min(last, self._trace.steps)
        assert first >= self._first, "steps are forgotten once a later stretch has been read"
        if self._kept is None or first >= self._first + len(self._kept):
            self._kept = self._trace.heat(first, last)
        else:
            self._kept = self._kept[first - self._first :]
            end = first + len(self._kept)
            if last > end:
                self._kept = np.concatenate([self._kept, self._trace.heat(end, last)])
        self._first = first
        return self._kept[: last - first]
