"""The service tests every step for a change in heat, and makes decisions at the same steps for any report length."""

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
"""Step at which rank 0 begins to receive three times as many tokens."""


def new_deployment() -> Deployment:
    """Return a deployment whose ranks are all connected and whose first decision is due after 16 steps."""
    deployment = Deployment("decode", Limits(256, 256, PLAN_TIMEOUT, interval=16))
    live = live_of(first_placement())
    for rank in range(RANKS):
        deployment.hello(decode_hello(hello_of(live, rank)))
    assert deployment.session.pace is not None
    deployment.session = replace(deployment.session, pace=replace(deployment.session.pace, longest=512))
    return deployment


def report(deployment: Deployment, first: int, steps: int) -> None:
    for rank in range(RANKS):
        counts = np.full((steps, LAYERS, SLOTS), 1000, dtype=np.int32)
        if rank == 0:
            counts[max(CHANGE - first, 0) :] = 3000
        phases = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
        deployment.heat_report(rank, HeatReport(first, (0,) * LAYERS, counts, phases))


def decide(deployment: Deployment) -> None:
    deployment.begin_decision()
    assert deployment.heat is not None
    channels = LAYERS + 1
    par = float(deployment.heat.newest_par(deployment.assembled - 1, (0,) * LAYERS).mean())
    promise = Promise(np.full(channels, par), np.full(channels, 1e-4), np.ones(channels), 16)
    deployment.record_decision(Outlook(promise), 0.0, changed=False)


@pytest.mark.parametrize("steps", [1, 4, 16, 64])
def test_decisions_are_made_at_the_same_steps_for_any_report_length(steps: int) -> None:
    deployment = new_deployment()
    decisions = []
    for first in range(0, 192, steps):
        report(deployment, first, steps)
        has_steps = True
        while has_steps:
            has_steps = deployment.assemble_steps(4)
            assert deployment.session.pace is not None
            if deployment.session.pace.due:
                decisions.append((deployment.assembled, deployment.session.settling))
                decide(deployment)
    assert decisions[:3] == [(16, False), (40, False), (88, False)]
    # Decisions are made 4, 8 and 16 steps after the change.
    assert decisions[3:6] == [(104, True), (108, True), (116, True)]


def plan(deployment: Deployment, plan_id: int = 1) -> PlanTracker:
    """Record a decision, based on the newest steps, that changes two layers; offer its plan and return the plan."""
    assert deployment.live is not None
    assert deployment.heat is not None
    decision = decision_of(deployment.live, 0, 1)
    window = Window(deployment.heat.newest_heat(deployment.assembled - 1))
    split = deployment.live.serving.changed_by(decision).split_of(window, "tables")
    par = float(split.par_of_steps(window.heat_TLE, 0).mean())
    promise = Promise(np.full(LAYERS + 1, par), np.full(LAYERS + 1, 1e-4), np.ones(LAYERS + 1), 16)
    deployment.begin_decision()
    deployment.record_decision(Outlook(promise, planned=split), 0.0, changed=True)
    deployment.offer(PlanTracker.of(plan_id, deployment.live, decision), 0.0)
    assert deployment.plan is not None
    return deployment.plan


def step_of_doubt(deployment: Deployment, first: int, last: int) -> int | None:
    """Report steps until ``last``; return the step at which the plan is suspected to be outdated, or None."""
    for step in range(first, last, 4):
        report(deployment, step, 4)
        while deployment.assemble_steps(1):
            pass
        if deployment.may_call_off:
            return deployment.assembled
    return None


def test_a_change_during_a_plan_calls_the_plan_off() -> None:
    deployment = new_deployment()
    report(deployment, 0, 16)
    deployment.assemble_steps()
    current_plan = plan(deployment)
    assert step_of_doubt(deployment, 16, 192) == CHANGE + 4
    deployment.begin_check()
    assert not deployment.may_call_off, "only one check runs at a time"
    assert deployment.record_check(OUTLOOK, current_plan.plan_id, 0.0)
    assert deployment.obstacle() == "plan 1 is being called off"
    assert not deployment.may_call_off


def test_a_pause_or_a_burst_does_not_call_the_plan_off() -> None:
    deployment = new_deployment()
    report(deployment, 0, 16)
    deployment.assemble_steps()
    current_plan = plan(deployment)
    assert step_of_doubt(deployment, 16, 192) is not None
    deployment.set_paused(True)
    assert not deployment.may_call_off
    deployment.set_paused(False)
    deployment.begin_check()
    assert not deployment.record_check(replace(OUTLOOK, burst=True), current_plan.plan_id, 0.0)
    assert deployment.plan is current_plan


def test_the_second_plan_in_a_row_cannot_be_called_off_before_its_first_commit() -> None:
    deployment = new_deployment()
    report(deployment, 0, 16)
    deployment.assemble_steps()
    first = plan(deployment)
    assert step_of_doubt(deployment, 16, 192) == CHANGE + 4
    deployment.begin_check()
    assert deployment.record_check(OUTLOOK, first.plan_id, 0.0)
    for rank in range(RANKS):
        deployment.plan_status(rank, PlanStatus(1, PlanState.CALLED_OFF), 0.0)
    assert deployment.plan is None
    assert deployment.session.pace is not None
    assert deployment.session.pace.due
    # Pretend that heat has changed again since the second decision.
    second = plan(deployment, plan_id=2)
    deployment.session = replace(
        deployment.session, pace=deployment.session.pace.hastened(), answered_alarm=None
    )
    assert not deployment.may_call_off
    deployment.plan = replace(second, committed=1)
    assert deployment.may_call_off


def test_steps_pending_assembly_are_tested_for_a_change() -> None:
    deployment = new_deployment()
    report(deployment, 0, 16)
    deployment.assemble_steps()
    decide(deployment)
    # Each of these reports is still unassembled when the next one arrives.
    for first in range(16, 144, 16):
        report(deployment, first, 16)
    assert deployment.session.pace is not None
    assert deployment.session.pace.alarm is not None


def test_ranks_send_short_reports_right_after_a_change() -> None:
    deployment = new_deployment()
    feed = HeatFeed(256)
    usual = feed.reporting(deployment).report_steps
    lengths = {}
    for first in range(0, 160, 4):
        report(deployment, first, 4)
        while deployment.assemble_steps(1):
            pass
        assert deployment.session.pace is not None
        if deployment.session.pace.due:
            decide(deployment)
        lengths[first + 4] = feed.reporting(deployment).report_steps
    assert usual == 16
    assert {lengths[step] for step in range(4, CHANGE, 4)} == {usual}
    assert lengths[CHANGE + 4] == lengths[CHANGE + 8] == lengths[CHANGE + 16] == 4
    assert lengths[CHANGE + 20] == usual
