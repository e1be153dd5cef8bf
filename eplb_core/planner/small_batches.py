"""Hold-out for changes to layers with small batches; see ``planner.holdout``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.dealing import tables_of_sources
from eplb_core.planner.holdout import HoldOutResult, Parts, held_out, paying
from eplb_core.planner.layer_figures import LayerFigures
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.solver_call import solve_layers
from eplb_core.solver.engine import SolverError
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import KEEP, Candidate


def hold_out_changes(
    figures: LayerFigures, results: Mapping[int, LayerResult | SolverError], expert_groups: int
) -> dict[int, HoldOutResult]:
    """Evaluate the changes to layers with small batches on steps that the changes were not fitted to.

    If the solver's own hold-out has already fitted a counterpart of the change to the older half of the episodes, that
    counterpart is evaluated. Otherwise, the layer is placed from scratch again, fitted to the training half of the
    window. A layer that followed a recommendation does not need a hold-out.

    Parameters
    ----------
    figures
        Figures for all layers under the current layout.
    results
        Solver results, keyed by layer.
    expert_groups
        Number of expert groups to keep on nodes; 0 for no groups.

    Returns
    -------
    dict of int to HoldOutResult
        Hold-out results, keyed by layer.
    """
    request = figures.request
    changes = {
        layer: result
        for layer, result in results.items()
        if figures.small_batch_L[layer] and isinstance(result, LayerResult) and result.taken != KEEP
    }
    if not changes:
        return {}
    heat_TLE = request.window.heat_TLE
    ordered_TLE = heat_TLE if request.order is None else heat_TLE[request.order]
    halves = Parts.halves(ordered_TLE, request.episodes)
    holdouts = {
        layer: _hold_out(request, halves, layer, result.held)
        for layer, result in changes.items()
        if result.held is not None
    }
    recommendations = request.recommendations
    without_counterpart = [
        layer
        for layer, result in changes.items()
        if result.held is None and not (recommendations and recommendations[layer] is not None)
    ]
    parts = Parts.of(heat_TLE)
    if without_counterpart and parts.fit_TLE.any() and parts.test_TLE.any():
        training = replace(
            request,
            window=Window(parts.fit_TLE, request.window.source_RLE),
            search=replace(request.search, warm=False),
            recommendations=(),
        )
        layer_P = np.array(without_counterpart, np.int64)
        refitted = solve_layers(training, layer_P, figures.floor_L, expert_groups, figures.move_price)
        for layer, result in zip(without_counterpart, refitted, strict=True):
            if isinstance(result, LayerResult):
                holdouts[layer] = _hold_out(request, parts, layer, result.candidate)
    return holdouts


def unpaid_changes(
    figures: LayerFigures,
    results: Mapping[int, LayerResult | SolverError],
    holdouts: Mapping[int, HoldOutResult],
) -> dict[int, str]:
    """Return the layers whose changes do not pay for their moves in the hold-out, with the reason for keeping each.

    Parameters
    ----------
    figures
        Figures for all layers under the current layout.
    results
        Solver results, keyed by layer.
    holdouts
        Hold-out results, keyed by layer.
    """
    request = figures.request
    if not request.search.warm or request.settings.policy != "flashlb":
        return {}
    slots = request.placement.ranks * request.placement.slots
    by_time = request.settings.deciding_curve is not None
    costs = {}
    for layer, result in results.items():
        if isinstance(result, LayerResult) and layer in holdouts:
            # The price is a fraction of the time or, if the gain is measured in PAR, of the PAR.
            price = figures.move_price * (1.0 if by_time else float(figures.par_L[layer]))
            costs[layer] = price * result.candidate.moves / slots
    paying_layers = paying(holdouts, costs, request.settings.min_gain)
    unit = " of the layer's time" if by_time else ""
    return {
        layer: (
            f"kept: on held-out steps with whole tokens, the change gains {holdout.gain:.3f} ± {holdout.error:.3f}"
            f"{unit}, but its moves cost {costs[layer]:.3f}"
        )
        for layer, holdout in holdouts.items()
        if layer not in paying_layers
    }


def with_optimism(result: LayerResult, optimism: float) -> LayerResult:
    """Return a copy of the result with the given optimism, set in its recommendation as well."""
    recommendation = result.recommendation
    if recommendation is not None:
        recommendation = recommendation._replace(optimism=optimism)
    return replace(result, optimism=optimism, recommendation=recommendation)


def _hold_out(request: SolveRequest, parts: Parts, layer: int, candidate: Candidate) -> HoldOutResult:
    """Evaluate a layer's candidate, fitted to the training half of ``parts``, on the held-out half."""
    _, first_G, group_R = request.topology.token_groups()
    experts = request.window.experts
    source_RLE = request.window.source_RLE
    log2phy_RE = tables_of_sources(candidate.log2phy_GE, first_G.size)[group_R]
    return held_out(
        parts,
        layer,
        (Placement(request.placement.phy2log_LRS[layer, None], experts), request.log2phy_RLE[:, layer, None]),
        (Placement(candidate.phy2log_RS[None], experts), log2phy_RE[:, None]),
        None if source_RLE is None else source_RLE[:, layer, None],
        request.settings.split,
        request.settings.deciding_curve,
    )
