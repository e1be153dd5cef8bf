"""The default policy follows changes in heat, and every step counts once."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Window, checked_heat
from eplb_core.placement import Placement, apply_layers, par
from eplb_core.planner.decide import plan_from_scratch
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import Setup
from eplb_service.replay.result import PolicyReplay
from tests.planner.drawn import rank_loads

LAYERS = 3
EXPERTS = 16


def workloads(*seeds: int, steps: int = 96) -> np.ndarray:
    """Return segments of equal length from several workloads, one after another."""
    stretches = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        popularity_LE = generator.dirichlet(np.full(EXPERTS, 0.7), LAYERS)
        stretches.append(
            np.stack([generator.multinomial(4000, row_E, size=steps) for row_E in popularity_LE], axis=1)
        )
    return checked_heat(np.concatenate(stretches))


HEAT_TLE = workloads(1, 2, 3)
SETUP = Setup(slots=5, window=512, interval=48)


def run(
    policies: list[str], heat_TLE: np.ndarray = HEAT_TLE, costs: Costs | None = None
) -> tuple[PolicyReplay, ...]:
    jobs = jobs_for(policies, [SETUP], PlannerSettings(), hindsight=False)
    return replay(ArrayTrace(heat_TLE), jobs, scene_for(4, costs)).policies


def at_fixed_intervals(heat_TLE: np.ndarray, phy2log_LRS: np.ndarray) -> np.ndarray:
    """Place from scratch on the whole window at every interval."""
    placement = Placement(phy2log_LRS, EXPERTS)
    settings = PlannerSettings(threads=1)
    decision = plan_from_scratch(Window(heat_TLE), placement, Topology.flat(len(phy2log_LRS[0])), settings)
    return apply_layers(placement, placement.default_log2phy(), decision.changes())[0].phy2log_LRS


CLOCK = f"{__name__}:at_fixed_intervals"


def test_a_change_is_followed_sooner_than_with_fixed_intervals() -> None:
    on_change, by_clock = run(["flashlb", CLOCK])
    assert on_change.steps == by_clock.steps == len(HEAT_TLE) - 48
    assert on_change.par_realised < by_clock.par_realised - 0.02
    # Rows with a change of workload contain several decisions.
    assert [row.step for row in on_change.decisions] == [48, 96, 144, 192, 240]
    assert on_change.decisions[1].decisions >= 2
    assert on_change.decisions[3].decisions >= 2


def decided_once(heat_TLE: np.ndarray, phy2log_LRS: np.ndarray) -> np.ndarray:
    """Return the current placement, or place from scratch if it is the linear one."""
    in_order = Placement.linear(*phy2log_LRS.shape[:1], EXPERTS, *phy2log_LRS.shape[1:])
    if np.array_equal(phy2log_LRS, in_order.phy2log_LRS):
        return at_fixed_intervals(heat_TLE, phy2log_LRS)
    return phy2log_LRS


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3)])
def test_alternating_workloads_cause_no_extra_moves(seeds: tuple[int, ...]) -> None:
    turns = workloads(*seeds * (8 // len(seeds)), steps=48)
    ours, by_clock, kept = run(["flashlb", CLOCK, f"{__name__}:decided_once"], turns)
    assert ours.par_realised <= kept.par_realised
    assert ours.moves <= by_clock.moves


def test_decisions_are_rare_on_stationary_heat() -> None:
    on_change, by_clock = run(["flashlb", CLOCK], workloads(1, steps=900))
    counts = [row.decisions for row in on_change.decisions]
    assert sum(counts) <= 20
    assert on_change.par_realised <= by_clock.par_realised + 0.01
    assert by_clock.moves_per_interval > on_change.moves_per_interval
    quiet = next(row for row in on_change.decisions[1:] if row.layers_changed == 0)
    assert (quiet.moves, quiet.layers_changed) == (0, 0)
    assert quiet.par_planned == quiet.par_seen


def test_a_plan_takes_effect_once_it_has_been_solved_received_and_transferred() -> None:
    costs = Costs(step_ms=10, solve_ms=105, bytes_per_expert=1 << 20, link_bandwidth=1e3)
    (late,) = run(["flashlb"], costs=costs)
    (prompt,) = run(["flashlb"])
    assert late.steps == prompt.steps
    # Solving takes 11 steps, the ranks start 10 steps later, and the single part with all three layers takes 4 steps.
    assert late.decisions[0].late == 11 + 10 + 4
    assert late.par_realised > prompt.par_realised


def test_every_scored_step_has_a_time_under_a_cost_curve() -> None:
    balanced, alone = run(
        ["flashlb", "none"], workloads(1, steps=300), Costs(curve=CostCurve(20.0, 1.0, 0.5, 0.06))
    )
    assert balanced.moe_ms is not None
    assert alone.moe_ms is not None
    assert balanced.moe_ms < alone.moe_ms


def idle_layer() -> np.ndarray:
    """Return heat in which layer 1 has tokens in only two steps of the first interval after the window."""
    heat_TLE = synthetic_heat("drift", 70, 2, 16, tokens=64, top_k=2, seed=2)
    heat_TLE[22:40, 1] = 0
    return heat_TLE


@pytest.mark.parametrize("policy", ["none", "flashlb"])
def test_steps_without_tokens_are_not_counted(policy: str) -> None:
    heat_TLE = idle_layer()
    settings = PlannerSettings(threads=1, policy="none") if policy == "none" else PlannerSettings(threads=1)
    jobs = jobs_for([policy], [Setup(4, 20, 20)], settings, hindsight=False)
    result = replay(ArrayTrace(heat_TLE), jobs, scene_for(4))
    (row,) = result.policies
    busy_DL = np.stack([decision.busy_L for decision in row.decisions])
    np.testing.assert_array_equal(busy_DL, [[20, 2], [20, 20], [10, 10]])
    left_alone = Placement.linear(2, 16, 4, 4)
    truth_L = par(rank_loads(heat_TLE[20:], left_alone, left_alone.default_log2phy()))
    assert result.score(row).par_left_alone == pytest.approx(truth_L.mean())
    if policy == "none":
        np.testing.assert_allclose(row.par_realised_L, truth_L)
