"""Keeps what ranks report of their switches, as the price of moves is estimated from it.

Reports are another party's word: each counts once, and one that claims more time than has passed since its plan was
offered is left out and counted. What is kept is bounded by the plan under way and a fixed number of those before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from eplb_service.cost.moving import (
    MovingCosts,
    Slowdown,
    StepSample,
    Switch,
    SwitchedPlan,
    calm_steps,
    moving_costs,
    slowdown_of,
)
from eplb_service.placement import Float64
from eplb_service.planner.plan import LayerPlan
from eplb_service.wire.status import PlanState, PlanStatus

_PLANS_KEPT = 16
"""Newest plans that say what moves cost."""
_SLACK_SECONDS = 1.0
"""By which a rank's clock may seem to run ahead of the service's: its report and the offer travel as well."""


class SwitchLog:
    """Of one forming of a deployment's ranks, whose step numbers go on from one plan to the next.

    ``left_out`` counts reports that cannot be.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._reports: _PlanReports | None = None
        self._plans: deque[SwitchedPlan] = deque(maxlen=_PLANS_KEPT)
        self._before: dict[int, StepSample | None] = {}
        self._slowdowns: dict[int, Slowdown] = {}
        self._calm: StepSample | None = None

    def offered(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        """A plan is on its way to the ranks, ``now`` by the clock that ``heard`` goes by."""
        self._close()
        self._reports = _PlanReports(plan_id, layers, ranks, now)
        self._before[plan_id] = self._calm

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """A rank has reported on a plan; only on the newest does it count."""
        if self._reports is not None and self._reports.plan_id == status.plan_id:
            self.left_out += not self._reports.heard(rank, status, now)

    def looked_at(self, step_T: Float64, us_T: Float64) -> None:
        """Steps were served, and no plan is under way.

        Parameters
        ----------
        step_T, us_T
            float64 ``[T]``, their numbers in order and wall time in microseconds; NaN where not known.
        """
        self._close()
        plans = list(self._plans)
        for plan in plans:
            others = [other for other in plans if other is not plan]
            found = slowdown_of(plan, others, self._before.get(plan.plan_id), step_T, us_T)
            known = self._slowdowns.get(plan.plan_id)
            # As steps leave the window, less is seen of a plan than was seen before.
            if found is not None and (known is None or found.moving.steps >= known.moving.steps):
                self._slowdowns[plan.plan_id] = found
        self._calm = calm_steps(step_T, us_T, plans) or self._calm

    def costs(self) -> MovingCosts:
        """What is known by now."""
        switches = [switch for plan in self._plans for switch in plan.switches]
        return moving_costs(switches, list(self._slowdowns.values()))

    def _close(self) -> None:
        """The newest plan's reports are all in, or nobody waits for more."""
        reports, self._reports = self._reports, None
        switched = None if reports is None else reports.switched()
        if switched is not None:
            self._plans.append(switched)
        kept = {plan.plan_id for plan in self._plans}
        self._before = {plan_id: before for plan_id, before in self._before.items() if plan_id in kept}
        self._slowdowns = {plan_id: found for plan_id, found in self._slowdowns.items() if plan_id in kept}


class _PlanReports:
    """What ranks have reported of one plan; each of its layers (M) and ranks (R) has one of each, the first."""

    def __init__(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        self.plan_id = plan_id
        self._offered_at = now
        self._index = {plan.layer: index for index, plan in enumerate(layers)}
        shape = len(layers), ranks
        self._received_MR = np.zeros(shape)
        for index, plan in enumerate(layers):
            self._received_MR[index] = np.bincount(plan.moves_M5[:, 2], minlength=ranks)[:ranks]
        self._accepted_R = np.full(ranks, np.nan)
        self._transfer_MR, self._transferred_at_MR = np.full(shape, np.nan), np.full(shape, np.nan)
        self._commit_MR, self._committed_at_MR = np.full(shape, np.nan), np.full(shape, np.nan)

    def heard(self, rank: int, status: PlanStatus, now: float) -> bool:
        """Whether the report can be; one that says nothing of durations always can."""
        if status.state is PlanState.ACCEPTED:
            _put(self._accepted_R, rank, status.step)
            return True
        index = self._index.get(status.layer)
        if index is None or status.state not in (PlanState.TRANSFERRED, PlanState.COMMITTED):
            return True
        longest = now - self._offered_at + _SLACK_SECONDS
        if status.state is PlanState.TRANSFERRED:
            seconds, kept_R, at_R = (
                status.transfer_seconds,
                self._transfer_MR[index],
                self._transferred_at_MR[index],
            )
        else:
            seconds, kept_R, at_R = (
                status.commit_seconds,
                self._commit_MR[index],
                self._committed_at_MR[index],
            )
        if not 0 <= seconds <= longest:
            return False
        _put(at_R, rank, status.step)
        # A duration of 0 is one that was not measured.
        _put(kept_R, rank, seconds or math.nan)
        return True

    def switched(self) -> SwitchedPlan | None:
        """The plan as its ranks switched it, as far as they did; ``None`` where they did not take it."""
        first = began = _median(self._accepted_R)
        if math.isnan(first):
            return None
        switches = []
        for index in range(len(self._index)):
            staged, done = _median(self._transferred_at_MR[index]), _median(self._committed_at_MR[index])
            if math.isnan(staged):
                break
            received_R, seconds_R = self._received_MR[index], self._transfer_MR[index]
            some_R = (received_R > 0) & np.isfinite(seconds_R)
            switches.append(
                Switch(
                    _median(seconds_R[some_R] / received_R[some_R]),
                    _median(seconds_R[some_R]),
                    _median(self._commit_MR[index]),
                    int(began),
                    int(staged),
                )
            )
            began = staged if math.isnan(done) else done
        return SwitchedPlan(self.plan_id, int(first), int(began) + 1, tuple(switches))


def _put(values_R: Float64, rank: int, value: float) -> None:
    """Keep the first value of a rank that the plan was made for."""
    if rank < len(values_R) and math.isnan(values_R[rank]):
        values_R[rank] = value


def _median(values_K: Float64) -> float:
    """Of those that are known; NaN where none is."""
    known_K = values_K[np.isfinite(values_K)]
    return float(np.median(known_K)) if known_K.size else math.nan
