"""A policy by the clock that looks back knows more where heat stays what it is, and forgets what it is no more."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.jobs import Job, Ledger
from eplb_service.replay.jobs import run as run_jobs
from eplb_service.replay.policy import LOOKING_BACK, Policy
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.policy_run import PolicyRun
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import MEMORY, Schedule
from eplb_service.replay.sliding_heat import SlidingHeat
from tests.replay.test_change_run import workloads


def bursts(steps: int, seed: int) -> np.ndarray:
    """Groups of experts that are hot for a few steps in many: a short window cannot tell which belong together."""
    generator = np.random.default_rng(seed)
    on_TG = np.repeat(generator.random((steps // 8, 4)) < 0.25, 8, axis=0)
    popularity_TE = 1.0 + 6.0 * np.repeat(on_TG, 4, axis=1)
    popularity_TE /= popularity_TE.sum(axis=1, keepdims=True)
    order_E = generator.permutation(16)
    return np.stack([generator.multinomial(4000, row_E[order_E]) for row_E in popularity_TE])[:, None]


def realised(heat_TLE: np.ndarray, window: int) -> tuple[float, float]:
    setup = Setup(slots=5, schedule=Schedule(window, window))
    jobs = jobs_for([LOOKING_BACK, "flashlb"], [setup], PlannerSettings(), hindsight=False)
    looking_back, by_clock = replay(ArrayTrace(heat_TLE), jobs, scene_for(4)).policies
    assert looking_back.steps == by_clock.steps == len(heat_TLE) - window
    return looking_back.par_realised, by_clock.par_realised


def test_bursts_ask_for_a_longer_memory_than_an_interval() -> None:
    won = [np.subtract(*realised(bursts(640, seed), 32)[::-1]) for seed in range(3)]
    assert np.mean(won) > 0.005


def test_what_was_before_a_change_does_not_spoil_decisions_after_it() -> None:
    looking_back, by_clock = realised(workloads(1, 2, 3), 48)
    assert looking_back <= by_clock + 0.01


@pytest.mark.parametrize(("step", "first"), [(50, 0), (MEMORY, 0), (MEMORY + 100, 100)])
def test_no_step_farther_back_than_the_memory_is_looked_at(step: int, first: int) -> None:
    trace, setup = ArrayTrace(workloads(1, steps=MEMORY + 200)), Setup(5, Schedule(50, 50))
    scene, policy = scene_for(4), Policy.of(LOOKING_BACK, PlannerSettings())
    heat, placement = SlidingHeat(trace, slack=MEMORY), scene.placement(trace, setup)
    run = PolicyRun(trace, heat, placement, scene.topology, policy, setup.schedule, scene.costs)
    assert run._remembered_from(step) == first


def test_an_interrupted_run_goes_on_as_if_it_had_not_been() -> None:
    trace, setup = ArrayTrace(workloads(1, 2, 3)), Setup(5, Schedule(48, 48))
    job = Job("back", setup, Policy.of(LOOKING_BACK, PlannerSettings()))
    whole = [progress for _, progress in run_jobs([job], trace, scene_for(4))]
    ledger = Ledger([job])
    for progress in whole[:2]:
        ledger.add(0, progress)
    rest = [progress for _, progress in run_jobs([job], trace, scene_for(4), ledger.done())]
    assert [one.made.par_realised for one in whole[2:]] == [one.made.par_realised for one in rest]


@pytest.mark.parametrize("name", ["flashlb", LOOKING_BACK])
def test_only_the_one_that_says_so_looks_back(name: str) -> None:
    assert Policy.of(name, PlannerSettings()).looks_back == (name == LOOKING_BACK)
