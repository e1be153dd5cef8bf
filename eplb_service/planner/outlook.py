"""What a decision leaves to be watched: what it promises, whether the change before it paid, what balancing has won."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.heat.window import Window
from eplb_service.placement import Float64, Int32, Placement, apply_layers, step_par
from eplb_service.planner.plan import Plan
from eplb_service.planner.promise import Promise, promise_of
from eplb_service.planner.scoring import split_loads
from eplb_service.planner.worth import Gain, gain_of


@dataclass(frozen=True)
class Serving:
    """What ranks serve by: the placement, and int32 ``[R, L, E]`` the table of each source rank."""

    placement: Placement
    log2phy_RLE: Int32

    def par_of_steps(self, window: Window, split: str) -> Float64:
        """Ratio of each step of a window under it, float64 ``[T, L]``; NaN without tokens."""
        return step_par(
            split_loads(window.heat_TLE, self.placement, self.log2phy_RLE, window.source_RLE, split)
        )

    def changed_by(self, plan: Plan) -> Serving:
        """What serves once all of a plan has switched."""
        return Serving(*apply_layers(self.placement, self.log2phy_RLE, plan.changes()))


@dataclass(frozen=True)
class Outlook:
    """Of one decision.

    Parameters
    ----------
    promise
        What is expected of the steps that its result serves.
    paid
        Whether the change before it won more than its error; ``None`` where there was none, or that is not known.
    won
        What serves now wins over what served at first, on the decision's window; ``None`` where that is not known.
    burst
        Whether the departure that asked for the decision was no change of heat.
    """

    promise: Promise
    paid: bool | None = None
    won: Gain | None = None
    burst: bool = False


def promise_for(window: Window, now: Serving, plan: Plan, split: str) -> Promise:
    """What a plan promises of steps like those of its window."""
    par_TL = now.changed_by(plan).par_of_steps(window, split)
    return promise_of(par_TL, plan.optimism_L, held_out=plan.held_out)


def gain_over(window: Window, before: Serving, now: Serving, split: str) -> Gain:
    """What ``now`` wins over ``before`` on a window's steps."""
    return gain_of(before.par_of_steps(window, split), now.par_of_steps(window, split))
