"""Hold-out of small batches: candidates are judged with whole tokens, on steps that they were not fitted to.

The search balances expected loads in episodes of several steps. If a step has few tokens, that is not what its ranks
receive. A placement then looks better on its own window than it is, because it is fitted to which experts happened to
meet in one step. It may even gain nothing. So each candidate for such a layer has a counterpart that was fitted to one
part of the window and is scored step by step on the other part.

Large batches need none of this: there, both effects are below one percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eplb_core.heat.window import Counts
from eplb_core.placement import Float64, Int32, Placement, mean_par
from eplb_core.planner.score import drawn_par
from eplb_core.solver.whole_tokens import thinned
from eplb_core.solver.window import standard_error

SMALL_BATCH = 512.0
"""Choices per rank and step up to which layers are held out. At 128, placements from scratch do 0.7 % worse on the next
window than on their own; at 8 it is 3 %, and at 0.5 it is 8 % (64 experts on 8 ranks x 10 slots, 192 steps)."""
_MIN_STEPS = 8
"""Steps with tokens below which the window is not cut in two: the tokens of each step are."""
_OPTIMISM_LEFT = 0.5
"""Part of the optimism of a fit to half of the window that a fit to all of it has: it falls as one over the steps. On
drawn and recorded steps of 1 to 256 tokens, promises made with 0.5 are 2 % off at most, with 1.0 up to 9 %."""
_SURE_ERRORS = 3.0
"""Standard errors by which a gain must exceed its cost. There are many layers, and none should move by chance."""


@dataclass(frozen=True)
class Parts:
    """The two parts of a window, ``[T, L, E]``: what placements are fitted to, and what they are judged on."""

    fit_TLE: Counts
    test_TLE: Counts

    @classmethod
    def of(cls, heat_TLE: Counts) -> Parts:
        """Cut a window: into older and newer steps, or each step's tokens if there are too few steps."""
        busy = np.flatnonzero(heat_TLE.any(axis=(1, 2)))
        if busy.size < _MIN_STEPS:
            fit_TLE = thinned(heat_TLE, 0)
            return cls(fit_TLE, heat_TLE - fit_TLE)
        cut = int(busy[busy.size // 2])
        return cls(heat_TLE[:cut], heat_TLE[cut:])

    @classmethod
    def halves(cls, heat_TLE: Counts, episodes: int) -> Parts:
        """Cut a window where the solver cuts its episodes in half."""
        cut = (episodes // 2) * len(heat_TLE) // episodes
        return cls(heat_TLE[:cut], heat_TLE[cut:])


@dataclass(frozen=True)
class HeldOut:
    """A candidate on steps that it was not fitted to, beside keeping the layer.

    Parameters
    ----------
    gain_T
        float64 ``[t]``, gain of each step with tokens that is judged on, in PAR.
    error
        Standard error of the mean gain.
    gap
        PAR by which the candidate does worse there than on the steps that it was fitted to.
    """

    gain_T: Float64
    error: float
    gap: float

    @property
    def gain(self) -> float:
        """Mean gain; 0 if no step had tokens."""
        return float(self.gain_T.mean()) if self.gain_T.size else 0.0

    @property
    def optimism(self) -> float:
        """PAR by which a candidate that is fitted to the whole window does worse on the next one."""
        return _OPTIMISM_LEFT * max(self.gap, 0.0)

    def is_sure(self, cost: float) -> bool:
        """Return True if the mean gain exceeds ``cost`` by three standard errors."""
        return self.gain - _SURE_ERRORS * self.error > cost


def held_out(
    parts: Parts,
    layer: int,
    kept: tuple[Placement, Int32],
    fitted: tuple[Placement, Int32],
    source_R1E: Float64 | None,
    split: str,
) -> HeldOut:
    """Judge one layer's candidate.

    Parameters
    ----------
    parts
        The window, cut in two.
    layer
        Its index.
    kept, fitted
        Placement of the layer alone, and its tables int32 ``[R, 1, E]``: as deployed, and as fitted to the first part.
    source_R1E, split
        As for ``score.split_shares``.
    """

    def par_T(heat_TLE: Counts, way: tuple[Placement, Int32]) -> Float64:
        return drawn_par(heat_TLE, *way, source_R1E, split, np.array([layer]))[:, 0]

    kept_T, found_T = par_T(parts.test_TLE, kept), par_T(parts.test_TLE, fitted)
    gap = float(mean_par(found_T) - mean_par(par_T(parts.fit_TLE, fitted)))
    busy_T = ~np.isnan(kept_T)
    kept_T, found_T = kept_T[busy_T], found_T[busy_T]
    gain_T = kept_T - found_T
    error = standard_error(gain_T)
    if gain_T.size and gain_T.size < _MIN_STEPS:
        # So few steps do not show how much they scatter. At the least, the hottest ranks' counts are Poisson.
        tokens_T = parts.test_TLE[:, layer].sum(axis=1)[busy_T] / kept[0].ranks
        error = float(np.sqrt(((kept_T + found_T) / tokens_T).sum()) / gain_T.size)
    return HeldOut(gain_T, error, 0.0 if math.isnan(gap) else gap)


def paying(found: Mapping[int, HeldOut], costs: Mapping[int, float], min_gain: float) -> set[int]:
    """Return the layers whose gain pays.

    A layer pays by itself if its own gain is sure. If the gain of all candidates together is sure, each pays whose mean
    gain exceeds its cost.

    Parameters
    ----------
    found, costs
        By layer: the candidate on the steps held out, and the PAR that its moves must gain.
    min_gain
        PAR that any change must gain.
    """
    own = [found[layer].gain - costs[layer] for layer in found]
    together = (
        bool(own) and float(np.mean(own)) - _SURE_ERRORS * _error_together(list(found.values())) > min_gain
    )
    return {
        layer
        for layer, one in found.items()
        if one.is_sure(costs[layer] + min_gain) or (together and one.gain > costs[layer] + min_gain)
    }


def _error_together(found: Sequence[HeldOut]) -> float:
    """Return the standard error of the mean gain of several layers, whose steps resemble each other."""
    independent = math.sqrt(sum(one.error**2 for one in found)) / len(found)
    steps = min(one.gain_T.size for one in found)
    if steps < _MIN_STEPS:
        return independent
    mean_T: Float64 = np.mean([one.gain_T[-steps:] for one in found], axis=0)
    return max(standard_error(mean_T), independent)
