"""A deployment that decides on change is due by what its ranks measured, and tests only what all of a plan serves."""

from __future__ import annotations

import numpy as np

from eplb_service.control.core.decisions import Decisions
from eplb_service.control.core.pacing import Pacing
from eplb_service.planner.outlook import Outlook
from eplb_service.planner.pace import Pace
from eplb_service.planner.promise import Promise
from tests.control.core.story import Story

PROMISE = Promise(np.full(3, 1.2), np.full(3, 1e-4), np.ones(3), 64)


def decided_once() -> Pacing:
    pacing = Pacing(Pace(first=8, memory=64)).after_steps(np.full((8, 2), 1.2))
    assert pacing.pace.due
    return pacing.deciding()


def test_steps_of_one_report_are_all_counted_though_a_decision_is_due_among_them() -> None:
    pacing = Pacing(Pace(first=8, memory=64)).after_steps(np.full((50, 2), 1.2))
    assert pacing.pace.seen == 50
    assert pacing.pace.due


def test_what_was_kept_is_tested_at_once() -> None:
    pacing = decided_once().kept(PROMISE, None)
    assert pacing.replaced is None
    assert pacing.after_steps(np.full((4, 2), 1.8)).pace.alarm is not None


def test_a_plan_is_tested_once_all_of_it_serves_and_its_gain_is_counted_from_there() -> None:
    live = Story().live
    pacing = decided_once().offered(PROMISE, None, live)
    under_way = pacing.after_steps(np.full((6, 2), 1.8))
    assert under_way.pace.alarm is None
    done = under_way.plan_ended(done=True)
    assert done.replaced is not None
    assert (done.replaced.live, done.replaced.seen) == (live, 14)
    assert done.promise is None
    assert done.after_steps(np.full((4, 2), 1.8)).pace.alarm is not None


def test_of_a_plan_that_failed_nothing_is_taken_as_promised() -> None:
    pacing = decided_once().offered(PROMISE, None, Story().live).plan_ended(done=False)
    assert pacing.replaced is None
    assert pacing.after_steps(np.full((10, 2), 1.8)).pace.alarm is None


def test_a_departure_that_was_a_burst_is_dismissed_with_the_decision() -> None:
    pacing = decided_once().kept(PROMISE, None).after_steps(np.full((4, 2), 1.8))
    live = Story().live
    alarmed = Decisions(pacing=pacing.deciding())
    for burst in (False, True):
        decided = alarmed.decided(Outlook(PROMISE, burst=burst), live, changed=False)
        assert decided.pacing is not None
        assert (decided.pacing.pace.alarm is None) is burst
        assert decided.pacing.pace.seen == 12


def test_the_end_of_a_plan_that_this_service_did_not_make_changes_nothing() -> None:
    pacing = decided_once()
    assert pacing.plan_ended(done=True) is pacing
