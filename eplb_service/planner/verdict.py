"""Why each layer changes or stays, for operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eplb_service.placement import Float64
from eplb_service.planner.plan import LayerVerdict
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.solver_request import time_curve
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import OutOfTimeError
from eplb_service.solver.model import FRESH, KEEP, TABLES


@dataclass(frozen=True)
class Judge:
    """What a decision knows of all layers before it solves any.

    Parameters
    ----------
    par_L, floor_L
        float64 ``[L]``, per step: the peak-to-average ratio seen, and what token sampling alone makes of it; NaN for a
        layer without tokens.
    episode_par_L, episode_floor_L, volatility_bound_L
        float64 ``[L]``, per episode, which decisions are made on: the ratio seen, what token sampling alone makes of
        it, and what the experts' own jumps make of it. A layer without tokens counts as balanced.
    episode_steps
        Steps in an episode.
    bytes_per_expert
        What one moved slot costs.
    settings
        How to decide.
    why_ungrouped
        Why groups of experts are not kept together on nodes although the settings ask for it; otherwise empty.
    """

    par_L: Float64
    floor_L: Float64
    episode_par_L: Float64
    episode_floor_L: Float64
    volatility_bound_L: Float64
    episode_steps: float
    bytes_per_expert: int
    settings: PlannerSettings
    why_ungrouped: str = ""

    def kept(self, layer: int, reason: str, hindsight: float | None = None) -> LayerVerdict:
        """A layer that stays as it is."""
        par, floor = float(self.par_L[layer]), float(self.floor_L[layer])
        return LayerVerdict(layer, par, par, floor, 0, changed=False, reason=reason, hindsight=hindsight)

    def not_picked(self, layer: int) -> LayerVerdict:
        """A layer that this decision did not look into."""
        settings = self.settings
        seen, floor, bound = (
            float(of_L[layer]) for of_L in (self.episode_par_L, self.episode_floor_L, self.volatility_bound_L)
        )
        if math.isnan(self.par_L[layer]):
            reason = "left alone: it received no tokens"
        elif seen <= settings.par_threshold:
            reason = f"left alone: {self._of_episodes(seen)} is at or below the threshold {settings.par_threshold:g}"
        elif seen - floor <= settings.min_gain:
            reason = f"left alone: of {self._of_episodes(seen)}, {floor:.3f} is token noise that no placement can win"
        elif seen - bound <= settings.min_gain:
            reason = f"left alone: {self._of_episodes(seen)} is no more than its experts' jumps make of balanced ranks"
        else:
            reason = f"waits: only the {settings.max_layers} worst layers change in one decision"
        return self.kept(layer, reason)

    def unanswered(self, layer: int, cause: Exception | str) -> LayerVerdict:
        """A layer for which the solver gave no answer that can be used."""
        if isinstance(cause, OutOfTimeError):
            return self.kept(layer, f"waits: {cause}")
        return self.kept(layer, f"kept: the solver failed ({cause})")

    def not_worth_it(self, layer: int, answer: Answer, hindsight: float) -> LayerVerdict:
        """A layer that keeps what it has because nothing would have paid; ``hindsight`` as in the verdict."""
        if time_curve(self.settings) is not None:
            faster = 1 - answer.hindsight / answer.par_before
            reason = f"kept: nothing that pays for its moves is faster (hindsight: by {max(faster, 0.0):.1%})"
            return self.kept(layer, reason, hindsight)
        gain = float(self.episode_par_L[layer]) - answer.hindsight
        if gain <= self.settings.min_gain:
            reason = f"kept: even hindsight would have won only {max(gain, 0.0):.3f} {self._episodes()}"
        else:
            reason = (
                f"kept: hindsight would have won {gain:.3f} {self._episodes()}, but on the newer half of the window "
                "nothing fitted to the older half paid for itself"
            )
        return self.kept(layer, reason, hindsight)

    def changed(
        self, layer: int, answer: Answer, moves: int, planned: float, hindsight: float
    ) -> LayerVerdict:
        """A layer that switches.

        Parameters
        ----------
        layer
            Its index.
        answer
            What the solver found for it.
        moves
            Slots that receive weights.
        planned, hindsight
            Peak-to-average ratios, as ``par_planned`` and ``hindsight`` in the verdict.
        """
        seen = float(self.par_L[layer])
        if answer.taken == TABLES or moves == 0:
            how = "tables retuned, no weights move"
        elif answer.taken == FRESH:
            how = f"placed from scratch, {moves} slots receive weights"
        else:
            how = f"improved from where it is, {moves} slots receive weights"
        reason = f"{how}: {seen:.3f} to {planned:.3f}"
        if math.isfinite(answer.half_life):
            steps = answer.half_life * self.episode_steps
            reason += f" on this window; aimed at where heat drifts (half-life {steps:.0f} steps)"
        elif answer.trimmed:
            reason += " on this window; aimed at what its experts have between bursts"
        if answer.crossed > 0 or answer.crosses > 0:
            reason += f"; {answer.crosses:.0%} of its tokens leave their node, {answer.crossed:.0%} before"
        if self.why_ungrouped:
            reason += f"; experts may be on any node: {self.why_ungrouped}"
        return LayerVerdict(
            layer,
            seen,
            planned,
            float(self.floor_L[layer]),
            moves,
            changed=True,
            reason=reason,
            hindsight=hindsight,
            bytes=moves * self.bytes_per_expert,
            optimism=answer.optimism,
        )

    def _of_episodes(self, ratio: float) -> str:
        return f"{ratio:.3f} {self._episodes()}"

    def _episodes(self) -> str:
        return "per step" if self.episode_steps == 1 else f"in episodes of {self.episode_steps:g} steps"


def stays(answer: Answer) -> bool:
    """Whether an answer is to leave the layer as it is."""
    return answer.taken == KEEP
