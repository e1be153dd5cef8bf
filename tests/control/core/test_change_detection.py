"""The service tests every step for a change of heat, and decides on the same steps however long the reports are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import Limits
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.planner.plan import Outlook, Promise
from eplb_service.wire.agent import decode_hello
from eplb_service.wire.heat import HeatReport, StepPhase
from tests.control.core.story import PLAN_TIMEOUT
from tests.control.fake_group import LAYERS, RANKS, SLOTS, first_placement, hello_of, live_of

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
        counts = np.ones((steps, LAYERS, SLOTS), dtype=np.int32)
        if rank == 0:
            counts[max(CHANGE - first, 0) :] = 3
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
