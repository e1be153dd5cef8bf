"""Decision loop of one deployment: the schedule, each decision's inputs, and the expectations for later steps.

The service, replays and benchmarks all drive this loop, so that a replay shows what the service would do. A session is
an immutable state. It reads no clock and starts no computation: step times and CPU costs are passed in.

1. Pass the realised peak-to-average ratio (PAR) of each served step to ``after_steps``.
2. If ``is_due``, call ``begin_decision``, compute the decision with ``planner.decision.decide``, and pass its result to
   ``after_decision``. Further steps may be served in the meantime.
3. While the plan is in progress, pass ``after_steps`` the PAR that the steps would have had under the plan's final
   layout. If ``check_is_due``, call ``begin_check`` and pass the result of ``planner.decision.check`` to
   ``after_check``, which may declare the plan stale.
4. When the plan ends, call ``after_plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Float64
from eplb_core.planner.counterfactual import FITTED, TimePrice
from eplb_core.planner.forecast import NO_FORECASTS, Forecasts
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Layout, Outlook, Promise
from eplb_core.planner.score import WindowSplit
from eplb_core.planner.verdicts import MovePrice, Worth
from eplb_core.solver.model import Recommendation

_PRICE_INTERVAL = 8.0
"""Number of steps between estimates of the time price, as a multiple of the number of steps whose CPU budget pays
for one estimate."""


@dataclass(frozen=True)
class DecisionSession:
    """State of the decisions for one deployment (immutable).

    Parameters
    ----------
    pace
        Schedule that adapts to the realised PAR; ``None`` if decisions are made at fixed intervals, or while no rank is
        connected.
    has_begun
        True once the first decision has begun. From then on, no first plan is made from a prior.
    decided_at
        Number of steps served when the last decision began.
    promise
        Promise of the plan in progress; ``None`` if there is no plan.
    planned_split
        Placement and split that the plan in progress leads to; ``None`` if there is no plan.
    answered_alarm
        Latest alarm, as in ``Pace.alarm``, that the last decision took into account.
    replaced_layout
        Layout that the last decision's plan replaces; ``None`` if that decision changed nothing.
    replaced_at
        Value of ``pace.seen`` when the last layer of that plan was committed; ``None`` until then.
    was_called_off_unswitched
        True if the last plan was called off before any of its layers had switched.
    forecasts
        Forecasts of the gain over the initial layout until the next decision.
    recommendations
        Recommendations that the next decision may apply, as in ``Plan``.
    worth
        Gain from balancing, measured over the newest steps; ``None`` while it is unknown or no rank is connected.
    move_price
        Move price of the last decision; ``None`` while it is unknown.
    time_price
        Latest estimate of the time cost of tokens; ``None`` while it is unknown.
    fitted_curve
        Latest cost curve fitted to the deployment's own step times; ``None`` until one has been fitted.
    time_price_due_at
        Value of ``pace.seen`` at which the next estimate of the time price is due.

    Examples
    --------
    The first decision is due after 64 steps. It keeps every layer, so the next one is due 24 steps later:

    >>> import numpy as np
    >>> from eplb_core.planner.plan import promise_of_steps
    >>> par_TL = np.full((100, 2), 1.2)
    >>> session = DecisionSession(Pace(first=64, memory=512, longest=512))
    >>> session, processed = session.after_steps(par_TL)
    >>> processed, session.is_due(served=processed, interval=512)
    (64, True)
    >>> outlook = Outlook(promise_of_steps(par_TL[:64], held_out=True))
    >>> session = session.begin_decision(served=64).after_decision(outlook, cost=0.0, changed=False)
    >>> session.pace.due_at
    88
    """

    pace: Pace | None = None
    has_begun: bool = False
    decided_at: int = 0
    promise: Promise | None = None
    planned_split: WindowSplit | None = None
    answered_alarm: tuple[int | None, int] | None = None
    replaced_layout: Layout | None = None
    replaced_at: int | None = None
    was_called_off_unswitched: bool = False
    forecasts: Forecasts = NO_FORECASTS
    recommendations: Sequence[Recommendation | None] = ()
    worth: Worth | None = None
    move_price: MovePrice | None = None
    time_price: TimePrice | None = None
    fitted_curve: CostCurve | None = None
    time_price_due_at: float = 0.0

    @property
    def settling(self) -> bool:
        """True if decisions are made in quick succession because heat has just changed."""
        return self.pace is not None and self.pace.settling

    @property
    def time_price_is_due(self) -> bool:
        """True if an estimate of the time price is due. Decisions take precedence over estimates in the CPU budget."""
        return self.pace is None or self.time_price is None or self.pace.seen >= self.time_price_due_at

    def is_due(self, served: int, interval: int) -> bool:
        """Return True if a decision is due.

        Parameters
        ----------
        served
            Number of served steps so far.
        interval
            Number of steps between decisions; used only if decisions are made at fixed intervals.
        """
        new_steps = served - self.decided_at
        return new_steps >= interval if self.pace is None else new_steps > 0 and self.pace.due

    def check_is_due(self, switched: int) -> bool:
        """Return True if an alarm suggests that the plan in progress is stale, so that a check is due.

        A plan is not checked if the previous plan was called off and neither plan has switched a layer. Otherwise,
        frequent changes in heat might prevent every switch.

        Parameters
        ----------
        switched
            Number of layers of the plan in progress that have switched.
        """
        pace = self.pace
        if pace is None or pace.alarm is None or not pace.due:
            return False
        if self.was_called_off_unswitched and not switched:
            return False
        return pace.settling or pace.alarm is not self.answered_alarm

    def after_steps(self, par_TL: Float64) -> tuple[DecisionSession, int]:
        """Process served steps, stopping as soon as a decision is due or an alarm is raised.

        The caller passes the remaining steps in another call.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``, PAR of each step; NaN for a layer that has switched since that step.

        Returns
        -------
        tuple of DecisionSession and int
            The new state and the number of steps processed.
        """
        if self.pace is None or not len(par_TL):
            return self, len(par_TL)
        pace, processed = self.pace.after_steps(par_TL)
        return replace(self, pace=pace), processed

    def begin_decision(self, served: int) -> DecisionSession:
        """Return the state at the start of a decision that begins after ``served`` steps.

        Build the ``DecisionInputs`` from the state before this call.
        """
        pace = self.pace and self.pace.deferred()
        alarm = None if pace is None else pace.alarm
        return replace(self, has_begun=True, decided_at=served, pace=pace, answered_alarm=alarm)

    def after_decision(self, outlook: Outlook, cost: float, *, changed: bool) -> DecisionSession:
        """Return the state after a decision.

        Parameters
        ----------
        outlook
            Promise, forecasts and other results of the decision.
        cost
            CPU time of the decision, as the number of steps whose CPU budget pays for it (see ``steps_paying``).
        changed
            True if a plan is about to be offered, False if the decision keeps every layer.
        """
        if self.pace is None:
            return replace(self, forecasts=outlook.forecasts)
        pace = _corrected_pace(self.pace, outlook)
        if outlook.too_recent:
            return replace(self, pace=pace.charged(cost))
        # The decision does not account for an alarm that was raised after it began.
        answered_alarm = self.answered_alarm if pace is self.pace else pace.alarm
        pace = pace.after_decision(changed=changed, paid=outlook.paid).charged(cost)
        session = replace(
            self,
            forecasts=outlook.forecasts,
            replaced_at=None,
            recommendations=outlook.recommendations,
            answered_alarm=answered_alarm,
        )
        if not changed:
            pace = pace.keeping(outlook.promise, dismissed=outlook.burst)
            return replace(session, pace=pace, promise=None, replaced_layout=None)
        if outlook.planned is not None:
            # While the plan is in progress, heat is tested against the plan's final placement.
            pace = pace.serving(outlook.promise)
        return replace(
            session,
            pace=pace,
            promise=outlook.promise,
            planned_split=outlook.planned,
            replaced_layout=outlook.layout,
        )

    def begin_check(self) -> DecisionSession:
        """Return the state at the start of a check of the plan in progress. Steps keep arriving during the check."""
        return replace(self, pace=self.pace and self.pace.postponed())

    def after_check(self, outlook: Outlook) -> tuple[DecisionSession, bool]:
        """Return the state after the check, and True if the plan is stale.

        A plan is stale if heat changed after its decision. The next decision is then due as soon as the plan ends.
        """
        if self.pace is None:
            return self, False
        pace = _corrected_pace(self.pace, outlook)
        if outlook.burst or outlook.too_recent or pace.alarm is self.answered_alarm:
            return replace(self, pace=pace), False
        return replace(self, pace=pace.hastened()), True

    def after_plan(self, *, done: bool, called_off_unswitched: bool = False) -> DecisionSession:
        """Return the state after the plan in progress ends.

        Parameters
        ----------
        done
            True if all of its layers were committed.
        called_off_unswitched
            True if it was called off before any of its layers had switched.
        """
        session = replace(self, was_called_off_unswitched=called_off_unswitched)
        if self.pace is None or self.promise is None:
            return session
        if done:
            # All layers of the plan have switched, so PAR is now measured instead of predicted.
            pace = self.pace.serving(self.promise)
            return replace(session, pace=pace, promise=None, planned_split=None, replaced_at=self.pace.seen)
        # No decision has evaluated the resulting mix of old and new layers, so there is no promise until the next
        # decision.
        return replace(
            session,
            pace=replace(self.pace, expected=None),
            promise=None,
            planned_split=None,
            replaced_layout=None,
            forecasts=replace(self.forecasts, gain=None),
            recommendations=(),
        )

    def without_expectations(self) -> DecisionSession:
        """Return the state to keep while no rank is connected.

        It has no schedule, promise, forecasts or recommendations. Heat that arrives later is not compared with the old
        promise.
        """
        return replace(
            self,
            pace=None,
            promise=None,
            planned_split=None,
            replaced_layout=None,
            forecasts=NO_FORECASTS,
            recommendations=(),
            worth=None,
        )

    def with_time_price(self, price: TimePrice, cost: float = 0.0) -> DecisionSession:
        """Return the state with a new estimate of the time price.

        A fitted curve is kept even if later steps do not yield one, because it describes the device, not the placement.

        Parameters
        ----------
        price
            Estimated time cost of tokens.
        cost
            CPU time of the estimate, as the number of steps whose CPU budget pays for it (see ``steps_paying``).
        """
        pace = self.pace and self.pace.charged(cost)
        due_at = 0.0 if pace is None else pace.seen + _PRICE_INTERVAL * cost
        fitted_curve = price.curve if price.kind == FITTED else self.fitted_curve
        return replace(self, pace=pace, time_price=price, fitted_curve=fitted_curve, time_price_due_at=due_at)


def steps_paying(cpu_seconds: float, cpu_share: float, step_us: float) -> float:
    """Return the number of steps whose CPU budget for decisions adds up to ``cpu_seconds``.

    Parameters
    ----------
    cpu_seconds
        CPU time of a decision.
    cpu_share
        Number of CPU cores that decisions may use on average.
    step_us
        Duration of a step, in microseconds.

    Examples
    --------
    A tenth of a core gives 4 ms for each step of 40 ms:

    >>> steps_paying(cpu_seconds=0.2, cpu_share=0.1, step_us=40_000.0)
    50.0
    """
    return cpu_seconds / (cpu_share * step_us / 1e6)


def _corrected_pace(pace: Pace, outlook: Outlook) -> Pace:
    """Return the pace with the outlook's findings applied: a burst that raised an alarm, or a change that did not."""
    pace = pace.dismissed() if outlook.burst else pace
    return pace if outlook.change_at is None else pace.begun_at(outlook.change_at)
