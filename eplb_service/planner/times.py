"""What a decision's layers take under a cost curve, before and after, put into their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.window import Window
from eplb_service.placement import Int32, Placement, mean_par
from eplb_service.planner.plan import LayerPlan, LayerVerdict
from eplb_service.planner.scoring import split_us


def with_times(
    verdicts: Sequence[LayerVerdict],
    changed: Mapping[int, LayerPlan],
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    split: str,
    curve: CostCurve,
) -> tuple[LayerVerdict, ...]:
    """The verdicts with the microseconds of each layer's slowest rank, and those that change say so.

    Parameters
    ----------
    verdicts, changed
        Of all layers in order, and the plans of those that change, by layer.
    window, placement, log2phy_RLE
        The heat and what serves now, as for ``decide.plan``.
    split, curve
        How the host splits tokens over replicas, and what they cost.
    """
    us_TL = split_us(window.heat_TLE, placement, log2phy_RLE, window.source_RLE, split, curve)
    seen_L = mean_par(us_TL, axis=0)
    timed = []
    for verdict, seen in zip(verdicts, seen_L.tolist(), strict=True):
        if np.isnan(seen):
            timed.append(verdict)
            continue
        planned, reason = seen, verdict.reason
        if plan := changed.get(verdict.layer):
            planned = _planned_us(plan, window, placement.experts, split, curve)
            reason = f"{reason}; its slowest rank {seen:.1f} us to {planned:.1f}"
        timed.append(replace(verdict, us_seen=seen, us_planned=planned, reason=reason))
    return tuple(timed)


def _planned_us(plan: LayerPlan, window: Window, experts: int, split: str, curve: CostCurve) -> float:
    """Microseconds of one layer's slowest rank as decided."""
    after = Placement(plan.phy2log_RS[None], experts)
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, plan.layer, None]
    heat_T1E = window.heat_TLE[:, plan.layer, None]
    return float(mean_par(split_us(heat_T1E, after, plan.log2phy_RE[:, None], source_R1E, split, curve)))


def without_slower(
    verdicts: Sequence[LayerVerdict], changed: Sequence[LayerPlan], min_gain: float, move_price: float
) -> tuple[tuple[LayerVerdict, ...], list[LayerPlan]]:
    """Verdicts and changes without those that were found by tokens and win too little time for their moves.

    Parameters
    ----------
    verdicts
        Of all layers in order, with times.
    changed
        The layers that are to change.
    min_gain, move_price
        Parts of the time that a layer must win, by itself and to have every slot moved.
    """
    kept, paying = list(verdicts), []
    for plan in changed:
        verdict = verdicts[plan.layer]
        seen, planned = verdict.us_seen, verdict.us_planned
        assert seen is not None, "a layer without tokens does not change"
        assert planned is not None
        price = move_price * verdict.moves / plan.phy2log_RS.size
        if seen - planned > (min_gain + price) * seen:
            paying.append(plan)
            continue
        kept[plan.layer] = replace(
            verdict,
            par_planned=verdict.par_seen,
            us_planned=seen,
            moves=0,
            bytes=0,
            changed=False,
            optimism=0.0,
            reason=f"kept: what was found, from {verdict.par_seen:.3f} to {verdict.par_planned:.3f}, takes its slowest "
            f"rank {planned:.1f} us in place of {seen:.1f}: too little for {verdict.moves} moves",
        )
    return tuple(kept), paying
