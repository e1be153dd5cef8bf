"""Hold-out for small batches: evaluate candidates with whole tokens, on steps that they were not fitted to.

The search balances expected loads in episodes of several steps. If a step has few tokens, the ranks' actual loads
differ from the expected loads. A placement then also scores better on its own window than on later steps, because it is
fitted to experts that happened to be chosen in the same step. On later steps, it may gain nothing at all. Each
candidate for such a layer therefore has a counterpart that is fitted to one half of the window and scored step by step
on the other half.

Large batches do not need this hold-out, because both effects are then below one percent.

With a cost curve, the gain is measured in time instead of PAR. In addition, the change itself, which is fitted to the
whole window, must save time on the steps of the window (``planner.layer_change``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Counts
from eplb_core.placement import Float64, Int32, Placement, mean_par
from eplb_core.planner.score import drawn_par, drawn_us
from eplb_core.solver.whole_tokens import thinned
from eplb_core.solver.window import standard_error

SMALL_BATCH = 512.0
"""Maximum number of expert choices per rank and step at which a layer's changes need a hold-out. With 128 choices,
placements from scratch are 0.7 % worse on the next window than on the one they were fitted to. With 8, they are 3 %
worse, and with 0.5, they are 8 % worse (64 experts on 8 ranks x 10 slots, 192 steps)."""
_MIN_STEPS = 8
"""Minimum number of steps with tokens for splitting the window by time. With fewer, each step's tokens are split."""
_OPTIMISM_LEFT = 0.5
"""Optimism of a fit to the whole window, relative to a fit to half of it. Optimism is inversely proportional to the
number of steps. On synthetic and recorded steps of 1 to 256 tokens, promises are off by at most 2 % with a value of 0.5
and by up to 9 % with 1.0."""
_SURE_ERRORS = 3.0
"""Required margin of a gain over its cost, in standard errors. The test is strict because, with many layers, some would
otherwise move by chance."""


