"""Policies that look back or decide on change follow heat, serve every step once, and weigh it by its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.heat.window import checked_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.placement import Placement, par
from eplb_service.planner.score import rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import ON_CHANGE, Setup
from eplb_service.replay.result import PolicyReplay

LAYERS, EXPERTS = 3, 16


def workloads(*seeds: int, steps: int = 96) -> np.ndarray:
    """Steps of one workload after the other, as many of each."""
    stretches = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        popularity_LE = generator.dirichlet(np.full(EXPERTS, 0.7), LAYERS)
        stretches.append(
            np.stack([generator.multinomial(4000, row_E, size=steps) for row_E in popularity_LE], axis=1)
        )
    return checked_heat(np.concatenate(stretches))


HEAT_TLE = workloads(1, 2, 3)
SETUP = Setup(slots=5, window=48, interval=48)


def run(
    policies: list[str], heat_TLE: np.ndarray = HEAT_TLE, costs: Costs | None = None
) -> tuple[PolicyReplay, ...]:
    jobs = jobs_for(policies, [SETUP], PlannerSettings(), hindsight=False)
    return replay(ArrayTrace(heat_TLE), jobs, scene_for(4, costs)).policies


def test_a_change_is_followed_sooner_than_by_the_clock() -> None:
    on_change, by_clock = run([ON_CHANGE, "flashlb"])
    assert on_change.steps == by_clock.steps == len(HEAT_TLE) - 48
    assert on_change.par_realised < by_clock.par_realised - 0.02
    # The rows in which the workload changes hold several decisions.
    assert [row.step for row in on_change.decisions] == [48, 96, 144, 192, 240]
    assert on_change.decisions[1].decisions >= 2
    assert on_change.decisions[3].decisions >= 2


def test_calm_heat_is_decided_on_seldom() -> None:
    on_change, by_clock = run([ON_CHANGE, "flashlb"], workloads(1, steps=900))
    made = [row.decisions for row in on_change.decisions]
    assert sum(made) <= 8
    assert on_change.par_realised <= by_clock.par_realised + 0.01
    quiet = next(row for row in on_change.decisions if row.decisions == 0)
    assert (quiet.moves, quiet.layers_changed) == (0, 0)
    assert quiet.par_planned == quiet.par_seen == quiet.par_realised


def test_what_is_late_serves_late() -> None:
    costs = Costs(step_ms=10, solve_ms=105, bytes_per_expert=1 << 20, link_bandwidth=1e3)
    (late,) = run([ON_CHANGE], costs=costs)
    (prompt,) = run([ON_CHANGE])
    assert late.steps == prompt.steps
    assert late.decisions[0].late == 11
    assert late.par_realised > prompt.par_realised


def test_under_a_cost_curve_every_step_served_is_timed() -> None:
    on_change, by_clock, alone = run(
        [ON_CHANGE, "flashlb", "none"], workloads(1, steps=300), Costs(curve=CostCurve(20.0, 1.0, 0.5, 0.06))
    )
    times = [policy.moe_ms for policy in (on_change, by_clock, alone)]
    assert None not in times
    assert times[0] == pytest.approx(times[1], rel=0.02)
    assert times[0] < times[2]


@pytest.mark.parametrize(("window", "looked_at"), [(30, [30, 30, 30, 30]), (80, [40, 80, 80, 80])])
def test_a_decision_looks_at_no_more_than_a_window_and_no_more_than_there_is(
    window: int, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def remembering(heat_TLE: np.ndarray, interval: int) -> int:
        seen.append(len(heat_TLE))
        assert interval == 40
        return len(heat_TLE)

    monkeypatch.setattr("eplb_service.replay.loop.looked_back", remembering)
    setup = Setup(5, window, 40)
    heat_TLE = workloads(1, steps=160 + window)[: 160 + min(window, 40)]
    replay(
        ArrayTrace(heat_TLE),
        jobs_for(["none"], [setup], PlannerSettings(), hindsight=False),
        scene_for(4),
    )
    assert seen == looked_at


def idle_layer() -> np.ndarray:
    """A layer that has tokens in two steps of the second stretch alone, others than in the third."""
    heat_TLE = synthetic_heat("drift", 70, 2, 16, tokens=64, top_k=2, seed=2)
    heat_TLE[22:40, 1] = 0
    return heat_TLE


@pytest.mark.parametrize("policy", ["none", ON_CHANGE])
def test_steps_without_tokens_count_nowhere(policy: str) -> None:
    heat_TLE = idle_layer()
    settings = PlannerSettings(threads=1, policy="none") if policy == "none" else PlannerSettings(threads=1)
    jobs = jobs_for([policy], [Setup(4, 20, 20)], settings, hindsight=False)
    found = replay(ArrayTrace(heat_TLE), jobs, scene_for(4))
    (row,) = found.policies
    busy_DL = np.stack([decision.busy_L for decision in row.decisions])
    np.testing.assert_array_equal(busy_DL, [[20, 2], [20, 20], [10, 10]])
    left_alone = Placement.linear(2, 16, 4, 4)
    truth_L = par(rank_loads(heat_TLE[20:], left_alone, left_alone.default_log2phy()))
    assert found.score(row).par_left_alone == pytest.approx(truth_L.mean())
    if policy == "none":
        np.testing.assert_allclose(row.par_realised_L, truth_L)
