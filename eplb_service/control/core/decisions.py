"""What was decided for one group of ranks, what came of it, and when the next decision is due."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.control.core.limits import Limits
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.pacing import Pacing
from eplb_service.cost.curve import CostCurve
from eplb_service.placement import Float64
from eplb_service.planner.counterfactual import Counterfactual
from eplb_service.planner.move_price import MovePrice
from eplb_service.planner.outlook import Outlook
from eplb_service.planner.pace import Pace


@dataclass(frozen=True)
class Decisions:
    """Those of one group; a value.

    Parameters
    ----------
    begun
        Whether a decision has been made, or none is to be made before the group has heat of its own.
    decided_at
        Steps assembled when the last decision was made.
    pacing
        When the next decision is due by what is realised; ``None`` where that is by the clock, or no heat is expected.
    worth
        What balancing is worth, by the last decision's steps; ``None`` until one has.
    fitted
        The last cost curve that the group's own step times spoke for.
    move_price
        What the last decision's moves were priced at; ``None`` until one has solved anything.
    """

    begun: bool = False
    decided_at: int = 0
    pacing: Pacing | None = None
    worth: Counterfactual | None = None
    fitted: CostCurve | None = None
    move_price: MovePrice | None = None

    def is_due(self, assembled: int, interval: int) -> bool:
        """Whether one is due after so many steps: by what is realised or, by the clock, ``interval`` steps later."""
        gathered = assembled - self.decided_at
        return gathered >= interval if self.pacing is None else gathered > 0 and self.pacing.pace.due

    def expecting_heat(self, limits: Limits) -> Decisions:
        """All ranks have come, and their heat follows; ``limits`` say whether its changes are decided on."""
        if limits.first_decision is None:
            return self
        return replace(self, pacing=Pacing(Pace(limits.first_decision, limits.window_steps)))

    def after_steps(self, par_TL: Float64) -> Decisions:
        """Steps were served with these ratios, float64 ``[T, L]``; NaN where a layer has switched since."""
        return self if self.pacing is None else replace(self, pacing=self.pacing.after_steps(par_TL))

    def beginning(self) -> Decisions:
        """The first plan is being made by a prior, or cannot be."""
        return replace(self, begun=True)

    def deciding(self, assembled: int) -> Decisions:
        """A decision is being made after so many steps."""
        pacing = self.pacing and self.pacing.deciding()
        return replace(self, begun=True, decided_at=assembled, pacing=pacing)

    def priced(self, price: MovePrice | None) -> Decisions:
        """The decision's moves were priced; ``None`` where it solved nothing."""
        return self if price is None else replace(self, move_price=price)

    def decided(self, outlook: Outlook, live: LivePlacement, *, changed: bool) -> Decisions:
        """The decision was made: it leaves ``live`` as it is, or a plan of it is about to be offered."""
        if self.pacing is None:
            return self
        pacing = self.pacing.dismissed() if outlook.burst else self.pacing
        if changed:
            return replace(self, pacing=pacing.offered(outlook.promise, outlook.paid, live))
        return replace(self, pacing=pacing.kept(outlook.promise, outlook.paid))

    def appraised(self, worth: Counterfactual) -> Decisions:
        """What balancing is worth has been judged by the last decision's steps.

        A curve that they speak for is kept though the next ones say nothing: it is the device's, not the placement's.
        """
        return replace(self, worth=worth, fitted=worth.fitted_curve or self.fitted)

    def plan_ended(self, done: bool) -> Decisions:
        """The plan under way serves, or came to nothing."""
        return self if self.pacing is None else replace(self, pacing=self.pacing.plan_ended(done))
