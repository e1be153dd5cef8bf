"""Decisions made for one group of ranks: what came of them, and when the next one is due."""

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

_BETWEEN_APPRAISALS = 8.0
"""Times as many steps as pay for an appraisal pass before the next."""


@dataclass(frozen=True)
class Decisions:
    """The decisions made for one group of ranks (immutable).

    Parameters
    ----------
    begun, decided_at
        Whether a decision has been made, or none may be without heat of the group's own; steps assembled at the last.
    pace
        When the next decision is due by what is realised; ``None`` where that is by the clock, or no heat is expected.
    promise, planned
        Promise of the plan under way, and what serves once the whole plan has switched. ``None`` without a plan.
    answered
        Latest alarm, as in ``Pace``, that the last decision took into account.
    before, replaced_at
        Placement that the last decision's plan replaces, and steps that ``pace`` had seen when all of that plan served;
        ``None`` where it changed nothing, and until then.
    forecasts
        Of the gain over the first placement until the next decision.
    worth
        Gain of balancing over the newest steps; ``None`` until it is known, and while nothing is served.
    time_price, move_price
        Prices of tokens in time and of the last decision's moves; ``None`` until they are known.
    fitted
        The last cost curve that the group's own step times spoke for.
    appraise_at
        Steps that ``pace`` must have seen before time is priced again.
    recommendations
        What the next decision may follow, as in ``planner.plan.Plan``.
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
        """True if time is to be priced: decisions come first, and take most of the CPU."""
        return self.pace is None or self.time_price is None or self.pace.seen >= self.appraise_at

    @property
    def settling(self) -> bool:
        """True if decisions follow each other quickly because heat has just changed."""
        return self.pace is not None and self.pace.settling

    @property
    def may_be_outdated(self) -> bool:
        """True if an unanswered alarm suggests that the plan under way is outdated and a check is due."""
        pace = self.pace
        if pace is None or pace.alarm is None or not pace.due:
            return False
        return pace.settling or pace.alarm is not self.answered

    def is_due(self, assembled: int, interval: int) -> bool:
        """Return whether one is due: by what is realised or, by the clock, ``interval`` steps after the last."""
        gathered = assembled - self.decided_at
        return gathered >= interval if self.pace is None else gathered > 0 and self.pace.due

    def after_steps(self, par_TL: Float64) -> Decisions:
        """Note the ratios of steps served, float64 ``[T, L]``; NaN where a layer has switched since."""
        pace = self.pace
        while pace is not None and len(par_TL):
            pace, taken = pace.after_steps(par_TL)
            par_TL = par_TL[taken:]
        return self if pace is self.pace else replace(self, pace=pace)

    def deciding(self, assembled: int) -> Decisions:
        """Begin a decision after so many steps."""
        pace = self.pace and self.pace.deferred()
        return replace(
            self, begun=True, decided_at=assembled, pace=pace, answered=None if pace is None else pace.alarm
        )

    def weighing(self) -> Decisions:
        """Begin a check of the plan under way. Steps keep arriving during the check."""
        return replace(self, pace=self.pace and self.pace.postponed())

    def weighed(self, outlook: Outlook) -> tuple[Decisions, bool]:
        """Record the result of the check; return True if the plan is outdated.

        A plan is outdated if heat changed after its decision. The next decision is then due once the plan ends.
        """
        if self.pace is None:
            return self, False
        pace = _corrected(self.pace, outlook)
        if outlook.burst or outlook.too_recent or pace.alarm is self.answered:
            return replace(self, pace=pace), False
        return replace(self, pace=pace.hastened()), True

    def decided(self, outlook: Outlook, live: DeployedLayout, *, changed: bool) -> Decisions:
        """Note the decision: it keeps ``live``, or a plan that replaces it is about to be offered."""
        if self.pace is None:
            return replace(self, forecasts=outlook.forecasts)
        pace = _corrected(self.pace, outlook)
        if outlook.too_recent:
            return replace(self, pace=pace.charged(outlook.cost))
        # The decision does not answer an alarm that was raised after it began.
        answered = self.answered if pace is self.pace else pace.alarm
        pace = pace.after_decision(changed=changed, paid=outlook.paid).charged(outlook.cost)
        after = replace(
            self,
            forecasts=outlook.forecasts,
            replaced_at=None,
            recommendations=outlook.recommendations,
            answered=answered,
        )
        if changed:
            if outlook.planned is not None:
                # While the plan is under way, heat is tested against the placement that the plan leads to.
                pace = pace.serving(outlook.promise)
            return replace(after, pace=pace, promise=outlook.promise, planned=outlook.planned, before=live)
        pace = pace.keeping(outlook.promise, dismissed=outlook.burst)
        return replace(after, pace=pace, promise=None, before=None)

    def plan_ended(self, done: bool) -> Decisions:
        """Note the outcome of the plan under way: all of its layers serve, or only some."""
        if self.pace is None or self.promise is None:
            return self
        if done:
            # The whole plan serves now, so ratios are measured instead of predicted.
            pace = self.pace.serving(self.promise)
            return replace(self, pace=pace, promise=None, planned=None, replaced_at=self.pace.seen)
        # What serves then was never decided on: nothing is expected of it before the next decision.
        pace = replace(self.pace, expected=None)
        forecasts = replace(self.forecasts, gain=None)
        return replace(
            self, pace=pace, promise=None, planned=None, before=None, forecasts=forecasts, recommendations=()
        )

    def resting(self) -> Decisions:
        """Expect no heat: what comes later is not compared with what was expected before."""
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
        """Note the price of time; so many steps pay for the CPU of that.

        A fitted curve is kept though later steps say nothing: it is the device's, not the placement's.
        """
        pace = self.pace and self.pace.charged(cost)
        after = 0.0 if pace is None else pace.seen + _BETWEEN_APPRAISALS * cost
        fitted = price.curve if price.kind == FITTED else self.fitted
        return replace(self, time_price=price, fitted=fitted, pace=pace, appraise_at=after)


def _corrected(pace: Pace, outlook: Outlook) -> Pace:
    """Return the pace without alarms that were bursts, and with the start of a change that raised no alarm."""
    pace = pace.dismissed() if outlook.burst else pace
    return pace if outlook.change_at is None else pace.begun_at(outlook.change_at)
