"""Check the solver's result for one layer, score it step by step, and accept or reject the change."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import (
    Float64,
    Int32,
    Placement,
    PlacementError,
    check_layer,
    check_log2phy,
    mean_par,
    with_entries,
)
from eplb_core.planner import layer_verdicts
from eplb_core.planner.dealing import host_tables, tables_of_sources
from eplb_core.planner.layer_figures import LayerFigures, centre_on_draws
from eplb_core.planner.plan import LayerPlan
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.score import drawn_par, par_by_step, slowest_rank_us, split_steps
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.engine import OutOfTimeError, SolverError
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import KEEP, Candidate
from eplb_core.solver.topology import choose_senders

_ROUNDING = 1e-9


class LayerOutcome(NamedTuple):
    """Outcome of a decision for one layer that was solved."""

    verdict: LayerVerdict
    """Verdict, with the layer's figures and the reason."""
    change: LayerPlan | None
    """Change to the layer; ``None`` if it is kept."""
    par_T: Float64
    """float64 ``[T]``, PAR of each step in the window under the decided layout; NaN if there are no tokens."""


def layer_outcome(figures: LayerFigures, layer: int, result: LayerResult | SolverError) -> LayerOutcome:
    """Decide whether to accept the change that the solver proposes for a layer.

    Parameters
    ----------
    figures
        Figures for all layers under the current layout.
    layer
        Index of the layer.
    result
        The solver's result for the layer, or the error with which it failed.
    """

    def kept(reason: str) -> LayerOutcome:
        return LayerOutcome(
            layer_verdicts.keep_verdict(figures, layer, reason), None, figures.par_TL[:, layer]
        )

    if isinstance(result, OutOfTimeError):
        return kept(f"waits: {result}")
    if isinstance(result, LayerResult) and result.taken == KEEP:
        return kept("kept: no change pays for its moves on held-out steps")
    request = figures.request
    try:
        if isinstance(result, SolverError):
            raise result
        # A solver bug must not affect the ranks.
        check_layer(result.candidate.phy2log_RS, request.placement.experts)
        check_log2phy(result.candidate.log2phy_GE, result.candidate.phy2log_RS)
    except (SolverError, PlacementError) as error:
        return kept(f"kept: the solver failed ({error})")
    phy2log_RS = result.candidate.phy2log_RS
    scored = _ScoredLayer(request, layer, result.candidate)
    par_T = scored.par_of_steps(has_few_tokens=bool(figures.small_batch_L[layer]))
    curve = request.settings.cost_curve
    us = None if curve is None else scored.slowest_us(curve)
    moves_M5 = choose_senders(
        request.placement.phy2log_LRS[layer].copy(), phy2log_RS, request.topology.nodes_R.copy()
    )
    verdict = layer_verdicts.change_verdict(figures, layer, result, len(moves_M5), float(mean_par(par_T)), us)
    rejection = _rejection(figures, result, verdict, par_T)
    if rejection is not None:
        return kept(rejection)
    return LayerOutcome(verdict, LayerPlan(layer, phy2log_RS, scored.host_tables(), moves_M5), par_T)


def _rejection(
    figures: LayerFigures, result: LayerResult, verdict: LayerVerdict, par_T: Float64
) -> str | None:
    """Return the reason to reject a change, judged on the window's steps, or ``None`` to accept it.

    With a cost curve, the change must save time, because only the curve shows whether better balance outweighs the
    weight reads of additional replicas. Otherwise, it must lower the PAR of the steps. With small batches, the promised
    PAR must not exceed the current one either. With large batches, it may: if heat drifts, the solver's hold-out has
    shown that keeping the layer would do even worse on later steps.
    """
    if figures.request.settings.deciding_curve is not None and verdict.us_planned is not None:
        if _saves_time(figures, verdict.layer, verdict.moves, verdict.us_planned):
            return None
        return f"kept: the change saves too little time for its {verdict.moves} moves ({verdict.reason})"
    if not _is_warm_flashlb(figures.request):
        return None
    # The search lowers the PAR of episodes, which does not guarantee a lower PAR per step. If the change was fitted to
    # heat in which older steps fade, only the newer half of the window counts, because the older half does not predict
    # later steps.
    first = par_T.size // 2 if math.isfinite(result.half_life) else 0
    before = float(mean_par(figures.par_TL[first:, verdict.layer]))
    after = float(mean_par(par_T[first:]))
    if after >= before:
        return f"kept: the change would raise the PAR per step from {before:.3f} to {after:.3f}"
    if figures.small_batch_L[verdict.layer] and verdict.par_planned > verdict.par_seen + _ROUNDING:
        return "kept: with whole tokens, the change gains nothing on the steps in the window"
    return None


def _is_warm_flashlb(request: SolveRequest) -> bool:
    """Return True if the policy is flashlb and plans from the current layout instead of from scratch."""
    return request.search.warm and request.settings.policy == "flashlb"


def _saves_time(figures: LayerFigures, layer: int, moves: int, us: float) -> bool:
    """Return True if the share of time that a change saves exceeds ``min_gain`` and the cost of its moves."""
    placement = figures.request.placement
    move_cost = figures.move_price * moves / (placement.ranks * placement.slots)
    saved_us = figures.us_L[layer] - us
    return bool(saved_us > (figures.request.settings.min_gain + move_cost) * figures.us_L[layer])


class _ScoredLayer:
    """One layer with a candidate's placement and tables, scored on the steps of the window."""

    def __init__(self, request: SolveRequest, layer: int, candidate: Candidate) -> None:
        window = request.window
        _, self._first_G, self._group_R = request.topology.token_groups()
        self._request = request
        self._layer_1 = np.array([layer])
        self._phy2log_RS = candidate.phy2log_RS
        self._log2phy_RE = tables_of_sources(candidate.log2phy_GE, self._first_G.size)[self._group_R]
        self._layout = (
            Placement(candidate.phy2log_RS[None], window.experts),
            self._log2phy_RE[:, None],
            None if window.source_RLE is None else window.source_RLE[:, layer, None],
            request.settings.split,
        )

    def par_of_steps(self, *, has_few_tokens: bool) -> Float64:
        """Return the PAR of each step, float64 ``[T]``; with few tokens, shifted to the mean of several draws."""
        heat_TLE = self._request.window.heat_TLE
        par_T1 = par_by_step(split_steps(heat_TLE, *self._layout, layer_K=self._layer_1))
        if has_few_tokens:
            par_T1 = centre_on_draws(par_T1, drawn_par(heat_TLE, *self._layout, self._layer_1))
        return par_T1[:, 0]

    def slowest_us(self, curve: CostCurve) -> float:
        """Return the mean time per step of the slowest rank, in microseconds."""
        heat_TLE = self._request.window.heat_TLE
        return float(mean_par(slowest_rank_us(heat_TLE, *self._layout, curve, layer_K=self._layer_1)))

    def host_tables(self) -> Int32:
        """Return the tables with the number of entries that the host reads, ``[R, E]`` or ``[R, E, D]``."""
        width = with_entries(self._request.log2phy_RLE, 3).shape[3]
        first_R = self._first_G[self._group_R]
        return host_tables(self._log2phy_RE, self._phy2log_RS, width, self._request.settings.split, first_R)
