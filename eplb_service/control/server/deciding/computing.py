"""One decision as a planner's thread computes it: its heat, the plan, the price of time, and the gain so far."""

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
    """A prior that is of no use; the message says which and why."""


_STEP_US = 40_000.0
"""Microseconds that a step is taken to last until the ranks have measured any."""

Prior: TypeAlias = tuple[RememberedHeat, str]
"""Heat that a deployment is placed for before it has any of its own, and where it comes from."""


class Priors:
    """The priors of a service, such as prefill's heat for decoding: ``DEPLOYMENT=SOURCE,...``.

    A source is a trace where there is such a file, of which the newest ``most_steps`` are kept; otherwise a deployment.
    Raises ``PriorError`` on text that names none, or a trace that cannot be read.
    """

    def __init__(self, text: str, most_steps: int) -> None:
        self._sources = _sources(text)
        paths = {source: Path(source) for source in self._sources.values()}
        self._traces = {
            source: _newest_heat(path, most_steps) for source, path in paths.items() if path.exists()
        }

    def of(self, deployment: Deployment, deployments: Mapping[str, Deployment]) -> Prior | None:
        """Return the heat to place a deployment for now; ``None`` where it has no prior, or that has no heat yet.

        Raises ``PriorError`` where the prior is heat of another model.
        """
        source = self._sources.get(deployment.name)
        if source is None or deployment.group is None:
            return None
        heat = self._traces.get(source)
        if heat is None:
            other = deployments.get(source)
            if other is None or other.heat is None or not other.heat.steps:
                return None
            # Nothing is known of the ranks that it comes from.
            heat = replace(other.heat.remembered(), sources=())
        shape, (layers, experts) = deployment.group.shape, heat.shape
        if heat.shape != (shape.layers, shape.experts):
            raise PriorError(
                f"its prior {source!r} has {layers} layers x {experts} experts, it has "
                f"{shape.layers} x {shape.experts}: heat of another model"
            )
        return heat, source


def _sources(text: str) -> dict[str, str]:
    """Source of each deployment's prior."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, source = part.partition("=")
        try:
            check_deployment(name, "the deployment")
        except WireError as error:
            raise PriorError(f"{part!r} is no prior: {error}") from error
        if not source or name in found or source == name:
            raise PriorError(f"{part!r} is no prior; write DEPLOYMENT=SOURCE, one for each, and not itself")
        found[name] = source
    return found


def _newest_heat(path: Path, most_steps: int) -> RememberedHeat:
    try:
        trace = open_trace(path)
        heat_TLE = trace.heat(max(0, trace.steps - most_steps), trace.steps)
    except HeatError as error:
        raise PriorError(str(error)) from error
    if not np.any(heat_TLE):
        raise PriorError(f"{path}: none of its newest {len(heat_TLE)} steps has a token")
    return RememberedHeat(tuple(heat_TLE), heat_TLE.shape[1:])


@dataclass(frozen=True)
class DecisionInputs:
    """All that a decision is made on: heat that the deployment remembers, or a prior, what serves, and what is known.

    ``found`` is the layout that served when the ranks first came together, ``None`` where unknown; ``decisions`` are
    those before, and when they are due. Costs of ``moving`` and ``times`` of the remembered steps are what the ranks
    have measured; the latter are ``None`` for a prior. ``cpu_share`` is the part of a core that decisions take.
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
        """Gather them; ``None`` where the ranks went away.

        A ``prior`` stands for the ranks' own heat: nothing is known of step times or of when to decide next.
        """
        group, live, heat = deployment.group, deployment.live, deployment.heat
        if group is None or live is None or heat is None:
            return None
        moving, topology = deployment.switch_log.costs(), group.topology
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
        """When to decide, once heat has said whether it changed; ``None`` where decisions go by the clock."""
        pace = self.decisions.pace
        return None if pace is None else pace.weighed(self.window.heat_TLE)

    @cached_property
    def window(self) -> Window:
        """All steps that are remembered."""
        return Window(*self.heat.arrays())

    def newest(self, steps: int) -> Window:
        """Return the newest steps that are remembered."""
        whole = self.window
        return Window(whole.heat_TLE[whole.steps - steps :], whole.source_RLE)

    @property
    def looked_at(self) -> Window:
        """The steps to decide on."""
        heat_TLE = self.window.heat_TLE
        return self.newest(len(heat_TLE) if self.pace is None else self.pace.window_steps(heat_TLE))

    @property
    def serving_steps(self) -> float | None:
        """Steps that the result is expected to serve; ``None`` where that is as many as are looked at."""
        return None if self.pace is None else self.pace.serving_steps

    @property
    def seen(self) -> int:
        """Steps so far; 0 where decisions go by the clock."""
        return 0 if self.pace is None else self.pace.seen

    def steps_paying(self, cpu_seconds: float) -> float:
        """Steps in which decisions may take so much CPU."""
        step_us = None if self.times is None else self.times.mean_us
        return cpu_seconds / (self.cpu_share * (step_us or _STEP_US) / 1e6)


