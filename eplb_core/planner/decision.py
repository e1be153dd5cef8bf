"""Computations of the decision loop (``planner.session``): decisions, plan checks, the time price and the gain.

They are pure functions of their inputs, so a service can run them on a separate thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from eplb_core.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.placement import Float64
from eplb_core.planner.counterfactual import Served, TimePrice, priced, time_price, worth_of
from eplb_core.planner.decide import plan
from eplb_core.planner.forecast import Forecasts
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Layout, Outlook, Plan, layout_gain, promise_of_plan, promise_of_steps
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import Worth
from eplb_core.solver.model import SearchOptions


@dataclass(frozen=True)
class DecisionInputs:
    """Inputs of a decision.

    Parameters
    ----------
    window
        All remembered steps, newest last.
    layout
        Current layout.
    initial
        Initial layout, the baseline of the forecast gain; ``None`` if it is unknown.
    topology
        Nodes and token groups of the ranks.
    settings
        Settings of the planner.
    session
        State of the decision loop after earlier decisions, just before ``DecisionSession.begin_decision``.
    moving
        Measured costs of moves.
    times
        Measured durations of the window's steps; ``None`` if they are unknown.
    search
        Search options, which can disable components of the method.
    """

    window: Window
    layout: Layout
    initial: Layout | None
    topology: Topology
    settings: PlannerSettings
    session: DecisionSession
    moving: MovingCosts = NOTHING_MEASURED
    times: StepTimes | None = None
    search: SearchOptions = field(default_factory=SearchOptions)

    @cached_property
    def pace(self) -> Pace | None:
        """Decision schedule, updated for changes in heat; ``None`` if decisions are made at fixed intervals."""
        pace = self.session.pace
        return None if pace is None else pace.weighed(self.window.heat_TLE)

    @property
    def decision_window(self) -> Window:
        """Window that the decision uses: all steps, or those that the schedule selects."""
        heat_TLE = self.window.heat_TLE
        return self.newest(len(heat_TLE) if self.pace is None else self.pace.window_steps(heat_TLE))

    @property
    def serving_steps(self) -> float | None:
        """Number of steps that the result is expected to serve; ``None`` to assume the length of the window."""
        return None if self.pace is None else self.pace.serving_steps

    @property
    def seen(self) -> int:
        """Number of steps served so far; 0 if decisions are made at fixed intervals."""
        return 0 if self.pace is None else self.pace.seen

    def newest(self, steps: int) -> Window:
        """Return a window of the newest ``steps`` steps."""
        return Window(self.window.heat_TLE[self.window.steps - steps :], self.window.source_RLE)


def decide(inputs: DecisionInputs) -> tuple[Plan, Outlook]:
    """Make a decision. If heat has changed too recently, the plan is empty and the outlook's ``too_recent`` is True.

    Returns
    -------
    plan : Plan
        Layers to change, and a verdict on each layer.
    outlook : Outlook
        Promise, forecasts and other results for ``DecisionSession.after_decision``.
    """
    settings = inputs.settings
    session = inputs.session
    if settings.fitted_curve and settings.cost_curve is None:
        settings = replace(settings, cost_curve=session.fitted_curve)
    checked = check(inputs)
    if checked.too_recent:
        return Plan((), ()), checked
    window = inputs.decision_window
    layout = inputs.layout
    paid = _has_paid(inputs)
    follows = inputs.pace is not None and inputs.pace.follows(paid)
    new_plan = plan(
        window,
        layout.placement,
        layout.log2phy_RLE,
        inputs.topology,
        settings,
        inputs.serving_steps,
        priced(inputs.moving, session.time_price),
        inputs.search,
        session.recommendations if follows else (),
    )
    promise, expected_TL = promise_of_plan(new_plan)
    outlook = replace(
        checked,
        promise=promise,
        paid=paid,
        forecasts=_forecasts(inputs, window, expected_TL),
        recommendations=new_plan.recommendations,
        layout=layout,
        planned=layout.changed_by(new_plan).split_of(window, settings.split) if new_plan.layers else None,
    )
    return new_plan, outlook


def check(inputs: DecisionInputs) -> Outlook:
    """Check the last alarm and search for a change in heat that raised no alarm. The outlook's promise is empty."""
    scheduled = inputs.session.pace
    pace = inputs.pace
    change_at = None
    if scheduled is not None and pace is not None and pace is not scheduled and pace.alarm is not None:
        change_at = pace.changed_at if pace.changed_at > scheduled.changed_at else None
    return Outlook(
        promise_of_steps(np.zeros((0, inputs.layout.placement.layers)), held_out=False),
        burst=pace is not scheduled and change_at is None,
        change_at=change_at,
        too_recent=pace is not None and pace.too_recent and change_at is not None,
    )


def price_time(inputs: DecisionInputs) -> TimePrice | None:
    """Estimate the time price from all steps; return ``None`` if there are neither step times nor a cost curve."""
    times = inputs.times
    if times is None:
        if inputs.settings.cost_curve is None:
            return None
        unknown_T = np.full(inputs.window.steps, np.nan)
        times = StepTimes(unknown_T, unknown_T)
    return time_price(inputs.settings, inputs.window, inputs.layout, times)


def evaluate_gain(inputs: DecisionInputs, served: Served) -> Worth | None:
    """Return the gain from balancing over the newest steps; ``None`` if the initial layout is unknown.

    Parameters
    ----------
    inputs
        Inputs whose heat includes the steps of ``served``.
    served
        Measured PAR and durations of the newest steps.
    """
    if inputs.initial is None:
        return None
    window = inputs.newest(len(served.par_TL))
    price = inputs.session.time_price
    return worth_of(window, inputs.initial, inputs.layout, served, inputs.settings, price)


def _forecasts(inputs: DecisionInputs, window: Window, expected_TL: Float64) -> Forecasts:
    """Forecast the gain over the initial layout until the next decision.

    Parameters
    ----------
    inputs
        Inputs of the decision.
    window
        Window of the decision.
    expected_TL
        float64 ``[T, L]``, PAR that the decision expects for each step of the window.
    """
    initial = inputs.initial
    split = inputs.settings.split
    previous = inputs.session.forecasts
    if initial is None:
        return previous
    realised = None
    steps = min(previous.since(inputs.seen), inputs.window.steps)
    if steps:
        realised = layout_gain(inputs.newest(steps), initial, inputs.layout, split)
    initial_TL = initial.par_of_steps(window, split)
    return previous.next(initial_TL, expected_TL, inputs.serving_steps, inputs.seen, realised)


def _has_paid(inputs: DecisionInputs) -> bool | None:
    """Return True if the gain from the last change exceeds its standard error; ``None`` if either is unknown."""
    session = inputs.session
    if session.pace is None or session.replaced_layout is None or session.replaced_at is None:
        return None
    steps = min(session.pace.seen - session.replaced_at, inputs.window.steps)
    return layout_gain(
        inputs.newest(steps), session.replaced_layout, inputs.layout, inputs.settings.split
    ).paid
