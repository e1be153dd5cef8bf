"""A decision uses the heat since the last change and tells changes from bursts. Its forecasts are checked later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Int32
from eplb_core.planner.decision import DecisionInputs, decide
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Outlook, Promise
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, first_placement, live_of


def heat(steps: int, seed: int) -> Int32:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.ones(EXPERTS), LAYERS)
    drawn = [generator.multinomial(4096, row_E, size=steps) for row_E in popularity_LE]
    return np.stack(drawn, axis=1).astype(np.int32)


def decision_inputs(heat_TLE: Int32, session: DecisionSession | None = None) -> DecisionInputs:
    return DecisionInputs(
        Window(heat_TLE),
        live_of(first_placement()).serving,
        None,
        Topology.flat(RANKS),
        PlannerSettings(threads=1),
        session or DecisionSession(),
    )


def before_decision(steps: int, interval: int, *, first: bool = False) -> DecisionSession:
    """Return the state after ``steps`` steps, just before a decision.

    The decision is the first one only if ``first`` is set.
    """
    pace = Pace(steps, memory=512, longest=interval, seen=steps, due_at=steps, has_decided=not first)
    return DecisionSession(pace)


def test_a_decision_uses_all_heat_if_there_is_no_pace() -> None:
    inputs = decision_inputs(heat(200, 0))
    assert (inputs.decision_window.steps, inputs.serving_steps) == (200, None)


def test_stationary_heat_is_used_beyond_one_interval() -> None:
    inputs = decision_inputs(heat(200, 0), before_decision(200, 64))
    assert 128 <= inputs.decision_window.steps <= 200
    assert inputs.serving_steps == 24.0


def test_a_first_decision_uses_all_steps_and_assumes_that_its_placement_serves_a_whole_workload() -> None:
    inputs = decision_inputs(heat(200, 0), before_decision(200, 64, first=True))
    assert (inputs.decision_window.steps, inputs.serving_steps) == (200, 256.0)


def test_heat_from_before_a_change_is_left_out() -> None:
    changed_TLE = np.concatenate([heat(136, 0), heat(64, 1)])
    assert decision_inputs(changed_TLE, before_decision(200, 64)).decision_window.steps <= 64


def test_a_forecast_is_compared_with_the_gain_that_followed() -> None:
    inputs = decision_inputs(heat(200, 0), before_decision(200, 64))
    first = replace(inputs, initial=inputs.layout)
    plan, outlook = decide(first)
    forecasts = outlook.forecasts
    assert (plan.moves > 0, forecasts.held) == (True, None)
    pace = replace(first.session.pace, seen=264)
    later = replace(first, session=replace(first.session, pace=pace, forecasts=forecasts))
    # The plan was not carried out, so it gained nothing.
    later_forecasts = decide(later)[1].forecasts
    assert (later_forecasts.misses, later_forecasts.held) == ((forecasts.gain.mean,), False)


def after_departure(before: int) -> DecisionSession:
    """Return the state after ``before`` steps plus four steps whose ratios depart from the promise."""
    promise = Promise(np.full(LAYERS + 1, 1.2), np.full(LAYERS + 1, 1e-4), np.ones(LAYERS + 1), before)
    session = DecisionSession(Pace(first=before, memory=512, longest=512))
    session, _ = session.after_steps(np.full((before, LAYERS), 1.2))
    session = session.begin_decision(before).after_decision(Outlook(promise), 0.0, changed=False)
    par_TL = np.full((4, LAYERS), 1.8)
    while len(par_TL):
        session, processed = session.after_steps(par_TL)
        par_TL = par_TL[processed:]
    assert session.pace is not None
    assert session.pace.settling
    return session


def test_heat_decides_whether_a_departure_from_the_promise_is_a_change_or_a_burst() -> None:
    changed = decision_inputs(np.concatenate([heat(100, 0), heat(4, 1)]), after_departure(100))
    assert (changed.decision_window.steps, changed.serving_steps) == (4, 100.0)
    assert not decide(changed)[1].burst
    burst = decision_inputs(heat(104, 0), after_departure(100))
    assert (burst.decision_window.steps, burst.serving_steps) == (104, 24.0)
    assert decide(burst)[1].burst
