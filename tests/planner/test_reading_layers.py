"""The planner does not change a layer whose step time is bound by weight reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Plan
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.io.synthetic import synthetic_heat

LAYERS = 2
EXPERTS = 16
RANKS = 4
SLOTS = 5
EXPERT_BYTES = 3 * 7168 * 2048


def decided(tokens: int, device: str = "Ascend910B3", **settings: object) -> Plan:
    heat_TLE = synthetic_heat("static", 128, LAYERS, EXPERTS, tokens=tokens, top_k=2, seed=1)
    placement = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    chosen = PlannerSettings(move_price=0.0, threads=1, **settings)
    tables_RLE = default_tables(placement, chosen.split, chosen.deal_width)
    topology = replace(Topology.flat(RANKS), bytes_per_expert=EXPERT_BYTES, device=device)
    return plan(Window(heat_TLE), placement, tables_RLE, topology, chosen)


def test_no_expert_moves_below_the_knee_and_the_verdict_gives_the_reason() -> None:
    decision = decided(tokens=128)
    assert decision.layers == ()
    for verdict in decision.verdicts:
        assert "steps wait only for weight reads" in verdict.reason
        assert "(estimate for Ascend910B3)" in verdict.reason


@pytest.mark.parametrize(
    ("tokens", "device", "settings"),
    [
        (8192, "Ascend910B3", {}),
        (128, "", {}),
        (128, "Ascend910B3", {"estimate_device": False}),
        (128, "Ascend910B3", {"cost_curve": CostCurve(0.0, 0.0, 0.0, 1.0)}),
    ],
    ids=["prefill", "an unknown device", "switched off", "a curve is given"],
)
def test_layers_above_the_knee_or_without_a_knee_are_balanced(
    tokens: int, device: str, settings: dict[str, object]
) -> None:
    assert len(decided(tokens, device, **settings).layers) == LAYERS


def test_balancing_pays_off_if_every_tenth_step_is_a_long_prefill() -> None:
    few_TLE = synthetic_heat("static", 128, LAYERS, EXPERTS, tokens=64, top_k=2, seed=1)
    many_TLE = synthetic_heat("static", 128, LAYERS, EXPERTS, tokens=8192, top_k=2, seed=2)
    mixed_TLE = np.where(np.arange(128)[:, None, None] % 10 == 0, many_TLE, few_TLE)
    placement = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    chosen = PlannerSettings(move_price=0.0, threads=1)
    topology = replace(Topology.flat(RANKS), bytes_per_expert=EXPERT_BYTES, device="Ascend910B3")
    decision = plan(
        Window(mixed_TLE), placement, default_tables(placement, chosen.split, 1), topology, chosen
    )
    assert not any("weight reads" in verdict.reason for verdict in decision.verdicts)
