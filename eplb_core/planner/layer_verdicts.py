"""Verdicts on layers: figures before and after a decision, and a one-line reason for operators."""

from __future__ import annotations

import math
from dataclasses import replace

from eplb_core.cost.devices import knee_tokens
from eplb_core.planner.layer_figures import LayerFigures
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import FRESH, TABLES


def keep_verdict(figures: LayerFigures, layer: int, reason: str) -> LayerVerdict:
    """Return the verdict on a layer that is kept."""
    par = float(figures.par_L[layer])
    floor = float(figures.floor_L[layer])
    us = float(figures.us_L[layer])
    us_seen = None if math.isnan(us) else us
    return LayerVerdict(layer, par, par, floor, 0, False, reason, us_seen=us_seen, us_planned=us_seen)


def unselected_verdict(figures: LayerFigures, layer: int) -> LayerVerdict:
    """Return the verdict on a layer that was not selected for solving."""
    return keep_verdict(figures, layer, _reason_not_selected(figures, layer))


def change_verdict(
    figures: LayerFigures, layer: int, result: LayerResult, moves: int, par: float, us: float | None
) -> LayerVerdict:
    """Return the verdict on a layer that changes.

    The promised PAR is the window's PAR plus the optimism. Unless the change was held out, the promise is at least the
    noise floor or the current PAR, whichever is lower, because the next window is a different draw of tokens. The
    hold-out already accounts for that.

    Parameters
    ----------
    figures
        Figures for all layers under the current layout.
    layer
        Index of the layer.
    result
        The solver's result for the layer.
    moves
        Number of slots that receive weights.
    par
        Mean PAR of the window's steps under the new layout.
    us
        The slowest rank's time per step under the new layout, in microseconds; ``None`` if there is no cost curve.
    """
    before = keep_verdict(figures, layer, "")
    was_held_out = bool(figures.small_batch_L[layer]) and result.held is not None
    least_par = 1.0
    if figures.request.search.warm and not was_held_out:
        least_par = min(before.noise_floor, before.par_seen)
    return replace(
        before,
        par_planned=max(par + (result.optimism or 0.0), least_par),
        moves=moves,
        changed=True,
        reason=_reason_changed(figures, result, before, moves, par, us),
        bytes=moves * figures.request.topology.bytes_per_expert,
        us_planned=us,
        optimism=result.optimism,
    )


def _reason_not_selected(figures: LayerFigures, layer: int) -> str:
    settings = figures.request.settings
    par = figures.episode_par_L[layer]
    if math.isnan(figures.par_L[layer]):
        return "left alone: it received no tokens"
    if par <= settings.par_threshold:
        return f"left alone: its PAR over episodes, {par:.3f}, does not exceed the threshold {settings.par_threshold:g}"
    if figures.reading_L[layer]:
        topology = figures.request.topology
        knee = knee_tokens(topology.device, topology.bytes_per_expert)
        return (
            f"left alone: no expert gets more than {knee:.0f} tokens in a step, and with so few, steps wait only for "
            f"weight reads (estimate for {topology.device})"
        )
    if par - figures.bound_L[layer] <= settings.min_gain:
        return f"left alone: the volatility of its experts' heat explains its PAR over episodes, {par:.3f}"
    return f"waits: a decision changes only the {settings.max_layers} worst layers"


def _reason_changed(
    figures: LayerFigures,
    result: LayerResult,
    before: LayerVerdict,
    moves: int,
    par: float,
    us: float | None,
) -> str:
    receive = "1 slot receives" if moves == 1 else f"{moves} slots receive"
    if result.taken == TABLES or moves == 0:
        action = "tables changed (no slot receives weights)"
    elif result.taken == FRESH:
        action = f"placed from scratch ({receive} weights)"
    else:
        action = f"improved starting from its current placement ({receive} weights)"
    clauses = [f"{action}: PAR {before.par_seen:.3f} to {par:.3f} on this window"]
    if result.trimmed:
        clauses.append("planned for bursts")
    elif math.isfinite(result.half_life):
        clauses.append("planned for drift")
    if result.crossed > 0 or result.crosses > 0:
        clauses.append(f"{result.crosses:.0%} of its tokens leave their node ({result.crossed:.0%} before)")
    if figures.why_ungrouped:
        clauses.append(f"expert groups may span nodes: {figures.why_ungrouped}")
    if us is not None:
        clauses.append(f"its slowest rank takes {us:.1f} us ({before.us_seen:.1f} us before)")
    return "; ".join(clauses)
