"""How far back heat is still what it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eplb_service.heat.window import Counts
from eplb_service.placement import Float64

SHORTEST = 16
"""Steps below which no stretch is looked at."""
_AS_GOOD = 1.1
"""Part of the least squared error of a forecast up to which a longer stretch is as good."""
_FAR_WORSE = 2.0
"""Part of it from which on a longer stretch is of other heat: bursts alone do not make as much of a difference."""


class _Forecast(NamedTuple):
    """How well stretches before the newest ``ahead`` steps forecast these."""

    ahead: int
    lengths: Sequence[int]
    errors: Sequence[float]

    def longest(self, bound: float) -> int:
        """Steps of the longest stretch whose error is at most ``bound`` times the least, with those ahead."""
        most = bound * min(self.errors)
        good = [length for length, error in zip(self.lengths, self.errors, strict=True) if error <= most]
        return max(good) + self.ahead


def stationary_steps(heat_TLE: Counts, ahead: int) -> int:
    """The longest stretch of newest steps that forecasts as well as any: its length, at most T.

    Of the newest ``ahead`` steps each expert's part of the tokens is forecast by its mean over stretches before them,
    each twice as long as the one before. Longer stretches are preferred: they know more of how experts move together.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step, oldest first.
    ahead
        Steps that are forecast.
    """
    if ahead < 1 or len(heat_TLE) - ahead < SHORTEST:
        return len(heat_TLE)
    return _forecasts(heat_TLE, [ahead])[0].longest(_AS_GOOD)


def looked_back(heat_TLE: Counts, interval: int) -> int:
    """How many of the newest steps a decision by the clock looks at: as far back as heat is still what it is now.

    Half an interval is forecast, so that heat which changed within the last one is distinguished from what was before.
    Where it changed within the newest half, no stretch forecasts that well, and ever fewer steps are forecast: where
    stretches then differ by far, only the steps since the change are looked at. But not where the heat before it has
    not lasted for an interval either: the next change comes before the next decision, and steps of several kinds of
    heat say more of what will be served.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, all steps that are remembered, oldest first.
    interval
        Steps from one decision to the next; while no more are remembered, all are looked at.
    """
    steps = len(heat_TLE)
    ahead = min(interval // 2, steps // 4)
    if steps <= interval or ahead < 1 or steps - ahead < SHORTEST:
        return steps
    aheads = [ahead]
    while aheads[-1] // 2 >= SHORTEST:
        aheads.append(aheads[-1] // 2)
    forecast, *finer = _forecasts(heat_TLE, aheads)
    longest = forecast.longest(_AS_GOOD)
    since_change = min([longest, *(one.longest(_FAR_WORSE) for one in finer)])
    if since_change == longest or not _lasted(heat_TLE[: steps - since_change], interval):
        return longest
    return since_change


def paying_steps(remembered: int, interval: int) -> float | None:
    """Steps within which moves of a decision by the clock must pay; ``None`` for as many as it looks at.

    A longer look back is no longer time for moves to pay.

    Parameters
    ----------
    remembered
        Steps that the decision may look at.
    interval
        Steps from one decision to the next.
    """
    return float(interval) if remembered > interval else None


def _lasted(heat_TLE: Counts, interval: int) -> bool:
    """Whether the newest of this heat has been what it is for an interval, or as long as is remembered."""
    ahead = max(min(interval // 4, len(heat_TLE) // 8), SHORTEST // 2)
    return stationary_steps(heat_TLE, ahead) >= min(interval, len(heat_TLE))


def _forecasts(heat_TLE: Counts, aheads: Sequence[int]) -> list[_Forecast]:
    """Squared errors of all stretches, for each number of steps ahead; every step is read once."""
    steps = len(heat_TLE)
    lengths_A = [_stretches(steps - ahead) for ahead in aheads]
    ends = {ahead + length for ahead, lengths in zip(aheads, lengths_A, strict=True) for length in lengths}
    newest_LE = _summed_parts(heat_TLE, sorted({*aheads, *ends}))
    found = []
    for ahead, lengths in zip(aheads, lengths_A, strict=True):
        came_LE = newest_LE[ahead] / ahead
        size_L = np.maximum((came_LE**2).sum(axis=1), 1e-30)
        errors = []
        for length in lengths:
            missed_LE = (newest_LE[ahead + length] - newest_LE[ahead]) / length - came_LE
            errors.append(float(((missed_LE**2).sum(axis=1) / size_L).mean()))
        found.append(_Forecast(ahead, lengths, errors))
    return found


def _stretches(before: int) -> list[int]:
    """Lengths of the stretches that are tried where there are so many steps: each twice the one before, then all."""
    doubled = [SHORTEST << power for power in range(before.bit_length())]
    return [length for length in doubled if length < before] + [before]


def _summed_parts(heat_TLE: Counts, lengths: Sequence[int]) -> dict[int, Float64]:
    """Each expert's part of the tokens, summed over so many newest steps, float64 ``[L, E]``; lengths ascend."""
    steps, newest = len(heat_TLE), 0
    inverse_TL = 1.0 / np.maximum(heat_TLE.sum(axis=2, dtype=np.float64), 1.0)
    sums: dict[int, Float64] = {}
    total_LE = np.zeros(heat_TLE.shape[1:])
    for length in lengths:
        part = slice(steps - length, steps - newest)
        total_LE = total_LE + np.einsum("tle,tl->le", heat_TLE[part], inverse_TL[part])
        sums[length], newest = total_LE, length
    return sums
