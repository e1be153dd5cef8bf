"""Cells of the benchmark: each heat with each rank count and slot count, under three placements.

The placements are: experts in order, balanced for tokens, and planned for time.
"""

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
"""Slots per rank in addition to the minimum for all experts."""


@dataclass(frozen=True)
class Cell:
    """One cell. Times are microseconds of the slowest rank, as means over steps and layers.

    Parameters
    ----------
    heat
        Name of the heat.
    tokens
        Tokens per step.
    ranks
        Number of ranks, R.
    slots
        Slots per rank, S.
    more
        Slots per rank in addition to the minimum.
    off
        Time with experts in order, on the planning window.
    balanced
        Time with balanced tokens, on the planning window.
    timed
        Time with the placement planned for time, on the planning window.
    off_next
        Time with experts in order, on the next window.
    balanced_next
        Time with balanced tokens, on the next window.
    timed_next
        Time with the placement planned for time, on the next window.
    noise_next
        Standard error of the difference of ``timed_next`` from ``better_next`` over the steps of the next window,
        corrected for the correlation of adjacent steps.
    seed
        Seed of the heat.
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
        """Shorter of ``off`` and ``balanced``."""
        return min(self.off, self.balanced)

    @property
    def better_next(self) -> float:
        """Shorter of ``off_next`` and ``balanced_next``."""
        return min(self.off_next, self.balanced_next)


def cells(heat: CellHeat, ranks: Sequence[int], curve: CostCurve) -> Iterator[Cell]:
    """Yield the cells of one heat, skipping sizes with more ranks or slots per rank than experts."""
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
            layouts = [
                (first.phy2log_LRS, first.default_log2phy()),
                (balanced.phy2log, balanced.log2phy),
                (timed.phy2log, timed.log2phy),
            ]
            seen = [slowest_us(window_TLE, *layout, curve).mean() for layout in layouts]
            steps_next = [slowest_us(next_TLE, *layout, curve).mean(axis=1) for layout in layouts]
            better_T = min(steps_next[:2], key=lambda us_T: float(us_T.mean()))
            noise = standard_error(steps_next[2] - better_T)
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
    """Return the microseconds of each layer's slowest rank per step, float64 ``[T, L]``.

    All source ranks are assumed to send the same number of tokens to each expert.
    """
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
"""Probability that no cell of a run is called slower only by chance."""


def errors_allowed(replicates: int, comparisons: int) -> float:
    """Return the number of standard errors that a mean must exceed to be significant.

    This is the quantile of Student's t-distribution, with a Bonferroni correction for the number of comparisons.

    Parameters
    ----------
    replicates
        Number of values in the mean.
    comparisons
        Number of comparisons in the run.

    Examples
    --------
    >>> round(errors_allowed(replicates=10, comparisons=1), 2)
    1.83
    >>> round(errors_allowed(replicates=10, comparisons=100), 2)
    4.78
    """
    share = (1.0 - CONFIDENCE) / max(comparisons, 1)
    return float(stats.t.ppf(1.0 - share, max(replicates - 1, 1)))


_EQUAL = 1e-6
"""Relative difference up to which two times count as equal, to allow for rounding."""
_WINDOW = 128
"""Steps of the next window, which are the replicates if there is only one seed."""


@dataclass(frozen=True)
class Later:
    """Comparison of one cell on the next window, over all seeds.

    Parameters
    ----------
    heat
        Name of the heat.
    tokens
        Tokens per step.
    ranks
        Number of ranks.
    more
        Slots per rank in addition to the minimum.
    slower
        Relative excess of the time over the better of the two alternatives, as the mean over the seeds.
    error
        Standard error of ``slower`` over the seeds. With a single seed it is taken over the steps and corrected for
        the correlation of adjacent steps.
    replicates
        Number of seeds or, with a single seed, of steps.
    """

    heat: str
    tokens: int
    ranks: int
    more: int
    slower: float
    error: float
    replicates: int

    def is_shown(self, comparisons: int) -> bool:
        """Return True if the cell is significantly slower, given the number of cells compared."""
        return self.slower > _EQUAL + errors_allowed(self.replicates, comparisons) * self.error


def compared(found: Sequence[Cell]) -> list[Later]:
    """Return one comparison per cell.

    Each seed has its own heat and placements, so the scatter over the seeds includes both.
    """
    cells_of: dict[tuple[str, int, int, int], list[Cell]] = {}
    for cell in found:
        cells_of.setdefault((cell.heat, cell.tokens, cell.ranks, cell.more), []).append(cell)
    return [Later(*key, *_slower(cells)) for key, cells in cells_of.items()]


def _slower(cells: Sequence[Cell]) -> tuple[float, float, int]:
    if len(cells) == 1:
        (cell,) = cells
        return cell.timed_next / cell.better_next - 1, cell.noise_next / cell.better_next, _WINDOW
    alternatives_2D = np.array(
        [[getattr(cell, name) for cell in cells] for name in ("off_next", "balanced_next")]
    )
    better_D = alternatives_2D[alternatives_2D.mean(axis=1).argmin()]
    slower_D = np.array([cell.timed_next for cell in cells]) / better_D - 1
    return float(slower_D.mean()), float(slower_D.std(ddof=1)) / len(cells) ** 0.5, len(cells)
