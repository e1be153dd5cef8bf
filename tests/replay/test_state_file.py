"""Milliseconds of an interrupted replay survive its state file."""

from __future__ import annotations

import numpy as np

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.baseline import BaselineRow
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import Ledger, run
from eplb_service.replay.policy_replay import ReplayedDecision, Setup
from eplb_service.replay.runner import jobs_for, scene_for
from eplb_service.replay.schedule import Schedule
from eplb_service.replay.state_file import SavedState, fingerprint, save_state
from tests.cost.curves import H200


def test_times_are_read_as_they_were_written(tmp_path):
    trace, scene = (
        ArrayTrace(synthetic_heat("static", 60, 2, 8, tokens=64, top_k=2)),
        scene_for(4, Costs(curve=H200)),
    )
    jobs = jobs_for(["none"], [Setup(3, Schedule(20, 20))], PlannerSettings(cost_curve=H200), hindsight=False)
    ledger = Ledger(jobs)
    for number, progress in run(jobs, trace, scene):
        ledger.add(number, progress)
    name = fingerprint(jobs, trace, scene)
    save_state(tmp_path / "state.npz", [(name, ledger)])
    again = SavedState(tmp_path / "state.npz").ledger(0, name, jobs, trace, scene)
    for was, now in zip(ledger.reported, again.reported, strict=True):
        assert [us_of(progress.made).tolist() for progress in was] == [
            us_of(progress.made).tolist() for progress in now
        ]


def us_of(made: ReplayedDecision | BaselineRow) -> np.ndarray:
    us_L = made.us_realised_L if isinstance(made, ReplayedDecision) else made.left_alone_us_L
    assert us_L is not None
    return us_L
