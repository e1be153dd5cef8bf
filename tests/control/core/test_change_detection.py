"""The service tests every step for a change of heat, and decides on the same steps however long the reports are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.heat.phase import StepPhase
from eplb_core.heat.window import Window
from eplb_core.planner.plan import Outlook, Promise
from eplb_core.wire.agent import PlanState, PlanStatus, decode_hello
from eplb_core.wire.heat import HeatReport
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import Limits
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from tests.control.core.story import PLAN_TIMEOUT, decision_of
from tests.control.fake_group import LAYERS, RANKS, SLOTS, first_placement, hello_of, live_of

OUTLOOK = Outlook(Promise(np.zeros(0), np.zeros(0), np.zeros(0), 0))
CHANGE = 100
"""Step from which on rank 0 receives three times as many tokens."""


def deployment() -> Deployment:
    """Return a deployment whose ranks are all connected; its first decision is due after 16 steps."""
    made = Deployment("decode", Limits(256, 256, PLAN_TIMEOUT, interval=16))
    live = live_of(first_placement())
    for rank in range(RANKS):
        made.hello(decode_hello(hello_of(live, rank)))
    assert made.decisions.pace is not None
    made.decisions = replace(made.decisions, pace=replace(made.decisions.pace, longest=512))
    return made


def report(made: Deployment, first: int, steps: int) -> None:
    for rank in range(RANKS):
        counts = np.full((steps, LAYERS, SLOTS), 1000, dtype=np.int32)
        if rank == 0:
            counts[max(CHANGE - first, 0) :] = 3000
        phases = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
        made.heat_report(rank, HeatReport(first, (0,) * LAYERS, counts, phases))


def decide(made: Deployment) -> None:
    made.deciding()
    assert made.heat is not None
    channels = LAYERS + 1
    par = float(made.heat.newest_par(made.assembled - 1, (0,) * LAYERS).mean())
    promise = Promise(np.full(channels, par), np.full(channels, 1e-4), np.ones(channels), 16)
    made.decided(Outlook(promise), changed=False)


@pytest.mark.parametrize("steps", [1, 4, 16, 64])
def test_decisions_fall_on_the_same_steps_however_long_reports_are(steps: int) -> None:
    made = deployment()
    found = []
    for first in range(0, 192, steps):
        report(made, first, steps)
        more = True
        while more:
            more = made.put_together(4)
            assert made.decisions.pace is not None
            if made.decisions.pace.due:
                found.append((made.assembled, made.decisions.settling))
                decide(made)
    assert found[:3] == [(16, False), (40, False), (88, False)]
    # Decisions follow when the change is 4, 8 and 16 steps old.
    assert found[3:6] == [(104, True), (108, True), (116, True)]


def plan(made: Deployment, plan_id: int = 1) -> PlanTracker:
    """Decide on the newest steps to change two layers, offer the plan and return it."""
    assert made.live is not None
    assert made.heat is not None
    decision = decision_of(made.live, 0, 1)
    window = Window(made.heat.newest_heat(made.assembled - 1))
    split = made.live.serving.changed_by(decision).split_of(window, "tables")
    par = float(split.par_of_steps(window.heat_TLE, 0).mean())
    promise = Promise(np.full(LAYERS + 1, par), np.full(LAYERS + 1, 1e-4), np.ones(LAYERS + 1), 16)
    made.deciding()
    made.decided(Outlook(promise, planned=split), changed=True)
    made.offer(PlanTracker.of(plan_id, made.live, decision), 0.0)
    assert made.plan is not None
    return made.plan


def found_outdated(made: Deployment, first: int, last: int) -> int | None:
    """Report steps until ``last``; return the step at which the plan may be outdated, or None."""
    for step in range(first, last, 4):
        report(made, step, 4)
        while made.put_together(1):
            pass
        if made.may_call_off:
            return made.assembled
    return None


def test_a_change_is_seen_while_a_plan_is_under_way() -> None:
    made = deployment()
    report(made, 0, 16)
    made.put_together()
    under_way = plan(made)
    assert found_outdated(made, 16, 192) == CHANGE + 4
    made.weighing()
    assert not made.may_call_off, "heat is looked at once at a time"
    assert made.weighed(OUTLOOK, under_way.plan_id, 0.0)
    assert made.obstacle() == "plan 1 is being called off"
    assert not made.may_call_off


def test_heat_that_has_not_changed_and_a_pause_leave_a_plan_alone() -> None:
    made = deployment()
    report(made, 0, 16)
    made.put_together()
    under_way = plan(made)
    assert found_outdated(made, 16, 192) is not None
    made.set_paused(True)
    assert not made.may_call_off
    made.set_paused(False)
    made.weighing()
    assert not made.weighed(replace(OUTLOOK, burst=True), under_way.plan_id, 0.0)
    assert made.plan is under_way


def test_of_two_plans_one_switches_a_layer_however_often_heat_changes() -> None:
    made = deployment()
    report(made, 0, 16)
    made.put_together()
    first = plan(made)
    assert found_outdated(made, 16, 192) == CHANGE + 4
    made.weighing()
    assert made.weighed(OUTLOOK, first.plan_id, 0.0)
    for rank in range(RANKS):
        made.plan_status(rank, PlanStatus(1, PlanState.CALLED_OFF), 0.0)
    assert made.plan is None
    assert made.decisions.pace is not None
    assert made.decisions.pace.due
    # Pretend that heat has changed again since the second decision.
    second = plan(made, plan_id=2)
    made.decisions = replace(made.decisions, pace=made.decisions.pace.hastened(), answered=None)
    assert not made.may_call_off
    made.plan = replace(second, committed=1)
    assert made.may_call_off


def test_steps_that_wait_for_the_loop_are_tested_as_well() -> None:
    made = deployment()
    report(made, 0, 16)
    made.put_together()
    decide(made)
    # Nobody assembles these reports before the next ones come.
    for first in range(16, 144, 16):
        report(made, first, 16)
    assert made.decisions.pace is not None
    assert made.decisions.pace.alarm is not None


def test_ranks_are_asked_for_short_reports_while_heat_has_just_changed() -> None:
    made = deployment()
    feed = HeatFeed(256)
    usual = feed.reporting(made).report_steps
    lengths = {}
    for first in range(0, 160, 4):
        report(made, first, 4)
        while made.put_together(1):
            pass
        assert made.decisions.pace is not None
        if made.decisions.pace.due:
            decide(made)
        lengths[first + 4] = feed.reporting(made).report_steps
    assert usual == 16
    assert {lengths[step] for step in range(4, CHANGE, 4)} == {usual}
    assert lengths[CHANGE + 4] == lengths[CHANGE + 8] == lengths[CHANGE + 16] == 4
    assert lengths[CHANGE + 20] == usual
