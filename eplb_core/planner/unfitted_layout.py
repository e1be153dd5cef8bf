"""Detect layouts that were not fitted to heat, such as experts in linear order or a different model's placement.

The solver places such layers from scratch, regardless of the cost of moves. Incremental improvement would preserve much
of an arbitrary layout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Placement, mean_par
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.score import par_of_steps, split_steps

_UNFITTED_RATIO = 0.7
"""Minimum avoidable imbalance at which a deployment counts as unfitted, relative to the mean over shuffled layouts.

On the four kinds of heat in ``make bench-solver`` (256 experts on 32 ranks x 9 slots and 64 ranks x 5 slots, seeds 0
and 1), individual shuffled layouts have 0.73 to 1.35 times that mean. Layouts from ``flashlb`` and ``deepseek`` have
0.01 to 0.46 times that mean, one to five windows of 256 steps after they were made. With 32 experts on 8 ranks x 5
slots, the ranges are 0.56 to 1.49 and 0.05 to 0.59, except on drifting heat, where layouts from both policies reach
0.86. If such a layout is placed from scratch, only the cost of its moves is wasted.
"""
_MIN_AVOIDABLE = 0.05
"""Avoidable imbalance of shuffled layouts at or below which no layout counts as unfitted, because all are good enough.
"""
_MIN_STEPS = 16
"""Minimum number of steps on which layouts are compared. For a while after a workload change, a fitted layout may be as
bad as a shuffled one."""
_SHUFFLES = 4
"""Number of shuffled layouts to compare with."""
_MAX_STEPS = 32
"""Maximum number of recent steps on which layouts are compared."""
_MAX_LAYERS = 8
"""Maximum number of layers, evenly spaced, on which layouts are compared."""


def unfitted_layers(request: SolveRequest, floor_L: Float64) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers whose layout was not fitted to heat, bool ``[L]``.

    These are the layers whose balance on the newest steps is exactly that of experts in linear order. If the deployment
    as a whole is hardly better than shuffled layouts, all layers are included.

    With expert groups, only layers with experts in linear order are detected. Any other layout that keeps the groups on
    their nodes was at least designed for that purpose.

    Parameters
    ----------
    request
        Inputs of the decision, with the heat and the current layout.
    floor_L
        float64 ``[L]``, noise floor of each layer's steps.
    """
    comparison = _Comparison(request)
    unfitted_L = comparison.linear_layers()
    if request.settings.expert_groups is None and request.window.steps >= _MIN_STEPS and not unfitted_L.all():
        unfitted_L |= comparison.is_like_shuffled(floor_L)
    return unfitted_L


class _Comparison:
    """PAR of the newest steps under the current layout and under layouts that were not fitted to heat."""

    def __init__(self, request: SolveRequest) -> None:
        placement = request.placement
        self._request = request
        self._newest_TLE = request.window.heat_TLE[-_MAX_STEPS:]
        self._linear = Placement.linear(1, placement.experts, placement.ranks, placement.slots)
        self._rule_R1E = self._linear.default_log2phy()

    def linear_layers(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the layers equivalent to experts in linear order with the default tables, bool ``[L]``."""
        placement = self._request.placement
        log2phy_RLE = self._request.log2phy_RLE
        # The order of the slots on a rank has no effect on its load.
        linear_1RS = np.sort(self._linear.phy2log_LRS, axis=2)
        linear_L: npt.NDArray[np.bool_] = (np.sort(placement.phy2log_LRS, axis=2) == linear_1RS).all(
            axis=(1, 2)
        )
        unchanged_L = np.zeros_like(linear_L)
        if log2phy_RLE.ndim == self._rule_R1E.ndim:
            # These layers have not changed since the model was loaded, so there is nothing to compare.
            unchanged_L = (placement.phy2log_LRS == self._linear.phy2log_LRS).all(axis=(1, 2))
            unchanged_L &= (log2phy_RLE == self._rule_R1E).all(axis=(0, 2))
        compared_K = np.flatnonzero(linear_L & ~unchanged_L)
        if compared_K.size:
            in_order_E = np.arange(placement.experts)
            current_K = self._current_par(compared_K)
            linear_K = self._linear_par(compared_K, in_order_E)
            linear_L[compared_K] = np.isclose(current_K, linear_K, rtol=1e-9, atol=0.0)
        return linear_L

    def is_like_shuffled(self, floor_L: Float64) -> bool:
        """Return True if the deployment's avoidable imbalance is close to the mean over shuffled layouts."""
        request = self._request
        experts = request.placement.experts
        layer_K = np.unique(np.linspace(0, request.window.layers - 1, _MAX_LAYERS).astype(np.int64))
        floor = float(mean_par(floor_L[layer_K]))
        current_avoidable = float(mean_par(self._current_par(layer_K))) - floor
        if current_avoidable < _UNFITTED_RATIO * _MIN_AVOIDABLE:
            return False
        pars = []
        for seed in range(_SHUFFLES):
            shuffled_E = np.random.default_rng(seed).permutation(experts)
            pars.append(self._linear_par(layer_K, shuffled_E))
        shuffled_avoidable = float(mean_par(np.mean(pars, axis=0))) - floor
        return (
            shuffled_avoidable > _MIN_AVOIDABLE and current_avoidable >= _UNFITTED_RATIO * shuffled_avoidable
        )

    def _current_par(self, layer_K: npt.NDArray[np.int64]) -> Float64:
        """Return the mean PAR of the newest steps under the current layout, float64 ``[K]``."""
        request = self._request
        source_RLE = request.window.source_RLE
        current = Placement(request.placement.phy2log_LRS[layer_K], request.placement.experts)
        served = split_steps(
            self._newest_TLE[:, layer_K],
            current,
            request.log2phy_RLE[:, layer_K],
            None if source_RLE is None else source_RLE[:, layer_K],
            request.settings.split,
        )
        return par_of_steps(served)

    def _linear_par(self, layer_K: npt.NDArray[np.int64], order_E: npt.NDArray[np.int64]) -> Float64:
        """Return the mean PAR of the newest steps with experts placed in the order ``order_E``, float64 ``[K]``."""
        source_RLE = self._request.window.source_RLE
        phy2log_KRS = self._linear.phy2log_LRS.repeat(layer_K.size, axis=0)
        served = split_steps(
            self._newest_TLE[:, layer_K][..., order_E],
            Placement(phy2log_KRS, self._request.placement.experts),
            self._rule_R1E.repeat(layer_K.size, axis=1),
            None if source_RLE is None else source_RLE[:, layer_K][..., order_E],
            self._request.settings.split,
        )
        return par_of_steps(served)
