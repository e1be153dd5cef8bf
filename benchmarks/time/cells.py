"""The cells: each heat on each expert-parallel size and number of slots, left alone, tokens balanced, time lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.time.heats import CellHeat
from benchmarks.time.scoring import slowest_us
from eplb_service.cost.curve import CostCurve
from eplb_service.offline import solve
from eplb_service.placement import Placement
from eplb_service.solver.significance import standard_error

MORE_SLOTS = (0, 1, 2)
"""Slots per rank beyond the fewest that hold all experts."""


@dataclass(frozen=True)
class Cell:
    """One cell; times are microseconds of the slowest rank, mean over steps and layers.

    Parameters
    ----------
    heat, tokens, ranks, slots, more
        Where: the heat's name, tokens of a step, R, S, and the slots beyond the fewest.
    off, balanced, timed
        On the window that was planned on: experts in order, tokens balanced, time lowered.
    off_next, balanced_next, timed_next
        The same on the next window.
    noise_next
        Standard error of ``timed_next`` less the better of the others, over the steps of the next window, of which
        neighbours resemble each other.
    seed
        Of the heat.
    """

    heat: str
    tokens: int
    ranks: int
    slots: int
    more: int
    off: float
    balanced: float
    timed: float
    off_next: float
    balanced_next: float
    timed_next: float
    noise_next: float
    seed: int = 0

    @property
    def better(self) -> float:
        """The better of left alone and balanced, on the window."""
        return min(self.off, self.balanced)

    @property
    def better_next(self) -> float:
        """The same on the next window."""
        return min(self.off_next, self.balanced_next)


def cells(heat: CellHeat, ranks: Sequence[int], curve: CostCurve) -> Iterator[Cell]:
    """Every cell of one heat that its experts fit."""
    window_TLE, next_TLE, _ = np.array_split(heat.heat_TLE, 3)
    _, layers, experts = heat.heat_TLE.shape
    for count in ranks:
        fewest = -(-experts // count)
        for more in MORE_SLOTS:
            slots = fewest + more
            if slots > experts or count > experts:
                continue
            first = Placement.linear(layers, experts, count, slots)
            balanced = solve(window_TLE, count, slots)
            timed = solve(window_TLE, count, slots, cost_curve=curve)
            ways = [
                (first.phy2log_LRS, first.default_log2phy()),
                (balanced.phy2log, balanced.log2phy),
                (timed.phy2log, timed.log2phy),
            ]
            seen = [slowest_us(window_TLE, *way, curve).mean() for way in ways]
            steps_next = [slowest_us(next_TLE, *way, curve).mean(axis=1) for way in ways]
            others = min(steps_next[:2], key=lambda us_T: float(us_T.mean()))
            noise = standard_error(steps_next[2] - others)
            later = [us_T.mean() for us_T in steps_next]
            times = map(float, [*seen, *later])
            yield Cell(heat.name, heat.tokens, count, slots, more, *times, noise, heat.seed)
