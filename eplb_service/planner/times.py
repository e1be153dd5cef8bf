"""What a decision's layers take under a cost curve, before and after, put into their verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.window import Window
from eplb_service.placement import Int32, Placement, mean_par
from eplb_service.planner.plan import LayerPlan, LayerVerdict
from eplb_service.planner.scoring import slowest_us, split_shares


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
    share_LP = split_shares(window.heat_TLE, placement, log2phy_RLE, window.source_RLE, split)
    seen_L = mean_par(slowest_us(window.heat_TLE, placement, share_LP, curve), axis=0)
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
    share_1P = split_shares(heat_T1E, after, plan.log2phy_RE[:, None], source_R1E, split)
    return float(mean_par(slowest_us(heat_T1E, after, share_1P, curve)))
