"""Snapshot of a deployment, from which a planner thread computes a decision, the time price or the gain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from eplb_core.cost.moving import MovingCosts
from eplb_core.heat.assembler import HeatSnapshot
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.planner.dealing import fitted_to_host
from eplb_core.planner.decision import DecisionInputs
from eplb_core.planner.plan import Layout
from eplb_core.planner.session import DecisionSession, steps_paying
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.deciding.priors import Prior

_DEFAULT_STEP_US = 40_000.0
"""Assumed duration of a step, in microseconds, until the ranks have measured one."""

T = TypeVar("T")


@dataclass(frozen=True)
class Computed(Generic[T]):
    """Result of a computation and its cost.

    Parameters
    ----------
    result
        Result of the computation.
    seconds
        Wall time, in seconds.
    cost
        CPU time of the computation, expressed as the number of steps whose CPU budget pays for it.
    """

    result: T
    seconds: float
    cost: float


@dataclass(frozen=True)
class Snapshot:
    """State of a deployment at the start of a computation. It is cheap to create on the event loop.

    Parameters
    ----------
    heat
        Heat of the deployment's recent steps, or of a prior.
    live
        Current layout.
    initial
        Initial layout; ``None`` if it is unknown.
    topology
        Nodes and token groups of the ranks.
    settings
        Settings of the planner.
    session
        State of the deployment's decisions.
    moving
        Costs of moves, as measured by the ranks.
    times
        Measured durations of the steps of ``heat``; ``None`` for a prior.
    cpu_share
        Number of CPU cores that decisions may use on average.
    """

    heat: HeatSnapshot
    live: DeployedLayout
    initial: Layout | None
    topology: Topology
    settings: PlannerSettings
    session: DecisionSession
    moving: MovingCosts
    times: StepTimes | None = None
    cpu_share: float = 1.0

    @classmethod
    def of(
        cls, deployment: Deployment, settings: PlannerSettings, prior: Prior | None = None
    ) -> Snapshot | None:
        """Return a snapshot of a deployment; ``None`` if its ranks have disconnected.

        Parameters
        ----------
        deployment
            The deployment.
        settings
            Settings of the planner.
        prior
            Prior whose heat replaces the deployment's own. A snapshot of a prior has no step times and no schedule.
        """
        group = deployment.group
        live = deployment.live
        heat = deployment.heat
        if group is None or live is None or heat is None:
            return None
        moving = deployment.switch_log.costs()
        topology = group.topology
        shape = group.shape
        settings = fitted_to_host(
            settings, shape.width, entry_by_row=shape.entry_by_row, splits_by_step=shape.splits_by_step
        )
        if prior is not None:
            return cls(prior[0], live, None, topology, settings, DecisionSession(), moving)
        return cls(
            heat.remembered(),
            live,
            deployment.initial_layout,
            topology,
            settings,
            deployment.session,
            moving,
            heat.step_times(live.layer_epochs),
            deployment.limits.cpu_share,
        )

    @cached_property
    def inputs(self) -> DecisionInputs:
        """Inputs of a decision. The first access copies all heat and tables, so it must happen on a planner thread."""
        return DecisionInputs(
            Window(*self.heat.arrays()),
            self.live.serving,
            self.initial,
            self.topology,
            self.settings,
            self.session,
            self.moving,
            self.times,
        )

    def compute(self, function: Callable[[DecisionInputs], T]) -> Computed[T]:
        """Call a function from ``planner.decision`` on the inputs, and measure its cost."""
        started = time.perf_counter()
        cpu_started = time.process_time()
        result = function(self.inputs)
        cpu_seconds = time.process_time() - cpu_started
        step_us = None if self.times is None else self.times.mean_us
        cost = steps_paying(cpu_seconds, self.cpu_share, step_us or _DEFAULT_STEP_US)
        return Computed(result, time.perf_counter() - started, cost)
