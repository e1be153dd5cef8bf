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
from eplb_core.planner.score import Gain, WindowSplit
from eplb_core.planner.session import DecisionSession, steps_paying
from eplb_core.solver.model import Recommendation
from tests.control.core.story import Story
from tests.control.fake_group import EXPERTS, LAYERS

LIVE = Story().live
LAYOUT = LIVE.serving
OUTLOOK = Outlook(
    Promise(np.full(3, 1.2), np.full(3, 1e-4), np.ones(3), 64),
    recommendations=(Recommendation(8.0, 0.1), None),
    layout=LAYOUT,
)
PRICE = TimePrice(CostCurve(0.0, 0.0, 0.0, 1.0), "assumed", "by tokens")


def serving(session: DecisionSession, steps: int, ratio: float) -> DecisionSession:
    """Return the session after ``steps`` steps at this PAR, even if a decision becomes due on the way."""
    par_TL = np.full((steps, 2), ratio)
    while len(par_TL):
        session, processed = session.after_steps(par_TL)
        par_TL = par_TL[processed:]
    return session


def decided_once() -> DecisionSession:
    session = serving(DecisionSession(pace=Pace(first=8, memory=64, longest=64)), 8, 1.2)
    assert session.pace is not None
    assert session.pace.due
    return session.begin_decision(8)


def is_alarmed(session: DecisionSession) -> bool:
    assert session.pace is not None
    return session.pace.alarm is not None


def test_all_steps_of_a_report_count_even_if_a_decision_becomes_due_partway_through() -> None:
    pace = serving(DecisionSession(pace=Pace(first=8, memory=64, longest=64)), 50, 1.2).pace
    assert pace is not None
    assert (pace.seen, pace.due) == (50, True)


def test_a_decision_that_keeps_all_layers_is_tested_immediately() -> None:
    session = decided_once().after_decision(OUTLOOK, 0.0, changed=False)
    assert (session.replaced_layout, session.replaced_at) == (None, None)
    assert is_alarmed(serving(session, 4, 1.8))


def test_a_plan_is_tested_and_its_gain_is_counted_from_its_last_commit() -> None:
    current = serving(decided_once().after_decision(OUTLOOK, 0.0, changed=True), 6, 1.8)
    assert not is_alarmed(current)
    assert current.replaced_at is None
    done = current.after_plan(done=True)
    assert (done.replaced_layout, done.replaced_at, done.promise) == (LAYOUT, 14, None)
    assert is_alarmed(serving(done, 4, 1.8))


SPLIT = WindowSplit.of(np.ones((1, LAYERS, EXPERTS)), LIVE.placement, LIVE.log2phy_RLE, None, "tables")


def test_a_plan_in_progress_is_tested_against_its_target_placement() -> None:
    decided = decided_once().after_decision(replace(OUTLOOK, planned=SPLIT), 0.0, changed=True)
    assert not is_alarmed(serving(decided, 6, 1.2))
    changed = serving(decided, 8, 1.8)
    assert is_alarmed(changed)
    assert changed.check_is_due(switched=0)
    assert not changed.begin_check().check_is_due(switched=0)
    # After the plan, the change test restarts and compares the ratios of served steps with the promise.
    done = serving(decided, 6, 1.2).after_plan(done=True)
    assert done.planned_split is None
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
def test_a_change_after_the_decision_makes_its_plan_stale(findings: dict[str, Any], outdated: bool) -> None:
    decided = decided_once().after_decision(replace(OUTLOOK, planned=SPLIT), 0.0, changed=True)
    changed = serving(decided, 10, 1.8)
    weighed, answer = changed.begin_check().after_check(replace(OUTLOOK, **findings))
    assert answer is outdated
    assert weighed.pace is not None
    assert weighed.pace.due is outdated
    ended = weighed.after_plan(done=False)
    assert ended.pace is not None
    assert (ended.pace.due, ended.promise, ended.planned_split) == (outdated, None, None)


