"""Whether lowering time was slower on the window after than the better of left alone and tokens balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.time.cells import Cell
from benchmarks.time.confidence import errors_allowed

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