def decide(inputs: DecisionInputs) -> tuple[Plan, Outlook, float]:
    """Return the plan, what is to be watched of it, and the seconds that it took.

    If heat has changed too recently to decide on, the plan is empty and the outlook says so.
    """
    started, taken = time.perf_counter(), time.process_time()
    settings = inputs.settings
    if settings.fitted_curve and settings.cost_curve is None:
        settings = replace(settings, cost_curve=inputs.decisions.fitted)
    seen = weigh(inputs)
    live = inputs.live
    if seen.too_recent:
        return Plan((), ()), seen, time.perf_counter() - started
    window, paid = inputs.looked_at, _paid(inputs)
    follows = inputs.pace is not None and inputs.pace.follows(paid)
    made = plan(
        window,
        live.placement,
        live.log2phy_RLE,
        inputs.topology,
        settings,
        inputs.serving_steps,
        priced(inputs.moving, inputs.decisions.time_price),
        recommendations=inputs.decisions.recommendations if follows else (),
    )
    promise, expected_TL = promise_for(made)
    forecasts = _forecasts(inputs, window, expected_TL)
    outlook = Outlook(
        promise,
        paid,
        forecasts,
        burst=seen.burst,
        change_at=seen.change_at,
        cost=inputs.steps_paying(time.process_time() - taken),
        recommendations=made.recommendations,
        planned=live.serving.changed_by(made).split_of(window, settings.split) if made.layers else None,
    )
    return made, outlook, time.perf_counter() - started


def weigh(inputs: DecisionInputs) -> Outlook:
    """Check the last alarm and look for changes that raised none. The outlook has an empty promise."""
    taken = time.process_time()
    before = inputs.decisions.pace
    pace = inputs.pace
    change_at = None
    if before is not None and pace is not None and pace is not before and pace.alarm is not None:
        change_at = pace.changed_at if pace.changed_at > before.changed_at else None
    return Outlook(
        promise_of(np.zeros((0, inputs.live.placement.layers)), held_out=False),
        burst=pace is not before and change_at is None,
        change_at=change_at,
        too_recent=pace is not None and pace.too_recent and change_at is not None,
        cost=inputs.steps_paying(time.process_time() - taken),
    )


def appraise(inputs: DecisionInputs) -> tuple[TimePrice, float] | None:
    """Return the price of time by all steps that are remembered, and the steps that pay for its CPU.

    ``None`` if it is not known how long steps take, as for a prior.
    """
    taken = time.process_time()
    if inputs.times is None:
        return None
    found = time_price(inputs.settings, inputs.window, inputs.live.serving, inputs.times)
    return found, inputs.steps_paying(time.process_time() - taken)


def judge(inputs: DecisionInputs, served: Served) -> Worth | None:
    """Return the gain of balancing over the newest steps, which ``served`` has as they were served."""
    if inputs.found is None:
        return None
    window = inputs.newest(len(served.par_TL))
    price = inputs.decisions.time_price
    return worth_of(window, inputs.found, inputs.live.serving, served, inputs.settings, price)


def _forecasts(inputs: DecisionInputs, window: Window, expected_TL: Float64) -> Forecasts:
    """Forecast the gain over what served at first, given the ratios expected of the window's steps."""
    found, split, before = inputs.found, inputs.settings.split, inputs.decisions.forecasts
    if found is None:
        return before
    came, since = None, min(before.since(inputs.seen), inputs.window.steps)
    if since:
        came = gain_over(inputs.newest(since), found, inputs.live.serving, split)
    left_TL = found.par_of_steps(window, split)
    return before.next(left_TL, expected_TL, inputs.serving_steps, inputs.seen, came)


def _paid(inputs: DecisionInputs) -> bool | None:
    """Return whether the last decision's change has won anything on the steps since that are remembered."""
    last = inputs.decisions
    if last.pace is None or last.before is None or last.replaced_at is None:
        return None
    since = inputs.newest(min(last.pace.seen - last.replaced_at, inputs.window.steps))
    return gain_over(since, last.before.serving, inputs.live.serving, inputs.settings.split).paid
