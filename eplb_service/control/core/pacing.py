"""When a deployment is decided for: by what its ranks measured since the last decision."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.placement import Float64
from eplb_service.planner.pace import Pace
from eplb_service.planner.promise import Promise, no_promise


@dataclass(frozen=True)
class Replaced:
    """What a plan has replaced: what served before it, and how many steps had been seen when it no longer did."""

    live: LivePlacement
    seen: int


@dataclass(frozen=True)
class Pacing:
    """The pace of a deployment, and what the plan under way will make of it; a value.

    Parameters
    ----------
    pace
        When the next decision is due.
    promise, before
        Of the plan under way: what it promises, and what serves meanwhile; ``None`` where none is.
    replaced
        By the last decision's plan, once all of it serves; ``None`` where it changed nothing.
    """

    pace: Pace
    promise: Promise | None = None
    before: LivePlacement | None = None
    replaced: Replaced | None = None

    def after_steps(self, par_TL: Float64) -> Pacing:
        """Steps were served with these ratios, float64 ``[T, L]``; NaN where a layer has switched since."""
        pace = self.pace
        while len(par_TL):
            pace, taken = pace.after_steps(par_TL)
            par_TL = par_TL[taken:]
        return replace(self, pace=pace)

    def deciding(self) -> Pacing:
        """A decision is being made."""
        return replace(self, pace=self.pace.deferred())

    def dismissed(self) -> Pacing:
        """The departure that asked for the decision was a burst."""
        return replace(self, pace=self.pace.dismissed())

    def kept(self, promise: Promise, paid: bool | None) -> Pacing:
        """A decision left everything as it is; ``promise`` is what that does."""
        pace = self.pace.after_decision(changed=False, paid=paid).serving(promise)
        return Pacing(pace)

    def offered(self, promise: Promise, paid: bool | None, live: LivePlacement) -> Pacing:
        """A plan is on its way; ``live`` serves until it is done."""
        return Pacing(self.pace.after_decision(changed=True, paid=paid), promise, live)

    def plan_ended(self, done: bool) -> Pacing:
        """The plan has its outcome: all of its layers serve, or only some."""
        if self.promise is None or self.before is None:
            return self
        if not done:
            return Pacing(self.pace.serving(no_promise(self.promise.mean_C.size - 1)))
        return Pacing(self.pace.serving(self.promise), replaced=Replaced(self.before, self.pace.seen))
