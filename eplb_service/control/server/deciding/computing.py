"""Computations of one decision on a planner thread: the plan, its forecast, the time price, and the gain so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from eplb_core.cost.moving import MovingCosts
from eplb_core.heat.assembler import RememberedHeat
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import HeatError, Window
from eplb_core.placement import Float64
from eplb_core.planner.counterfactual import Served, TimePrice, priced, time_price, worth_of
from eplb_core.planner.dealing import fitted_to_host
from eplb_core.planner.decide import plan
from eplb_core.planner.forecast import Forecasts
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Layout, Outlook, Plan, gain_over, promise_for, promise_of
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import Worth
from eplb_core.wire.fields import WireError, check_deployment
from eplb_service.control.core.decisions import Decisions
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment
from eplb_service.io.open_trace import open_trace


class PriorError(ValueError):
    """Raised when a prior cannot be used. The error message names the prior and the reason."""


_DEFAULT_STEP_US = 40_000.0
"""Assumed duration of a step, in microseconds, until the ranks have measured one."""

Prior: TypeAlias = tuple[RememberedHeat, str]
"""Heat for a deployment's first plan, before it has heat of its own, and the name of the heat's source."""


class Priors:
    """The priors of a service, for example the heat of a prefill deployment for a decode deployment.

    Raises ``PriorError`` if the text is malformed or if a trace cannot be read.

    Parameters
    ----------
    text
        ``DEPLOYMENT=SOURCE,...``. A source is a trace if a file of that name exists, and otherwise a deployment.
    most_steps
        Maximum number of steps to keep from a trace. The newest steps are kept.
    """

    def __init__(self, text: str, most_steps: int) -> None:
        self._sources = _parse_sources(text)
        paths = {source: Path(source) for source in self._sources.values()}
        self._traces = {
            source: _newest_heat(path, most_steps) for source, path in paths.items() if path.exists()
        }

    def of(self, deployment: Deployment, deployments: Mapping[str, Deployment]) -> Prior | None:
        """Return the prior of a deployment; ``None`` if it has no prior or the prior's source has no heat yet.

        Raises ``PriorError`` if the heat comes from a different model.

        Parameters
        ----------
        deployment
            Deployment for which the first plan is made.
        deployments
            All deployments of the service, by name.
        """
        source = self._sources.get(deployment.name)
        if source is None or deployment.group is None:
            return None
        heat = self._traces.get(source)
        if heat is None:
            source_deployment = deployments.get(source)
            if (
                source_deployment is None
                or source_deployment.heat is None
                or not source_deployment.heat.steps
            ):
                return None
            # Source heat refers to the ranks of the source deployment, so it cannot be used here.
            heat = replace(source_deployment.heat.remembered(), sources=())
        shape = deployment.group.shape
        layers, experts = heat.shape
        if heat.shape != (shape.layers, shape.experts):
            raise PriorError(
                f"the prior {source!r} has {layers} layers x {experts} experts, but the deployment has "
                f"{shape.layers} x {shape.experts}; choose a source that serves the same model"
            )
        return heat, source


def _parse_sources(text: str) -> dict[str, str]:
    """Return the source of each deployment's prior; raises ``PriorError`` if the text is malformed.

    Examples
    --------
    >>> _parse_sources("decode=prefill, chat=chat.zarr")
    {'decode': 'prefill', 'chat': 'chat.zarr'}
    """
    sources: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, source = entry.partition("=")
        try:
            check_deployment(name, "the deployment")
        except WireError as error:
            raise PriorError(f"{entry!r} is not a valid prior: {error}") from error
        if not source or name in sources or source == name:
            raise PriorError(
                f"{entry!r} is not a valid prior; use DEPLOYMENT=SOURCE, with one source per deployment, which must "
                "not be the deployment itself"
            )
        sources[name] = source
    return sources


def _newest_heat(path: Path, most_steps: int) -> RememberedHeat:
    try:
        trace = open_trace(path)
        heat_TLE = trace.heat(max(0, trace.steps - most_steps), trace.steps)
    except HeatError as error:
        raise PriorError(str(error)) from error
    if not np.any(heat_TLE):
        raise PriorError(
            f"{path}: none of the newest {len(heat_TLE)} steps has any tokens; choose another trace"
        )
    return RememberedHeat(tuple(heat_TLE), heat_TLE.shape[1:])


@dataclass(frozen=True)
class DecisionInputs:
    """Inputs of a decision.

    Parameters
    ----------
    heat
        Heat of the deployment's recent steps, or of a prior.
    live
        Current layout.
    found
        Initial layout; ``None`` if it is unknown.
    topology
        Nodes and token groups of the ranks.
    settings
        Settings of the planner.
    decisions
        State after earlier decisions, including the schedule of the next one.
    moving
        Costs of moves, as measured by the ranks.
    times
        Measured durations of the steps of ``heat``; ``None`` for a prior.
    cpu_share
        Number of CPU cores that decisions may use on average.
    """

    heat: RememberedHeat
    live: DeployedLayout
    found: Layout | None
    topology: Topology
    settings: PlannerSettings
    decisions: Decisions
    moving: MovingCosts
    times: StepTimes | None = None
    cpu_share: float = 1.0

    @classmethod
    def of(
        cls, deployment: Deployment, settings: PlannerSettings, prior: Prior | None = None
    ) -> DecisionInputs | None:
        """Collect the inputs of a decision; ``None`` if the ranks have disconnected.

        Parameters
        ----------
        deployment
            The deployment.
        settings
            Settings of the planner.
        prior
            Prior to use in place of the deployment's heat, without step times and without a schedule.
        """
        group = deployment.group
        live = deployment.live
        heat = deployment.heat
        if group is None or live is None or heat is None:
            return None
        moving = deployment.switch_log.costs()
        topology = group.topology
        settings = fitted_to_host(settings, group.shape.width, entry_by_row=group.shape.entry_by_row)
        if prior is not None:
            return cls(prior[0], live, None, topology, settings, Decisions(), moving)
        return cls(
            heat.remembered(),
            live,
            deployment.found,
            topology,
            settings,
            deployment.decisions,
            moving,
            heat.step_times(live.layer_epochs),
            deployment.limits.cpu_share,
        )

    @cached_property
    def pace(self) -> Pace | None:
        """Schedule of decisions, updated with changes of heat; ``None`` if decisions are made at fixed intervals."""
        pace = self.decisions.pace
        return None if pace is None else pace.weighed(self.window.heat_TLE)

    @cached_property
    def window(self) -> Window:
        """All steps of ``heat``."""
        return Window(*self.heat.arrays())

    def newest(self, steps: int) -> Window:
        """Return a window of the newest ``steps`` steps."""
        window = self.window
        return Window(window.heat_TLE[window.steps - steps :], window.source_RLE)

    @property
    def looked_at(self) -> Window:
        """Window that the decision uses: all steps, or those that the schedule selects."""
        heat_TLE = self.window.heat_TLE
        return self.newest(len(heat_TLE) if self.pace is None else self.pace.window_steps(heat_TLE))

    @property
    def serving_steps(self) -> float | None:
        """Number of steps that the result is expected to serve; ``None`` for the length of the window."""
        return None if self.pace is None else self.pace.serving_steps

    @property
    def seen(self) -> int:
        """Number of steps served so far; 0 if decisions are made at fixed intervals."""
        return 0 if self.pace is None else self.pace.seen

    def steps_paying(self, cpu_seconds: float) -> float:
        """Return the number of steps over which the CPU budget of decisions adds up to ``cpu_seconds``."""
        step_us = None if self.times is None else self.times.mean_us
        return cpu_seconds / (self.cpu_share * (step_us or _DEFAULT_STEP_US) / 1e6)


def decide(inputs: DecisionInputs) -> tuple[Plan, Outlook, float]:
    """Make a decision. If heat has changed too recently, the plan is empty and the outlook's ``too_recent`` is True.

    Returns
    -------
    plan : Plan
        Layers to change, and a verdict on each layer.
    outlook : Outlook
        Promise, forecasts and other results for the schedule of later decisions.
    seconds : float
        Duration of the decision.
    """
    started = time.perf_counter()
    cpu_started = time.process_time()
    settings = inputs.settings
    if settings.fitted_curve and settings.cost_curve is None:
        settings = replace(settings, cost_curve=inputs.decisions.fitted)
    checked = weigh(inputs)
    live = inputs.live
    if checked.too_recent:
        return Plan((), ()), checked, time.perf_counter() - started
    window = inputs.looked_at
    paid = _paid(inputs)
    follows = inputs.pace is not None and inputs.pace.follows(paid)
    new_plan = plan(
        window,
        live.placement,
        live.log2phy_RLE,
        inputs.topology,
        settings,
        inputs.serving_steps,
        priced(inputs.moving, inputs.decisions.time_price),
        recommendations=inputs.decisions.recommendations if follows else (),
    )
    promise, expected_TL = promise_for(new_plan)
    forecasts = _forecasts(inputs, window, expected_TL)
    outlook = Outlook(
        promise,
        paid,
        forecasts,
        burst=checked.burst,
        change_at=checked.change_at,
        cost=inputs.steps_paying(time.process_time() - cpu_started),
        recommendations=new_plan.recommendations,
        planned=live.serving.changed_by(new_plan).split_of(window, settings.split)
        if new_plan.layers
        else None,
    )
    return new_plan, outlook, time.perf_counter() - started


def weigh(inputs: DecisionInputs) -> Outlook:
    """Check the last alarm and search for a change of heat that raised no alarm. The outlook's promise is empty."""
    cpu_started = time.process_time()
    scheduled = inputs.decisions.pace
    pace = inputs.pace
    change_at = None
    if scheduled is not None and pace is not None and pace is not scheduled and pace.alarm is not None:
        change_at = pace.changed_at if pace.changed_at > scheduled.changed_at else None
    return Outlook(
        promise_of(np.zeros((0, inputs.live.placement.layers)), held_out=False),
        burst=pace is not scheduled and change_at is None,
        change_at=change_at,
        too_recent=pace is not None and pace.too_recent and change_at is not None,
        cost=inputs.steps_paying(time.process_time() - cpu_started),
    )


