"""Decisions become due according to measured ratios. A plan's promise is tested once all its layers are committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.planner.counterfactual import TimePrice
from eplb_core.planner.forecast import Forecasts
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Outlook, Promise
from eplb_core.planner.score import Gain, KnownSplit
from eplb_core.solver.model import Recommendation
from eplb_service.control.core.decisions import Decisions
from tests.control.core.story import Story
from tests.control.fake_group import EXPERTS, LAYERS

OUTLOOK = Outlook(
    Promise(np.full(3, 1.2), np.full(3, 1e-4), np.ones(3), 64),
    recommendations=(Recommendation(8.0, 0.1), None),
)
LIVE = Story().live
PRICE = TimePrice(CostCurve(0.0, 0.0, 0.0, 1.0), "assumed", "by tokens")


def serving(decisions: Decisions, steps: int, ratio: float) -> Decisions:
    return decisions.after_steps(np.full((steps, 2), ratio))


def decided_once() -> Decisions:
    decisions = serving(Decisions(pace=Pace(first=8, memory=64, longest=64)), 8, 1.2)
    assert decisions.pace is not None
    assert decisions.pace.due
    return decisions.deciding(8)


def is_alarmed(decisions: Decisions) -> bool:
    assert decisions.pace is not None
    return decisions.pace.alarm is not None


def test_all_steps_of_a_report_count_even_if_a_decision_becomes_due_among_them() -> None:
    pace = serving(Decisions(pace=Pace(first=8, memory=64, longest=64)), 50, 1.2).pace
    assert pace is not None
    assert (pace.seen, pace.due) == (50, True)


def test_a_decision_that_keeps_all_layers_is_tested_at_once() -> None:
    decisions = decided_once().decided(OUTLOOK, LIVE, changed=False)
    assert (decisions.before, decisions.replaced_at) == (None, None)
    assert is_alarmed(serving(decisions, 4, 1.8))


def test_a_plan_is_tested_and_its_gain_counted_from_its_last_commit_on() -> None:
    current = serving(decided_once().decided(OUTLOOK, LIVE, changed=True), 6, 1.8)
    assert not is_alarmed(current)
    assert current.replaced_at is None
    done = current.plan_ended(done=True)
    assert (done.before, done.replaced_at, done.promise) == (LIVE, 14, None)
    assert is_alarmed(serving(done, 4, 1.8))


SPLIT = KnownSplit.of(np.ones((1, LAYERS, EXPERTS)), LIVE.placement, LIVE.log2phy_RLE, None, "tables")


def test_a_plan_in_progress_is_tested_with_the_placement_that_it_leads_to() -> None:
    decided = decided_once().decided(replace(OUTLOOK, planned=SPLIT), LIVE, changed=True)
    assert not is_alarmed(serving(decided, 6, 1.2))
    changed = serving(decided, 8, 1.8)
    assert is_alarmed(changed)
    assert changed.may_be_outdated
    assert not changed.weighing().may_be_outdated
    # After the plan, the test starts again and compares the ratios of served steps with the promise.
    done = serving(decided, 6, 1.2).plan_ended(done=True)
    assert done.planned is None
    assert is_alarmed(serving(done, 4, 1.8))


@pytest.mark.parametrize(
    ("findings", "outdated"),
    [
        ({}, True),
        ({"burst": True}, False),
        ({"change_at": 17}, True),
        ({"change_at": 17, "too_recent": True}, False),
    ],
    ids=["a change", "a burst", "a later change", "a change too recent to decide on"],
)
def test_a_plan_is_outdated_by_a_change_after_its_decision(findings: dict[str, Any], outdated: bool) -> None:
    decided = decided_once().decided(replace(OUTLOOK, planned=SPLIT), LIVE, changed=True)
    changed = serving(decided, 10, 1.8)
    weighed, answer = changed.weighing().weighed(replace(OUTLOOK, **findings))
    assert answer is outdated
    assert weighed.pace is not None
    assert weighed.pace.due is outdated
    ended = weighed.plan_ended(done=False)
    assert ended.pace is not None
    assert (ended.pace.due, ended.promise, ended.planned) == (outdated, None, None)


def test_the_change_that_led_to_a_plan_does_not_outdate_it() -> None:
    alarmed = serving(decided_once().decided(OUTLOOK, LIVE, changed=False), 6, 1.8)
    assert is_alarmed(alarmed)
    decided = alarmed.deciding(14).decided(replace(OUTLOOK, planned=SPLIT), LIVE, changed=True)
    later = serving(decided, 6, 1.2)
    assert later.may_be_outdated, "a decision is due, so the service looks for a newer change"
    assert later.weighing().weighed(OUTLOOK)[1] is False


def test_a_change_during_a_decision_outdates_its_plan() -> None:
    deciding = serving(decided_once().decided(OUTLOOK, LIVE, changed=False), 24, 1.2).deciding(32)
    decided = serving(deciding, 8, 1.8).decided(replace(OUTLOOK, planned=SPLIT), LIVE, changed=True)
    later = serving(decided, 8, 1.8)
    assert later.may_be_outdated
    assert later.weighing().weighed(OUTLOOK)[1] is True


def test_a_failed_plan_drops_its_promise_and_recommendations() -> None:
    outlook = replace(OUTLOOK, forecasts=Forecasts(Gain(0.2, 0.1, 0.3, 0.05), seen=8, misses=(0.1,)))
    assert Decisions().decided(outlook, LIVE, changed=True).forecasts.gain
    promised = decided_once().decided(outlook, LIVE, changed=True)
    decisions = promised.plan_ended(done=False)
    assert (promised.forecasts.since(10), decisions.forecasts.since(10)) == (2, 0)
    assert (decisions.before, decisions.replaced_at) == (None, None)
    assert (promised.recommendations, promised.resting().recommendations, decisions.recommendations) == (
        outlook.recommendations,
        (),
        (),
    )
    assert (decisions.forecasts.misses, decisions.resting().forecasts.misses) == ((0.1,), ())
    assert not is_alarmed(serving(decisions, 10, 1.8))


def test_an_alarm_is_dismissed_by_a_decision_that_finds_a_burst() -> None:
    alarmed = serving(decided_once().decided(OUTLOOK, LIVE, changed=False), 4, 1.8).deciding(12)
    for burst in (False, True):
        decided = alarmed.decided(replace(OUTLOOK, burst=burst), LIVE, changed=False)
        assert is_alarmed(decided) is not burst
        assert decided.pace is not None
        assert decided.pace.seen == 12


def test_cpu_time_of_decisions_and_appraisals_delays_the_next_decision() -> None:
    decided = decided_once().decided(replace(OUTLOOK, cost=100.0), LIVE, changed=False)
    assert decided.pace is not None
    assert decided.pace.due_at == 100
    appraised = decided.appraised(PRICE, 30.5)
    assert appraised.pace is not None
    assert appraised.pace.due_at == 131
    assert [decisions.to_appraise for decisions in (decided, appraised)] == [True, False]
    assert appraised.fitted is None
    fitted = decided.appraised(replace(PRICE, kind="fitted"), 30.5)
    assert fitted.fitted is fitted.appraised(PRICE, 1.0).fitted is PRICE.curve
    assert appraised.appraise_at == decided.pace.seen + 8 * 30.5


def test_the_end_of_a_plan_by_another_service_changes_nothing() -> None:
    decisions = decided_once()
    assert decisions.plan_ended(done=True) is decisions
