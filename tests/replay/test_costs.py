"""Decisions use the costs that the replay charges, and each assumption is listed with its source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.curve import FitQuality
from eplb_core.planner.price import SplitCost
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import ReplayError, Setup
from tests.cost.curves import H200

TRACE = ArrayTrace(synthetic_heat("drift", 160, 2, 16, tokens=512, top_k=4, seed=1))


def costs_of(settings: PlannerSettings, **costs: float) -> Costs:
    return Costs.of(settings, TRACE.layers, step_ms=10, solve_ms=0, **costs)


def moves(policy: str, settings: PlannerSettings, **costs: float) -> int:
    jobs = jobs_for([policy], [Setup(5, 32, 32)], settings, hindsight=False)
    (replayed,) = replay(TRACE, jobs, scene_for(4, costs_of(settings, **costs))).policies
    return replayed.moves


def test_moves_depend_on_expert_size_bandwidth_and_commit_cost() -> None:
    policy = "flashlb"
    light, heavy = (moves(policy, PlannerSettings(), bytes_per_expert=size) for size in (1000, 500_000_000))
    assert light > heavy
    slow = PlannerSettings(link_bandwidth=0.5)
    assert moves(policy, slow, bytes_per_expert=16 << 20) < moves(
        policy, PlannerSettings(), bytes_per_expert=16 << 20
    )
    assert moves(policy, slow, bytes_per_expert=1000) > heavy, (
        "the cost depends on bytes over bandwidth, not on bandwidth only"
    )
    assert moves(policy, PlannerSettings(), bytes_per_expert=1000, commit_ms=50) < light
    assert moves(policy, PlannerSettings(layer_ms=0.001), bytes_per_expert=1000) < light


def test_a_stated_move_price_overrides_the_costs() -> None:
    settings = PlannerSettings(move_price=0.1)
    # At either size, transferring a part takes less than a step, so both runs decide at the same steps.
    light, heavy = (moves("flashlb", settings, bytes_per_expert=size) for size in (1000, 8_000_000))
    assert light == heavy


def test_charged_costs_follow_from_the_settings() -> None:
    costs = costs_of(PlannerSettings(link_bandwidth=10), bytes_per_expert=1_000_000, commit_ms=3)
    assert costs.stall_ms(5, received=4, layers=2) == pytest.approx(4 * 0.1 * 0.2 + 2 * 3)
    assumed = costs_of(PlannerSettings())
    assert assumed.stall_ms(5, 0, 1) == pytest.approx(0.5 + 5 * (16 << 20) / 1e12 * 1e3)
    assert assumed.layer_ms == pytest.approx(0.5 * 10 / TRACE.layers), (
        "the layers take half of the stated step time"
    )
    assert costs_of(PlannerSettings(layer_ms=0.7)).layer_ms == 0.7


def assumptions_by_name(costs: Costs, stated: tuple[str, ...] = ()) -> dict[str, object]:
    return {assumption.name: assumption for assumption in costs.assumptions(stated)}


def test_every_assumption_is_listed_with_its_source() -> None:
    decided_by = ["cost_curve", "move_price", "link_bandwidth", "bytes_per_expert", "commit_ms", "layer_ms"]
    assert list(assumptions_by_name(Costs())) == [*decided_by, "step_ms"]
    assumptions = assumptions_by_name(
        Costs(step_ms=30, move_price=0.1, bytes_per_expert=7), ("step_ms", "link_bandwidth")
    )
    assert set(assumptions) == {*decided_by, "step_ms", "solve_ms", "link_share", "model_layers"}
    assert (assumptions["link_bandwidth"].value, assumptions["link_bandwidth"].source) == ("25 GB/s", "given")
    assert [assumptions[name].source for name in ("layer_ms", "bytes_per_expert")] == ["assumed", "recorded"]
    assert "linear" in assumptions["cost_curve"].value


def test_the_sources_of_a_curve_and_of_a_stepwise_split_are_stated() -> None:
    fitted = replace(H200, fit=FitQuality(56, 14, 0.023, 0.05, 0.09))
    assumptions = assumptions_by_name(Costs(step_ms=30, curve=fitted), ("step_ms",))
    assert assumptions["cost_curve"].source.startswith("H200, 7168 x 2048, fp8; median error 2.3%")
    assert "fit quality unknown" in assumptions_by_name(Costs(curve=H200))["cost_curve"].source
    costs = Costs(curve=H200, split=SplitCost.of(PlannerSettings(split="step"), 8, 64))
    assert "assumed: one exchange of counts" in assumptions_by_name(costs)["split_overhead_us"].value
    assert "split_overhead_us" not in assumptions_by_name(replace(costs, curve=None))


EXPERT_MS = 44_000_000 / (25e9 * 0.25) * 1e3
"""Transfer time of one 44 MB expert on a quarter of a 25 GB/s link: 7 ms."""


def of(experts: list[int]) -> np.ndarray:
    """Return the moves per layer and rank when one rank receives or sends ``experts[n]`` experts in layer ``n``."""
    return np.array(experts)[:, None] * np.eye(4, dtype=np.int64)[0]


def test_a_plan_waits_for_votes_and_its_parts_commit_in_turn() -> None:
    costs = Costs(step_ms=40, solve_ms=200, bytes_per_expert=44_000_000)
    one_each = of([9] * 58)
    # Solving takes 5 steps, the first transfer starts 10 steps later, and a vote takes 4. Moving 9 experts takes 63 ms,
    # or two steps.
    assert costs.arrival_steps(one_each, one_each, 9)[[0, -1]].tolist() == [15 + 4, 15 + 58 * 4]
    few = of([1] * 58)
    steps_L = costs.arrival_steps(few, few, 9)
    assert np.unique(steps_L).tolist() == [15 + 4 * part for part in range(1, 8)]
    assert (np.bincount(steps_L)[19::4] == [9, 9, 9, 9, 9, 9, 4]).all()
    assert not replace(costs, step_ms=0).arrival_steps(few, few, 9).any()


@pytest.mark.parametrize(
    ("experts", "passes"), [(0, 4), (1, 4), (2, 4), (3, 8), (6, 8), (7, 12), (10, 12), (11, 16)]
)
def test_a_part_commits_at_the_first_vote_after_its_transfer(experts: int, passes: int) -> None:
    # The first transfer begins two steps after a vote, so a transfer of two steps ends before the next vote.
    costs = Costs(step_ms=EXPERT_MS, solve_ms=0, bytes_per_expert=44_000_000)
    assert costs.arrival_steps(of([experts]), of([experts]), 99).tolist() == [10 + passes]
    assert costs.arrival_steps(of([0]), of([experts]), 99).tolist() == [10 + passes], (
        "sending takes as long as receiving"
    )


def test_the_layers_of_a_trace_represent_all_layers_of_the_model() -> None:
    assert Costs(model_layers=58).layers_each(4, 4).sum() == 58
    assert Costs().layers_each(3, 4).tolist() == [1, 1, 1]
    with pytest.raises(ReplayError, match="model_layers is 3, but the trace has 4 layers; use 4 or more"):
        Costs.of(PlannerSettings(), 4, model_layers=3)
    with pytest.raises(ReplayError, match="link_share is 2"):
        Costs(link_share=2)


def test_without_a_step_time_the_assumptions_state_that_plans_take_effect_at_once() -> None:
    assert assumptions_by_name(Costs())["step_ms"].value == "not given, so plans take effect at once"
