"""Figures for all layers under the current layout, measured before any layer is solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.cost.devices import knee_tokens
from eplb_core.placement import Float64, mean_par, par
from eplb_core.planner.holdout import SMALL_BATCH
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.score import (
    ServedWindow,
    drawn_par,
    expected_loads,
    noise_floor,
    par_by_step,
    sampling_floor,
    slowest_rank_us,
    split_steps,
    volatility_bound,
)
from eplb_core.planner.settings import STEP

_MIN_READING_STEPS = 0.95
"""Minimum fraction of steps with few tokens at which a layer is left unchanged. The margin tolerates short prefills
between decode steps."""


@dataclass(frozen=True)
class LayerFigures:
    """Figures for all layers under the current layout, on which a decision is based.

    Parameters
    ----------
    request
        Inputs of the decision.
    move_price
        Gain required to move every slot of a layer, as a fraction of its PAR.
    why_ungrouped
        Reason why the requested expert groups cannot be kept on nodes; empty if they can, or if none are requested.
    par_TL
        float64 ``[T, L]``, PAR of each step; NaN if there are no tokens.
    par_L
        float64 ``[L]``, mean PAR of the steps.
    floor_L
        float64 ``[L]``, noise floor of the steps; see ``score.sampling_floor``.
    episode_par_L
        float64 ``[L]``, mean PAR of the episodes; 1 if there are no tokens.
    bound_L
        float64 ``[L]``, PAR that balanced ranks would have in episodes because of token sampling and the experts'
        volatility.
    us_L
        float64 ``[L]``, the slowest rank's time per step in microseconds; NaN if there are no tokens or no cost curve.
    small_batch_L
        bool ``[L]``, True for layers whose steps have so few tokens that changes need a hold-out; see
        ``planner.holdout``.
    reading_L
        bool ``[L]``, True for layers that are memory-bound: their experts receive so few tokens that weight reads
        determine the step time.
    """

    request: SolveRequest
    move_price: float
    why_ungrouped: str
    par_TL: Float64
    par_L: Float64
    floor_L: Float64
    episode_par_L: Float64
    bound_L: Float64
    us_L: Float64
    small_batch_L: npt.NDArray[np.bool_]
    reading_L: npt.NDArray[np.bool_]


def measure_layers(request: SolveRequest, move_price: float, why_ungrouped: str) -> LayerFigures:
    """Measure all layers under the current layout: per step for the verdicts, and per episode for the decision.

    Parameters
    ----------
    request
        Inputs of the decision.
    move_price
        Gain required to move every slot of a layer, as a fraction of its PAR.
    why_ungrouped
        Reason why the requested expert groups cannot be kept on nodes; empty if they can, or if none are requested.
    """
    window = request.window
    settings = request.settings
    layout = request.placement, request.log2phy_RLE, window.source_RLE, settings.split
    served = split_steps(window.heat_TLE, *layout, episodes=request.episodes)
    par_TL = par_by_step(served)
    small_batch_L = _small_batch_layers(request, served)
    if small_batch_L.any():
        drawn_TL = drawn_par(window.heat_TLE, *layout)
        par_TL[:, small_batch_L] = centre_on_draws(par_TL, drawn_TL)[:, small_batch_L]
    par_L = mean_par(par_TL, axis=0)
    if settings.split == STEP:
        # Every step is balanced separately, so neither token sampling nor the experts' volatility raises the floor.
        floor_L = np.where(np.isnan(par_L), np.nan, 1.0)
        bound_L = np.ones(window.layers)
    else:
        floor_L = sampling_floor(served)
        bound_L = _episode_bound(request, served)
    us_L = np.full(window.layers, np.nan)
    if settings.cost_curve is not None:
        us_L = mean_par(slowest_rank_us(window.heat_TLE, *layout, settings.cost_curve), axis=0)
    return LayerFigures(
        request,
        move_price,
        why_ungrouped,
        par_TL,
        par_L,
        floor_L,
        episode_par_L=_episode_par(request, served),
        bound_L=bound_L,
        us_L=us_L,
        small_batch_L=small_batch_L,
        reading_L=_reading_layers(request),
    )


def centre_on_draws(par_TL: Float64, drawn_TL: Float64) -> Float64:
    """Shift the PARs of the steps, which come from a single draw of whole tokens, to the mean of several draws.

    The result varies between steps as much as served steps do, but its mean depends less on the random numbers.

    Examples
    --------
    >>> centre_on_draws(np.array([[1.2], [1.4]]), np.array([[1.35], [1.35]])).round(2).tolist()
    [[1.25], [1.45]]
    """
    centred_TL: Float64 = par_TL + (mean_par(drawn_TL, axis=0) - mean_par(par_TL, axis=0))
    return centred_TL


def _small_batch_layers(request: SolveRequest, served: ServedWindow) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers with few tokens per step, bool ``[L]``.

    No layer is included if the host splits by step, because such a host splits few tokens as evenly as many.
    """
    busy_steps_L = np.maximum((served.tokens_TK > 0).sum(axis=0), 1)
    mean_tokens_L = served.tokens_TK.sum(axis=0) / busy_steps_L
    small_batch_L: npt.NDArray[np.bool_] = mean_tokens_L <= SMALL_BATCH * request.placement.ranks
    return small_batch_L & (request.settings.split != STEP)


def _episode_par(request: SolveRequest, served: ServedWindow) -> Float64:
    """Return the mean PAR of the episodes, float64 ``[L]``; 1 for a layer without tokens."""
    window = request.window
    settings = request.settings
    loads_NLR = served.loads_NKR
    if settings.split == STEP or request.order is not None:
        heat_NLE = request.episode_heat(np.arange(window.layers)).transpose(1, 0, 2)
        loads_NLR = expected_loads(
            heat_NLE, request.placement, request.log2phy_RLE, window.source_RLE, settings.split
        )
    return np.nan_to_num(par(loads_NLR), nan=1.0)


def _episode_bound(request: SolveRequest, served: ServedWindow) -> Float64:
    """Return the PAR that balanced ranks are expected to have in episodes, float64 ``[L]``.

    The bound is 1 for a layer without tokens, where nothing can be gained.
    """
    if request.episodes > 1:
        return volatility_bound(served)
    floor_L = noise_floor(served.loads_NKR.sum(axis=2), request.placement.ranks)
    return np.nan_to_num(floor_L, nan=1.0)


def _reading_layers(request: SolveRequest) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers estimated to be memory-bound on the device, bool ``[L]``.

    In nearly all steps of such a layer, no expert has more tokens than the knee of the device's curve, so weight reads
    determine the step time. No layer qualifies if the deployment's cost curve is known.
    """
    window = request.window
    settings = request.settings
    topology = request.topology
    knee = None
    if settings.cost_curve is None and settings.estimate_device and request.search.warm:
        knee = knee_tokens(topology.device, topology.bytes_per_expert)
    if knee is None:
        return np.zeros(window.layers, dtype=np.bool_)
    few_TL = window.heat_TLE.max(axis=2) <= knee
    reading_L: npt.NDArray[np.bool_] = few_TL.mean(axis=0) >= _MIN_READING_STEPS
    return reading_L
