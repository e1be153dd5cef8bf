"""The replay that one would write in an hour: one thread, one policy after the other, the same planner."""

from __future__ import annotations

import numpy as np

from eplb_service.heat.window import Window
from eplb_service.io.trace import Trace
from eplb_service.placement import Placement, apply_layers, par
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.scoring import rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology


def plain_loop(
    trace: Trace, ranks: int, slots: int, steps: int, policies: tuple[str, ...]
) -> dict[str, float]:
    """Mean PAR that each policy realises, and hindsight, with windows and intervals of ``steps``."""
    topology = Topology.flat(ranks)
    first = Placement.linear(trace.layers, trace.experts, ranks, slots)
    found = {}
    for policy in policies:
        settings = PlannerSettings(policy=policy, threads=1)
        placement, tables_RLE, realised, weights = first, first.default_log2phy(), [], []
        for step in range(steps, trace.steps, steps):
            decided = plan(Window(trace.heat(step - steps, step)), placement, tables_RLE, topology, settings)
            placement, tables_RLE = apply_layers(placement, tables_RLE, decided.changes())
            served = trace.heat(step, min(step + steps, trace.steps))
            realised.append(par(rank_loads(served, placement, tables_RLE)).mean())
            weights.append(len(served))
        found[policy] = float(np.average(realised, weights=weights))
    settings, realised, weights = PlannerSettings(threads=1), [], []
    for step in range(steps, trace.steps, steps):
        window = Window(trace.heat(step, min(step + steps, trace.steps)))
        placement, tables_RLE = apply_layers(
            first, first.default_log2phy(), plan_afresh(window, first, topology, settings).changes()
        )
        realised.append(par(rank_loads(window.heat_TLE, placement, tables_RLE)).mean())
        weights.append(window.steps)
    found["hindsight"] = float(np.average(realised, weights=weights))
    return found