def test_the_change_that_led_to_a_plan_does_not_make_it_stale() -> None:
    alarmed = serving(decided_once().after_decision(OUTLOOK, 0.0, changed=False), 6, 1.8)
    assert is_alarmed(alarmed)
    decided = alarmed.begin_decision(14).after_decision(replace(OUTLOOK, planned=SPLIT), 0.0, changed=True)
    later = serving(decided, 6, 1.2)
    assert later.check_is_due(switched=0), "a decision is due, so the service looks for a newer change"
    assert later.begin_check().after_check(OUTLOOK)[1] is False


def test_a_change_during_a_decision_makes_its_plan_stale() -> None:
    deciding = serving(decided_once().after_decision(OUTLOOK, 0.0, changed=False), 24, 1.2).begin_decision(32)
    decided = serving(deciding, 8, 1.8).after_decision(replace(OUTLOOK, planned=SPLIT), 0.0, changed=True)
    later = serving(decided, 8, 1.8)
    assert later.check_is_due(switched=0)
    assert later.begin_check().after_check(OUTLOOK)[1] is True


def test_a_failed_plan_drops_its_promise_and_recommendations() -> None:
    outlook = replace(OUTLOOK, forecasts=Forecasts(Gain(0.2, 0.1, 0.3, 0.05), seen=8, misses=(0.1,)))
    assert DecisionSession().after_decision(outlook, 0.0, changed=True).forecasts.gain
    promised = decided_once().after_decision(outlook, 0.0, changed=True)
    session = promised.after_plan(done=False)
    assert (promised.forecasts.since(10), session.forecasts.since(10)) == (2, 0)
    assert (session.replaced_layout, session.replaced_at) == (None, None)
    assert (
        promised.recommendations,
        promised.without_expectations().recommendations,
        session.recommendations,
    ) == (
        outlook.recommendations,
        (),
        (),
    )
    assert (session.forecasts.misses, session.without_expectations().forecasts.misses) == ((0.1,), ())
    assert not is_alarmed(serving(session, 10, 1.8))


def test_an_alarm_is_dismissed_by_a_decision_that_finds_a_burst() -> None:
    alarmed = serving(decided_once().after_decision(OUTLOOK, 0.0, changed=False), 4, 1.8).begin_decision(12)
    for burst in (False, True):
        decided = alarmed.after_decision(replace(OUTLOOK, burst=burst), 0.0, changed=False)
        assert is_alarmed(decided) is not burst
        assert decided.pace is not None
        assert decided.pace.seen == 12


def test_cpu_time_of_decisions_and_appraisals_delays_the_next_decision() -> None:
    decided = decided_once().after_decision(OUTLOOK, 100.0, changed=False)
    assert decided.pace is not None
    assert decided.pace.due_at == 100
    appraised = decided.with_time_price(PRICE, 30.5)
    assert appraised.pace is not None
    assert appraised.pace.due_at == 131
    assert [session.time_price_is_due for session in (decided, appraised)] == [True, False]
    assert appraised.fitted_curve is None
    fitted = decided.with_time_price(replace(PRICE, kind="fitted"), 30.5)
    assert fitted.fitted_curve is fitted.with_time_price(PRICE, 1.0).fitted_curve is PRICE.curve
    assert appraised.time_price_due_at == decided.pace.seen + 8 * 30.5


def test_the_end_of_a_plan_made_by_a_different_service_changes_nothing() -> None:
    session = decided_once()
    assert session.after_plan(done=True) == session


def test_after_a_call_off_the_next_plan_is_checked_only_once_a_layer_has_switched() -> None:
    decided = decided_once().after_decision(replace(OUTLOOK, planned=SPLIT), 0.0, changed=True)
    called_off = serving(decided, 8, 1.8).after_plan(done=False, called_off_unswitched=True)
    planned = replace(OUTLOOK, planned=SPLIT)
    again = serving(called_off.begin_decision(24).after_decision(planned, 0.0, changed=True), 24, 1.8)
    assert not again.check_is_due(switched=0)
    assert again.check_is_due(switched=1)
    assert not again.after_plan(done=True).was_called_off_unswitched


def test_cpu_seconds_are_converted_to_steps_of_the_measured_length() -> None:
    assert steps_paying(0.4, cpu_share=0.1, step_us=40_000.0) == pytest.approx(100)
    assert steps_paying(0.4, cpu_share=0.1, step_us=10_000.0) == pytest.approx(400)
