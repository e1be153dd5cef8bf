"""One decision as the planner's thread computes it: on what, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.membership import Group
from eplb_service.control.core.pacing import Pacing
from eplb_service.control.server.deciding.priors import Prior
from eplb_service.cost.curve import CostCurve
from eplb_service.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_service.heat.assembler import RememberedHeat
from eplb_service.heat.step_times import StepTimes
from eplb_service.heat.window import Counts, Window
from eplb_service.planner.counterfactual import Counterfactual, counterfactual
from eplb_service.planner.decide import plan
from eplb_service.planner.move_price import LayerTime
from eplb_service.planner.outlook import Outlook, Serving, gain_over, promise_for
from eplb_service.planner.pace import Pace
from eplb_service.planner.plan import Plan
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.stationary import looked_back, paying_steps
from eplb_service.planner.topology import Topology


@dataclass(frozen=True)
class Question:
    """What a decision is made on.

    Parameters
    ----------
    heat
        What the deployment remembers, or a prior.
    times
        How long its steps took under what serves.
    live, found
        What serves, and what served when the ranks first came together; ``None`` where that is not known.
    topology, settings
        Of the ranks; how to decide.
    pacing
        When the deployment is decided for; ``None`` where that is by the clock.
    moving, layer_time
        What its ranks have measured of the cost of moves, and of how long a layer takes.
    fitted
        The last cost curve that fitted its ranks' own step times; ``None`` where none has.
    interval
        Steps between decisions by the clock; ``None`` for a prior.
    """

    heat: RememberedHeat | Prior
    times: StepTimes
    live: LivePlacement
    found: Serving | None
    topology: Topology
    settings: PlannerSettings
    pacing: Pacing | None
    moving: MovingCosts = NOTHING_MEASURED
    layer_time: LayerTime | None = None
    fitted: CostCurve | None = None
    interval: int | None = None

    @classmethod
    def of(
        cls,
        deployment: DeploymentState,
        group: Group,
        live: LivePlacement,
        settings: PlannerSettings,
        prior: Prior | None = None,
    ) -> Question | None:
        """What is to be decided on for a deployment that serves ``live``; ``None`` where nothing is remembered.

        With a prior its heat stands for the ranks' own, and nothing is known of step times or of when to decide next.

        Parameters
        ----------
        deployment
            What is known of it.
        group, live
            Its ranks, and what they serve.
        settings
            How to decide.
        prior
            Heat to make the first plan by.
        """
        if prior is not None:
            nothing_T = np.full(len(prior.heat_TLE), np.nan)
            times = StepTimes(nothing_T, nothing_T)
            return cls(
                prior, times, live, None, group.topology, settings, None, deployment.switch_log.costs()
            )
        if deployment.heat is None:
            return None
        worth = deployment.decisions.worth
        times = deployment.heat.step_times(live.layer_epochs)
        heat = deployment.heat.remembered()
        return cls(
            heat,
            times,
            live,
            deployment.found,
            group.topology,
            settings,
            deployment.decisions.pacing,
            deployment.switch_log.costs(),
            None if worth is None else worth.layer_time(group.shape.layers),
            deployment.decisions.fitted,
            deployment.limits.interval,
        )

    @property
    def planned_by(self) -> PlannerSettings:
        """The settings, with the curve fitted to the steps' own times where they ask for it and give none."""
        if not self.settings.fitted_curve or self.settings.cost_curve is not None:
            return self.settings
        return replace(self.settings, cost_curve=self.fitted)

    @cached_property
    def pace(self) -> Pace | None:
        """When to decide, once heat has said whether it changed; ``None`` where decisions go by the clock."""
        return None if self.pacing is None else self.pacing.pace.weighed(self.heat_TLE)

    @property
    def looked_at(self) -> Window:
        """The steps to decide on."""
        if self.pace is not None:
            return self.newest(self.pace.window_steps(self.heat_TLE))
        steps = len(self.heat_TLE)
        return self.newest(steps if self.interval is None else looked_back(self.heat_TLE, self.interval))

    @property
    def serving_steps(self) -> float | None:
        """Steps that what is decided is expected to serve; ``None`` where that is as many as are looked at."""
        if self.pace is not None:
            return self.pace.serving_steps
        return None if self.interval is None else paying_steps(len(self.heat_TLE), self.interval)

    @property
    def heat_TLE(self) -> Counts:
        """Heat of the steps that are remembered, ``[T, L, E]``."""
        return self._arrays[0]

    @property
    def source_RLE(self) -> npt.NDArray[np.float64] | None:
        """Heat by source rank, float64 ``[R, L, E]``; ``None`` where it is not known."""
        return self._arrays[1]

    @cached_property
    def _arrays(self) -> tuple[Counts, npt.NDArray[np.float64] | None]:
        return self.heat.arrays()

    def newest(self, steps: int) -> Window:
        """The newest steps that are remembered."""
        return Window(self.heat_TLE[len(self.heat_TLE) - steps :], self.source_RLE)


def answer(question: Question) -> tuple[Plan, Outlook, float]:
    """The plan, what is to be watched of it, and the seconds that it took."""
    started = time.perf_counter()
    live, settings = question.live, question.planned_by
    window = question.looked_at
    made = plan(
        window,
        live.placement,
        live.log2phy_RLE,
        question.topology,
        settings,
        question.serving_steps,
        question.moving,
        question.layer_time,
    )
    promise = promise_for(window, live.serving, made, settings.split)
    won = None
    if question.found is not None:
        won = gain_over(window, question.found, live.serving, settings.split)
    burst = question.pacing is not None and question.pace is not question.pacing.pace
    return made, Outlook(promise, _paid(question), won, burst), time.perf_counter() - started


def appraise(question: Question, decided: Plan) -> Counterfactual | None:
    """What balancing is worth on all steps that are remembered; ``None`` where that cannot be said."""
    if question.found is None:
        return None
    return counterfactual(
        question.newest(len(question.heat_TLE)),
        question.found,
        question.live.serving,
        decided,
        question.settings,
        question.times,
    )


def _paid(question: Question) -> bool | None:
    """Whether the last decision's change has won anything on the steps since, as far as they are remembered."""
    if question.pacing is None or question.pacing.replaced is None:
        return None
    replaced = question.pacing.replaced
    steps = min(question.pacing.pace.seen - replaced.seen, len(question.heat_TLE))
    split = question.settings.split
    return gain_over(question.newest(steps), replaced.live.serving, question.live.serving, split).paid
