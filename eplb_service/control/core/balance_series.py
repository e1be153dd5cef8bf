"""How a deployment's balance went over time, in bounded memory: the longer it is, the wider its points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplb_service.placement import mean_par
from eplb_service.wire.balance import BalancePoint

MOST_POINTS = 512
"""Points of one deployment; where there are more, neighbours become one."""


class BalanceSeries:
    """Points of time, at most ``MOST_POINTS``, evenly spaced.

    Parameters
    ----------
    interval
        Seconds from one point to the next, at first; it doubles whenever the series is full.
    """

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self._points: list[BalancePoint] = []
        self._gathered: list[BalancePoint] = []

    @property
    def points(self) -> Sequence[BalancePoint]:
        """Oldest first."""
        return tuple(self._points)

    def add(self, point: BalancePoint) -> None:
        """Balance as it is now; what comes within one interval becomes one point."""
        self._gathered.append(point)
        if self._points and point.at - self._points[-1].at < self._interval:
            return
        self._points.append(_mean(self._gathered))
        self._gathered = []
        if len(self._points) >= MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._interval *= 2


def _mean(points: Sequence[BalancePoint]) -> BalancePoint:
    """One point for several: the mean of each ratio that is known, at the time of the last."""
    ratios = np.array([(point.par, point.par_planned, point.noise_floor) for point in points])
    par, planned, floor = mean_par(ratios, axis=0).tolist()
    return BalancePoint(points[-1].at, par, planned, floor, points[-1].layers_switched)
