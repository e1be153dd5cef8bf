"""Decisions are made by the costs that are charged, and every number that results rest on is named with its origin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eplb_service.cost.curve import FitQuality
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.price import SplitCost
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import Setup
from tests.cost.curves import H200

TRACE = ArrayTrace(synthetic_heat("drift", 160, 2, 16, tokens=512, top_k=4, seed=1))


def costs_of(settings: PlannerSettings, **stated: float) -> Costs:
    return Costs.of(settings, TRACE.layers, step_ms=10, solve_ms=0, **stated)


def moves(policy: str, settings: PlannerSettings, **stated: float) -> int:
    jobs = jobs_for([policy], [Setup(5, 32, 32)], settings, hindsight=False)
    (found,) = replay(TRACE, jobs, scene_for(4, costs_of(settings, **stated))).policies
    return found.moves


def test_moves_follow_what_an_expert_weighs_and_what_the_link_bears() -> None:
    policy = "flashlb"
    light, heavy = (moves(policy, PlannerSettings(), bytes_per_expert=size) for size in (1000, 500_000_000))
    assert light > heavy
    slow = PlannerSettings(link_bandwidth=0.5)
    assert moves(policy, slow, bytes_per_expert=16 << 20) < moves(
        policy, PlannerSettings(), bytes_per_expert=16 << 20
    )
    assert moves(policy, slow, bytes_per_expert=1000) > heavy, "bytes over bandwidth, not the link alone"
    assert moves(policy, PlannerSettings(), bytes_per_expert=1000, commit_ms=50) < light
    assert moves(policy, PlannerSettings(layer_ms=0.001), bytes_per_expert=1000) < light


def test_a_stated_price_is_what_decisions_go_by() -> None:
    stated = PlannerSettings(move_price=0.1)
    # Either is there within a step, so that decisions fall alike.
    light, heavy = (moves("flashlb", stated, bytes_per_expert=size) for size in (1000, 80_000_000))
    assert light == heavy


def test_what_is_charged_is_what_moves_are_priced_at() -> None:
    costs = costs_of(PlannerSettings(link_bandwidth=10), bytes_per_expert=1_000_000, commit_ms=3)
    assert costs.stall_ms(5, received=4, layers=2) == pytest.approx(4 * 0.1 * 0.2 + 2 * 3)
    assumed = costs_of(PlannerSettings())
    assert assumed.stall_ms(5, 0, 1) == pytest.approx(0.5 + 5 * (16 << 20) / 1e12 * 1e3)
    assert assumed.layer_ms == pytest.approx(0.5 * 10 / TRACE.layers), "half of the step that is stated"
    assert costs_of(PlannerSettings(layer_ms=0.7)).layer_ms == 0.7


def named(costs: Costs, given: tuple[str, ...] = ()) -> dict[str, object]:
    return {assumption.name: assumption for assumption in costs.assumptions(given)}


def test_all_that_decisions_use_is_listed_and_what_was_given_says_so() -> None:
    decided_by = ["cost_curve", "move_price", "link_bandwidth", "bytes_per_expert", "commit_ms", "layer_ms"]
    assert list(named(Costs())) == decided_by
    found = named(Costs(step_ms=30, move_price=0.1, bytes_per_expert=7), ("step_ms", "link_bandwidth"))
    assert set(found) == {*decided_by, "step_ms", "solve_ms"}
    assert (found["link_bandwidth"].value, found["link_bandwidth"].source) == ("25 GB/s", "given")
    assert [found[name].source for name in ("layer_ms", "bytes_per_expert")] == ["assumed", "recorded"]
    assert "linear" in found["cost_curve"].value


def test_a_curve_and_a_stepwise_split_bring_their_source() -> None:
    fitted = replace(H200, fit=FitQuality(56, 14, 0.023, 0.05, 0.09))
    found = named(Costs(step_ms=30, curve=fitted), ("step_ms",))
    assert found["cost_curve"].source.startswith("H200, 7168 x 2048, fp8; median error 2.3%")
    assert "no fit is known" in named(Costs(curve=H200))["cost_curve"].source
    costs = Costs(curve=H200, split=SplitCost.of(PlannerSettings(split="step"), 8, 64))
    assert "assumed: an exchange of counts" in named(costs)["split_overhead_us"].value
    assert "split_overhead_us" not in named(replace(costs, curve=None))