def appraise(inputs: DecisionInputs) -> tuple[TimePrice, float] | None:
    """Estimate the time price from all steps; ``None`` if their durations are unknown, as for a prior.

    Returns
    -------
    tuple of TimePrice and float
        The price, and the number of steps over which the CPU budget pays for the estimate.
    """
    cpu_started = time.process_time()
    if inputs.times is None:
        return None
    price = time_price(inputs.settings, inputs.window, inputs.live.serving, inputs.times)
    return price, inputs.steps_paying(time.process_time() - cpu_started)


def judge(inputs: DecisionInputs, served: Served) -> Worth | None:
    """Return the gain from balancing over the newest steps; ``None`` if the initial layout is unknown.

    Parameters
    ----------
    inputs
        Inputs whose heat includes these steps.
    served
        PAR and durations of these steps, as measured.
    """
    if inputs.found is None:
        return None
    window = inputs.newest(len(served.par_TL))
    price = inputs.decisions.time_price
    return worth_of(window, inputs.found, inputs.live.serving, served, inputs.settings, price)


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
    initial = inputs.found
    split = inputs.settings.split
    previous = inputs.decisions.forecasts
    if initial is None:
        return previous
    realised = None
    steps = min(previous.since(inputs.seen), inputs.window.steps)
    if steps:
        realised = gain_over(inputs.newest(steps), initial, inputs.live.serving, split)
    initial_TL = initial.par_of_steps(window, split)
    return previous.next(initial_TL, expected_TL, inputs.serving_steps, inputs.seen, realised)


def _paid(inputs: DecisionInputs) -> bool | None:
    """Return True if the gain from the last change exceeds the gain's error; ``None`` if that is unknown."""
    last = inputs.decisions
    if last.pace is None or last.before is None or last.replaced_at is None:
        return None
    steps = min(last.pace.seen - last.replaced_at, inputs.window.steps)
    window = inputs.newest(steps)
    return gain_over(window, last.before.serving, inputs.live.serving, inputs.settings.split).paid