@dataclass(frozen=True)
class Parts:
    """The two halves of a window.

    Parameters
    ----------
    fit_TLE
        ``[T, L, E]``, training half: the heat that candidates are fitted to.
    test_TLE
        ``[T, L, E]``, held-out half: the heat that candidates are evaluated on.
    """

    fit_TLE: Counts
    test_TLE: Counts

    @classmethod
    def of(cls, heat_TLE: Counts) -> Parts:
        """Split a window into older and newer steps, or split each step's tokens if there are too few steps."""
        busy = np.flatnonzero(heat_TLE.any(axis=(1, 2)))
        if busy.size < _MIN_STEPS:
            fit_TLE = thinned(heat_TLE, 0)
            return cls(fit_TLE, heat_TLE - fit_TLE)
        cut = int(busy[busy.size // 2])
        return cls(heat_TLE[:cut], heat_TLE[cut:])

    @classmethod
    def halves(cls, heat_TLE: Counts, episodes: int) -> Parts:
        """Split a window at the same step at which the solver splits its episodes into halves."""
        cut = (episodes // 2) * len(heat_TLE) // episodes
        return cls(heat_TLE[:cut], heat_TLE[cut:])


@dataclass(frozen=True)
class HoldOutResult:
    """Result of a candidate on the held-out half, compared with keeping the layer.

    Parameters
    ----------
    gain_T
        float64 ``[T]``, gain of each held-out step with tokens: in PAR or, with a cost curve, as a share of the current
        layout's mean time.
    error
        Standard error of the mean gain.
    gap
        Increase in the candidate's PAR from the training half to the held-out half.
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
        """Expected increase in PAR from one window to the next, for a candidate fitted to the whole first window."""
        return _OPTIMISM_LEFT * max(self.gap, 0.0)

    def is_sure(self, cost: float) -> bool:
        """Return True if the mean gain exceeds ``cost`` by three standard errors."""
        return self.gain - _SURE_ERRORS * self.error > cost


def held_out(
    parts: Parts,
    layer: int,
    current: tuple[Placement, Int32],
    candidate: tuple[Placement, Int32],
    source_R1E: Float64 | None,
    split: str,
    curve: CostCurve | None = None,
) -> HoldOutResult:
    """Evaluate one layer's candidate on the held-out half of a window.

    Parameters
    ----------
    parts
        The two halves of the window.
    layer
        Index of the layer.
    current
        Deployed placement and tables of this layer; the tables are int32 ``[R, 1, E]``.
    candidate
        Placement and tables of this layer, fitted to the training half.
    source_R1E
        Tokens by source rank in this layer, as for ``token_split.split_shares``.
    split
        One of ``settings.SPLITS``.
    curve
        Cost curve, to measure the gain in time; ``None`` to measure it in PAR.
    """
    layer_1 = np.array([layer])

    def par_T(heat_TLE: Counts, layout: tuple[Placement, Int32]) -> Float64:
        return drawn_par(heat_TLE, *layout, source_R1E, split, layer_1)[:, 0]

    current_T = par_T(parts.test_TLE, current)
    candidate_T = par_T(parts.test_TLE, candidate)
    gap = float(mean_par(candidate_T) - mean_par(par_T(parts.fit_TLE, candidate)))
    busy_T = ~np.isnan(current_T)
    current_T = current_T[busy_T]
    candidate_T = candidate_T[busy_T]
    gain_T = current_T - candidate_T
    if curve is not None:
        current_us_T, candidate_us_T = (
            drawn_us(parts.test_TLE, *layout, source_R1E, split, curve, layer_1)[busy_T, 0]
            for layout in (current, candidate)
        )
        gain_T = (current_us_T - candidate_us_T) / mean_par(current_us_T)
    error = standard_error(gain_T)
    if gain_T.size and gain_T.size < _MIN_STEPS:
        # With so few steps, the measured error is unreliable. Estimate it by assuming that the hottest rank's token
        # count is Poisson-distributed.
        tokens_T = parts.test_TLE[:, layer].sum(axis=1)[busy_T] / current[0].ranks
        error = float(np.sqrt(((current_T + candidate_T) / tokens_T).sum()) / gain_T.size)
    return HoldOutResult(gain_T, error, 0.0 if math.isnan(gap) else gap)


def paying(results: Mapping[int, HoldOutResult], costs: Mapping[int, float], min_gain: float) -> set[int]:
    """Return the layers whose change pays off.

    A change pays off if its mean gain exceeds its cost plus ``min_gain`` by three standard errors. If this also holds
    for the average over all candidates, the standard errors are ignored, and each change only needs a mean gain above
    its cost plus ``min_gain``.

    Parameters
    ----------
    results
        Result of the candidate on the held-out half, keyed by layer.
    costs
        Cost of the layer's moves, in the unit of the gain, keyed by layer.
    min_gain
        Minimum gain of any change.

    Examples
    --------
    A single layer with a gain of 0.05 and a standard error of 0.02 is uncertain. Ten such layers together are not:

    >>> result = HoldOutResult(gain_T=np.full(64, 0.05), error=0.02, gap=0.0)
    >>> costs = {layer: 0.01 for layer in range(10)}
    >>> paying({0: result}, costs, min_gain=0.01)
    set()
    >>> len(paying({layer: result for layer in range(10)}, costs, min_gain=0.01))
    10
    """
    net_gains = [result.gain - costs[layer] for layer, result in results.items()]
    sure_together = False
    if net_gains:
        error = _error_of_mean(list(results.values()))
        sure_together = float(np.mean(net_gains)) - _SURE_ERRORS * error > min_gain
    return {
        layer
        for layer, result in results.items()
        if result.is_sure(costs[layer] + min_gain)
        or (sure_together and result.gain > costs[layer] + min_gain)
    }


def _error_of_mean(results: Sequence[HoldOutResult]) -> float:
    """Return the standard error of the mean gain over several layers, whose gains may be correlated within a step."""
    independent = math.sqrt(sum(result.error**2 for result in results)) / len(results)
    steps = min(result.gain_T.size for result in results)
    if steps < _MIN_STEPS:
        return independent
    mean_T: Float64 = np.mean([result.gain_T[-steps:] for result in results], axis=0)
    return max(standard_error(mean_T), independent)
