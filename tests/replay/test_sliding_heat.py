"""Jobs that run side by side read each step of a trace once, and keep no more than they need."""

import numpy as np
import pytest

from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule
from eplb_service.replay.sliding_heat import SlidingHeat

HEAT_TLE = np.random.default_rng(0).poisson(20, (90, 2, 8))


class CountedTrace(ArrayTrace):
    """Remembers what has been read of it."""

    def heat(self, first, last):
        self.facts.__dict__.setdefault("read", []).extend(range(first, last))
        return super().heat(first, last)


@pytest.fixture
def trace():
    made = CountedTrace(HEAT_TLE)
    made.facts.__dict__["read"] = []
    return made


def test_stretches_come_as_they_are_in_the_trace(trace):
    heat = SlidingHeat(trace, slack=20)
    for first, last in [(20, 30), (0, 30), (10, 40), (30, 50), (25, 60), (80, 200)]:
        assert np.array_equal(heat.heat(first, last), HEAT_TLE[first:last])
    assert len(heat._kept) <= 30
    with pytest.raises(AssertionError, match="forgotten"):
        heat.heat(30, 40)


def test_jobs_side_by_side_read_each_step_once(trace):
    setups = [Setup(3, Schedule(window, interval)) for window in (7, 20) for interval in (10, 13)]
    jobs = jobs_for(["none", "deepseek"], setups, PlannerSettings())
    replay(trace, jobs, scene_for(4))
    read = trace.facts.__dict__["read"]
    assert sorted(read) == list(range(90))
