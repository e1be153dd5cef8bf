"""A policy that decides on change serves every step once, and follows a change that the clock meets late."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.window import checked_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import Job, Ledger
from eplb_service.replay.policy import ON_CHANGE, Policy
from eplb_service.replay.policy_replay import PolicyReplay, Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule
from eplb_service.replay.state_file import SavedState, fingerprint, save_state

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
SETUP = Setup(slots=5, schedule=Schedule(window=48, interval=48))


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
    costs = Costs(step_ms=10, solve_ms=105, bytes_per_expert=1 << 20, bandwidth=1e12)
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


def test_it_is_the_same_every_time() -> None:
    first, second = run([ON_CHANGE])[0], run([ON_CHANGE])[0]
    assert first.par_realised == second.par_realised
    assert first.moves == second.moves


def test_an_interrupted_run_begins_again(tmp_path) -> None:
    trace, scene = ArrayTrace(HEAT_TLE), scene_for(4)
    jobs = [
        Job("none", SETUP, Policy.of("none", PlannerSettings())),
        Job("change", SETUP, Policy.of(ON_CHANGE, PlannerSettings())),
    ]
    ledger = Ledger(jobs)
    from eplb_service.replay.jobs import run as run_jobs

    for (number, progress), _ in zip(run_jobs(jobs, trace, scene), range(4), strict=False):
        ledger.add(number, progress)
    name = fingerprint(jobs, trace, scene)
    save_state(tmp_path / "state.npz", [(name, ledger)])
    again = SavedState(tmp_path / "state.npz").ledger(0, name, jobs, trace, scene)
    assert [len(reported) for reported in again.reported] == [2, 0]


@pytest.mark.parametrize("name", ["flashlb", ON_CHANGE])
def test_only_the_one_that_says_so_decides_on_change(name: str) -> None:
    assert Policy.of(name, PlannerSettings()).on_change == (name == ON_CHANGE)
