"""How far back heat is still what it is now."""

from __future__ import annotations

import numpy as np

from eplb_service.heat.window import Counts

SHORTEST = 16
"""Steps below which no stretch is looked at."""
_AS_GOOD = 1.1
"""Part of the least squared error of a forecast up to which a longer stretch is as good."""


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
    before = len(heat_TLE) - ahead
    if ahead < 1 or before < SHORTEST:
        return len(heat_TLE)
    tokens_TL1 = heat_TLE.sum(axis=2, keepdims=True, dtype=np.float64)
    part_TLE = heat_TLE / np.maximum(tokens_TL1, 1.0)
    came_LE = part_TLE[before:].mean(axis=0)
    size_L = np.maximum((came_LE**2).sum(axis=1), 1e-30)
    lengths = [SHORTEST << power for power in range(before.bit_length()) if SHORTEST << power < before] + [
        before
    ]
    errors = []
    for length in lengths:
        forecast_LE = part_TLE[before - length : before].mean(axis=0)
        errors.append(float((((forecast_LE - came_LE) ** 2).sum(axis=1) / size_L).mean()))
    bound = _AS_GOOD * min(errors)
    longest = max(length for length, error in zip(lengths, errors, strict=True) if error <= bound)
    return longest + ahead


def looked_back(heat_TLE: Counts, interval: int) -> int:
    """How many of the newest steps a decision by the clock looks at: as far back as heat is still what it is now.

    Half an interval is forecast, so that heat which changed within the last one is distinguished from what was before.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, all steps that are remembered, oldest first.
    interval
        Steps from one decision to the next; while no more are remembered, all are looked at.
    """
    steps = len(heat_TLE)
    return steps if steps <= interval else stationary_steps(heat_TLE, min(interval // 2, steps // 4))
