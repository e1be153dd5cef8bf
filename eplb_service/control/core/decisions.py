"""State of the decisions for one group of ranks: their results, and when the next decision is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Float64
from eplb_core.planner.counterfactual import FITTED, TimePrice
from eplb_core.planner.forecast import NO_FORECASTS, Forecasts
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Outlook, Promise
from eplb_core.planner.score import KnownSplit
from eplb_core.planner.verdicts import MovePrice, Worth
from eplb_core.solver.model import Recommendation
from eplb_service.control.core.deployed_layout import DeployedLayout

_APPRAISAL_INTERVAL = 8.0
"""Number of steps between two estimates of the time price, as a multiple of the steps over which the CPU budget pays
for one estimate."""


@dataclass(frozen=True)
class Decisions:
    """State of the decisions for one group of ranks (immutable).

    Parameters
    ----------
    begun
        True once the first decision has begun. From then on, no first plan is made from a prior.
    decided_at
        Number of assembled steps when the last decision began.
    pace
        Schedule that adapts to the realised PAR; ``None`` if decisions are made at fixed intervals, or if no heat is
        expected.
    promise
        Promise of the plan in progress; ``None`` without a plan.
    planned
        Placement and split that the plan in progress leads to; ``None`` without a plan.
    answered
        Latest alarm, as in ``Pace.alarm``, that the last decision took into account.
    before
        Layout that the last decision's plan replaces; ``None`` if that decision changed nothing.
    replaced_at
        Value of ``pace.seen`` when the last layer of that plan was committed; ``None`` until then.
    forecasts
        Forecasts of the gain over the initial layout until the next decision.
    worth
        Gain from balancing over the newest steps; ``None`` while it is unknown or no heat is expected.
    time_price
        Latest estimate of the time that tokens cost; ``None`` while it is unknown.
    fitted
        Latest cost curve fitted to the group's own step times; ``None`` before the first one.
    move_price
        Move price of the last decision; ``None`` while it is unknown.
    appraise_at
        Value of ``pace.seen`` at which the next estimate of the time price is due.
    recommendations
        Recommendations that the next decision may apply, as in ``Plan``.
    """

    begun: bool = False
    decided_at: int = 0
    pace: Pace | None = None
    promise: Promise | None = None
    planned: KnownSplit | None = None
    answered: tuple[int | None, int] | None = None
    before: DeployedLayout | None = None
    replaced_at: int | None = None
    forecasts: Forecasts = NO_FORECASTS
    worth: Worth | None = None
    time_price: TimePrice | None = None
    fitted: CostCurve | None = None
    move_price: MovePrice | None = None
    appraise_at: float = 0.0
    recommendations: Sequence[Recommendation | None] = ()

    @property
    def to_appraise(self) -> bool:
        """True if an estimate of the time price is due. Decisions take precedence over estimates in the CPU budget."""
        return self.pace is None or self.time_price is None or self.pace.seen >= self.appraise_at

    @property
    def settling(self) -> bool:
        """True if decisions are made in quick succession because heat has just changed."""
        return self.pace is not None and self.pace.settling

    @property
    def may_be_outdated(self) -> bool:
        """True if an unanswered alarm suggests that the plan in progress is stale, so that a check is due."""
        pace = self.pace
        if pace is None or pace.alarm is None or not pace.due:
            return False
        return pace.settling or pace.alarm is not self.answered

    def is_due(self, assembled: int, interval: int) -> bool:
        """Return True if a decision is due.

        Parameters
        ----------
        assembled
            Number of assembled steps so far.
        interval
            Number of steps between two decisions; only used if decisions are made at fixed intervals.
        """
        new_steps = assembled - self.decided_at
        return new_steps >= interval if self.pace is None else new_steps > 0 and self.pace.due

    def after_steps(self, par_TL: Float64) -> Decisions:
        """Return the state after steps with this PAR, float64 ``[T, L]``; NaN for a layer that has switched since."""
        pace = self.pace
        while pace is not None and len(par_TL):
            pace, processed = pace.after_steps(par_TL)
            par_TL = par_TL[processed:]
        return self if pace is self.pace else replace(self, pace=pace)

    def deciding(self, assembled: int) -> Decisions:
        """Return the state at the start of a decision, with ``assembled`` steps so far."""
        pace = self.pace and self.pace.deferred()
        alarm = None if pace is None else pace.alarm
        return replace(self, begun=True, decided_at=assembled, pace=pace, answered=alarm)

    def weighing(self) -> Decisions:
        """Return the state at the start of a check of the plan in progress. Steps keep arriving during the check."""
        return replace(self, pace=self.pace and self.pace.postponed())

    def weighed(self, outlook: Outlook) -> tuple[Decisions, bool]:
        """Return the state after the check, and True if the plan is stale.

        A plan is stale if heat changed after its decision. The next decision is then due as soon as the plan ends.
        """
        if self.pace is None:
            return self, False
        pace = _corrected_pace(self.pace, outlook)
        if outlook.burst or outlook.too_recent or pace.alarm is self.answered:
            return replace(self, pace=pace), False
        return replace(self, pace=pace.hastened()), True

    def decided(self, outlook: Outlook, live: DeployedLayout, *, changed: bool) -> Decisions:
        """Return the state after a decision.

        Parameters
        ----------
        outlook
            Promise, forecasts, cost and other results of the decision.
        live
            Layout that the decision started from.
        changed
            True if a plan that replaces this layout is about to be offered, False if the decision keeps every layer.
        """
        if self.pace is None:
            return replace(self, forecasts=outlook.forecasts)
        pace = _corrected_pace(self.pace, outlook)
        if outlook.too_recent:
            return replace(self, pace=pace.charged(outlook.cost))
        # The decision does not account for an alarm that was raised after it began.
        answered = self.answered if pace is self.pace else pace.alarm
        pace = pace.after_decision(changed=changed, paid=outlook.paid).charged(outlook.cost)
        decisions = replace(
            self,
            forecasts=outlook.forecasts,
            replaced_at=None,
            recommendations=outlook.recommendations,
            answered=answered,
        )
        if changed:
            if outlook.planned is not None:
                # While the plan is in progress, heat is tested against the placement that the plan will produce.
                pace = pace.serving(outlook.promise)
            return replace(
                decisions, pace=pace, promise=outlook.promise, planned=outlook.planned, before=live
            )
        pace = pace.keeping(outlook.promise, dismissed=outlook.burst)
        return replace(decisions, pace=pace, promise=None, before=None)

    def plan_ended(self, done: bool) -> Decisions:
        """Return the state after the plan in progress ends; ``done`` is True if all of its layers were committed."""
        if self.pace is None or self.promise is None:
            return self
        if done:
            # All layers of the plan have switched, so PAR is now measured instead of predicted.
            pace = self.pace.serving(self.promise)
            return replace(self, pace=pace, promise=None, planned=None, replaced_at=self.pace.seen)
        # No decision has evaluated the resulting mix of old and new layers, so nothing is promised until the next
        # decision.
        pace = replace(self.pace, expected=None)
        forecasts = replace(self.forecasts, gain=None)
        return replace(
            self, pace=pace, promise=None, planned=None, before=None, forecasts=forecasts, recommendations=()
        )

    def resting(self) -> Decisions:
        """Return the state without expectations, because no heat is expected.

        Heat that arrives later is not compared with the old expectations.
        """
        return replace(
            self,
            pace=None,
            promise=None,
            planned=None,
            before=None,
            forecasts=NO_FORECASTS,
            recommendations=(),
            worth=None,
        )

    def appraised(self, price: TimePrice, cost: float = 0.0) -> Decisions:
        """Return the state after an estimate of the time price.

        A fitted curve is kept even if later steps do not yield one, because it describes the device and not the
        placement.

        Parameters
        ----------
        price
            Estimated time that tokens cost.
        cost
            Number of steps over which the CPU budget pays for the estimate.
        """
        pace = self.pace and self.pace.charged(cost)
        appraise_at = 0.0 if pace is None else pace.seen + _APPRAISAL_INTERVAL * cost
        fitted = price.curve if price.kind == FITTED else self.fitted
        return replace(self, time_price=price, fitted=fitted, pace=pace, appraise_at=appraise_at)


def _corrected_pace(pace: Pace, outlook: Outlook) -> Pace:
    """Return the pace after dismissing an alarm that was only a burst and recording a change that raised no alarm."""
    pace = pace.dismissed() if outlook.burst else pace
    return pace if outlook.change_at is None else pace.begun_at(outlook.change_at)
