"""The cells: each heat on each expert-parallel size and number of slots, left alone, tokens balanced, time lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.time.heats import CellHeat
from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Placement
from eplb_core.solver.window import standard_error
from eplb_service.offline import solve

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


Float64 = npt.NDArray[np.float64]


def slowest_us(
    heat_TLE: npt.NDArray[np.integer],
    phy2log_LRS: npt.NDArray[np.integer],
    log2phy_RLE: npt.NDArray[np.integer],
    curve: CostCurve,
) -> Float64:
    """Microseconds of each layer's slowest rank in each step, float64 ``[T, L]``; sources send alike."""
    layers, ranks, slots = phy2log_LRS.shape
    us_TL = np.empty((len(heat_TLE), layers))
    for layer in range(layers):
        sources_P = np.zeros(ranks * slots)
        for table_E in log2phy_RLE[:, layer]:
            np.add.at(sources_P, table_E, 1.0)
        tokens_TP = heat_TLE[:, layer, phy2log_LRS[layer].ravel()] * (sources_P / len(log2phy_RLE))
        busy_TP = tokens_TP > 0
        cost_TP = np.where(
            busy_TP, np.maximum(curve.read_us, curve.launch_us + curve.slope_us * tokens_TP), 0.0
        )
        us_TL[:, layer] = curve.floor_us + cost_TP.reshape(-1, ranks, slots).sum(axis=2).max(axis=1)
    return us_TL + curve.batch_us * heat_TLE.sum(axis=2)


CONFIDENCE = 0.95
"""With which nothing is called slower by chance: in all cells of a run together."""


def errors_allowed(replicates: int, comparisons: int) -> float:
    """Standard errors over so many replicates that a mean is above 0 by chance in one of so many comparisons.

    Student's quantile at Bonferroni's share of what ``CONFIDENCE`` leaves.
    """
    share = (1.0 - CONFIDENCE) / max(comparisons, 1)
    return float(stats.t.ppf(1.0 - share, max(replicates - 1, 1)))


_EQUAL = 1e-6
"""Part of the time below which two ways take the same, but for rounding."""
_WINDOW = 128
"""Steps of the next window, the replicates where one seed alone was drawn."""


@dataclass(frozen=True)
class Later:
    """One cell of all seeds, on the window after.

    Parameters
    ----------
    heat, tokens, ranks, more
        Which cell.
    slower
        Part of the time by which it was slower than the better of the others, in the mean over the seeds.
    error
        Standard error of that: over the seeds or, where there is one, over steps, whose neighbours resemble each other.
    replicates
        Seeds, or steps.
    """

    heat: str
    tokens: int
    ranks: int
    more: int
    slower: float
    error: float
    replicates: int

    def is_shown(self, comparisons: int) -> bool:
        """Whether it is shown to be slower, as one of so many cells."""
        return self.slower > _EQUAL + errors_allowed(self.replicates, comparisons) * self.error


def compared(found: Sequence[Cell]) -> list[Later]:
    """One for each cell; seeds are drawn afresh, so that their scatter holds that of heat and of placements too."""
    cells_of: dict[tuple[str, int, int, int], list[Cell]] = {}
    for cell in found:
        cells_of.setdefault((cell.heat, cell.tokens, cell.ranks, cell.more), []).append(cell)
    return [Later(*key, *_slower(cells)) for key, cells in cells_of.items()]


def _slower(cells: Sequence[Cell]) -> tuple[float, float, int]:
    if len(cells) == 1:
        (cell,) = cells
        return cell.timed_next / cell.better_next - 1, cell.noise_next / cell.better_next, _WINDOW
    others_2D = np.array([[getattr(cell, name) for cell in cells] for name in ("off_next", "balanced_next")])
    better_D = others_2D[others_2D.mean(axis=1).argmin()]
    slower_D = np.array([cell.timed_next for cell in cells]) / better_D - 1
    return float(slower_D.mean()), float(slower_D.std(ddof=1)) / len(cells) ** 0.5, len(cells)
