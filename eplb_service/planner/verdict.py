"""Why each layer changes or stays, in an operator's words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eplb_service.planner.plan import LayerVerdict
from eplb_service.planner.scoring import Float64
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import OutOfTimeError
from eplb_service.solver.model import FRESH, KEEP, TABLES


@dataclass(frozen=True)
class Judge:
    """What a decision knows of all layers before it solves any.

    Parameters
    ----------
    seen_L, floor_L, settled_L
        float64 ``[L]``: the ratio seen, what token sampling alone makes of it, and what the experts' own unrest does.
    episode_steps
        Steps in an episode, for telling half-lives in steps.
    bytes_per_expert
        What one moved slot costs.
    settings
        How to decide.
    why_ungrouped
        Why groups of experts are not kept together on nodes although the settings ask for it; otherwise empty.
    """

    seen_L: Float64
    floor_L: Float64
    settled_L: Float64
    episode_steps: float
    bytes_per_expert: int
    settings: PlannerSettings
    why_ungrouped: str = ""

    def kept(self, layer: int, reason: str, hindsight: float | None = None) -> LayerVerdict:
        """A layer that stays as it is."""
        seen = float(self.seen_L[layer])
        floor = float(self.floor_L[layer])
        return LayerVerdict(layer, seen, seen, floor, 0, changed=False, reason=reason, hindsight=hindsight)

    def not_picked(self, layer: int) -> LayerVerdict:
        """A layer that this decision did not look into."""
        seen, floor, settled = (float(of_L[layer]) for of_L in (self.seen_L, self.floor_L, self.settled_L))
        if seen <= self.settings.par_threshold:
            reason = f"left alone: {seen:.3f} is at or below the threshold {self.settings.par_threshold:g}"
        elif seen - floor <= self.settings.min_gain:
            reason = f"left alone: of {seen:.3f}, {floor:.3f} is token noise that no placement can win"
        elif seen - settled <= self.settings.min_gain:
            reason = f"left alone: {seen:.3f} is no more than its experts' own unrest makes of balanced ranks"
        else:
            reason = f"waits: only the {self.settings.max_layers} worst layers change in one decision"
        return self.kept(layer, reason)

    def unanswered(self, layer: int, cause: Exception | str) -> LayerVerdict:
        """A layer for which the solver gave no answer that can be used."""
        if isinstance(cause, OutOfTimeError):
            return self.kept(layer, f"waits: {cause}")
        return self.kept(layer, f"kept: the solver failed ({cause})")

    def not_worth_it(self, layer: int, answer: Answer) -> LayerVerdict:
        """A layer that keeps what it has because nothing would have paid."""
        seen, hindsight = float(self.seen_L[layer]), answer.hindsight
        if seen - hindsight <= self.settings.min_gain:
            reason = f"kept: even hindsight would only have reached {hindsight:.3f} on this window"
        else:
            reason = (
                f"kept: {hindsight:.3f} was possible in hindsight, but on the newer half of the window nothing "
                "fitted to the older half paid for itself"
            )
        return self.kept(layer, reason, hindsight)

    def changed(self, layer: int, answer: Answer, moves: int) -> LayerVerdict:
        """A layer that switches."""
        seen, planned = float(self.seen_L[layer]), answer.found.par
        if answer.taken == TABLES or moves == 0:
            how = "tables retuned, no weights move"
        elif answer.taken == FRESH:
            how = f"placed anew, {moves} slots receive weights"
        else:
            how = f"improved where it stands, {moves} slots receive weights"
        reason = f"{how}: {seen:.3f} to {planned:.3f}"
        if math.isfinite(answer.half_life):
            steps = answer.half_life * self.episode_steps
            reason += f" on this window; aimed at where heat drifts (half-life {steps:.0f} steps)"
        if answer.crossed > 0 or answer.crosses > 0:
            reason += f"; {answer.crosses:.0%} of its tokens leave their node, {answer.crossed:.0%} before"
        if self.why_ungrouped:
            reason += f"; experts may stand on any node: {self.why_ungrouped}"
        return LayerVerdict(
            layer,
            seen,
            planned,
            float(self.floor_L[layer]),
            moves,
            changed=True,
            reason=reason,
            hindsight=answer.hindsight,
            bytes=moves * self.bytes_per_expert,
        )


def stays(answer: Answer) -> bool:
    """Whether an answer is to leave the layer as it is."""
    return answer.taken == KEEP
