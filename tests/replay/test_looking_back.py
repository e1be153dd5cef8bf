"""A window longer than the interval knows more where heat stays what it is, and forgets what it is no more."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.jobs import Job, Ledger
from eplb_service.replay.jobs import run as run_jobs
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule
from tests.replay.test_change_run import workloads


def bursts(steps: int, seed: int) -> np.ndarray:
    """Groups of experts that are hot for a few steps in many: a short window cannot show which belong together."""
    generator = np.random.default_rng(seed)
    on_TG = np.repeat(generator.random((steps // 8, 4)) < 0.25, 8, axis=0)
    popularity_TE = 1.0 + 6.0 * np.repeat(on_TG, 4, axis=1)
    popularity_TE /= popularity_TE.sum(axis=1, keepdims=True)
    order_E = generator.permutation(16)
    return np.stack([generator.multinomial(4000, row_E[order_E]) for row_E in popularity_TE])[:, None]


def realised(heat_TLE: np.ndarray, interval: int) -> tuple[float, float]:
    """By windows of 512 steps, and by windows of one interval, decided at the same steps."""
    setups = [Setup(slots=5, schedule=Schedule(window, interval)) for window in (512, interval)]
    jobs = jobs_for(["flashlb"], setups, PlannerSettings(), hindsight=False)
    looking_back, by_interval = replay(ArrayTrace(heat_TLE), jobs, scene_for(4)).policies
    assert looking_back.steps == by_interval.steps == len(heat_TLE) - interval
    return looking_back.par_realised, by_interval.par_realised


def test_bursts_ask_for_a_longer_memory_than_an_interval() -> None:
    won = [np.subtract(*realised(bursts(640, seed), 32)[::-1]) for seed in range(3)]
    assert np.mean(won) > 0.005


def test_what_was_before_a_change_does_not_spoil_decisions_after_it() -> None:
    looking_back, by_interval = realised(workloads(1, 2, 3), 48)
    assert looking_back <= by_interval + 0.01


@pytest.mark.parametrize(("window", "looked_at"), [(30, [30, 30, 30, 30]), (80, [40, 80, 80, 80])])
def test_a_decision_looks_at_no_more_than_a_window_and_no_more_than_there_is(
    window: int, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def remembering(heat_TLE: np.ndarray, interval: int) -> int:
        seen.append(len(heat_TLE))
        assert interval == 40
        return len(heat_TLE)

    monkeypatch.setattr("eplb_service.replay.policy_run.looked_back", remembering)
    setup = Setup(5, Schedule(window, 40))
    heat_TLE = workloads(1, steps=160 + window)[: 160 + min(window, 40)]
    replay(
        ArrayTrace(heat_TLE),
        jobs_for(["none"], [setup], PlannerSettings(), hindsight=False),
        scene_for(4),
    )
    assert seen == looked_at


def test_an_interrupted_run_goes_on_as_if_it_had_not_been() -> None:
    trace, setup = ArrayTrace(workloads(1, 2, 3)), Setup(5, Schedule(512, 48))
    job = Job("back", setup, Policy.of("flashlb", PlannerSettings()))
    whole = [progress for _, progress in run_jobs([job], trace, scene_for(4))]
    ledger = Ledger([job])
    for progress in whole[:2]:
        ledger.add(0, progress)
    rest = [progress for _, progress in run_jobs([job], trace, scene_for(4), ledger.done())]
    assert [one.made.par_realised for one in whole[2:]] == [one.made.par_realised for one in rest]
