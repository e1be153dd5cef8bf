"""How far back heat is still what it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_OTHER_HEAT = 4.0
"""How many times the error of a stretch of a few steps the error of all steps before must be for that stretch to be of
other heat. Chosen between 2.6, the most at any departure of bursty heat (seeds 0 to 2) and of gpt-oss-20b decoding, and
11 and 27, the least where heat drifted and where workloads took turns (``make bench-decide``)."""


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


def has_changed(heat_TLE: Counts, since: int) -> bool:
    """Whether the newest ``since`` steps are of other heat than those before: no burst, which resembles itself as well.

    Their newer half is forecast by their older half, and by all steps before. What drawing tokens alone makes of either
    error is taken off, and of the latter as much must be left. True where there is nothing to compare.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, all steps that are remembered, oldest first.
    since
        Newest steps that may be of other heat.
    """
    steps, ahead = len(heat_TLE), since // 2
    if ahead < 1 or since >= steps:
        return True
    newest_LE = _summed_parts(heat_TLE, (ahead, since, steps))
    lengths = since - ahead, steps - ahead
    by_stretch, by_all = _forecast(newest_LE, ahead, lengths).errors
    drawn_stretch, drawn_all = (
        _drawn(heat_TLE, newest_LE[ahead] / ahead, ahead, length) for length in lengths
    )
    left = by_all - drawn_all
    return left >= max(_OTHER_HEAT * (by_stretch - drawn_stretch), drawn_all)


def _drawn(heat_TLE: Counts, part_LE: Float64, ahead: int, length: int) -> float:
    """The error that a stretch has where only the tokens drawn differ, each expert's part being ``part_LE``."""
    tokens_TL = heat_TLE[len(heat_TLE) - 2 * ahead :].sum(axis=2, dtype=np.float64)
    inverse_L = (1.0 / np.maximum(tokens_TL, 1.0)).mean(axis=0)
    size_L = (part_LE**2).sum(axis=1)
    scatter_L = (1.0 - size_L) * inverse_L * (1.0 / ahead + 1.0 / length)
    return float((scatter_L / np.maximum(size_L, 1e-30)).mean())


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
    return [_forecast(newest_LE, ahead, lengths) for ahead, lengths in zip(aheads, lengths_A, strict=True)]


def _forecast(newest_LE: Mapping[int, Float64], ahead: int, lengths: Sequence[int]) -> _Forecast:
    """How well stretches forecast the newest steps, given the sums over all steps from either's beginning on."""
    came_LE = newest_LE[ahead] / ahead
    size_L = np.maximum((came_LE**2).sum(axis=1), 1e-30)
    errors = []
    for length in lengths:
        missed_LE = (newest_LE[ahead + length] - newest_LE[ahead]) / length - came_LE
        errors.append(float(((missed_LE**2).sum(axis=1) / size_L).mean()))
    return _Forecast(ahead, lengths, errors)


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
