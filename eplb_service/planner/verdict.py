"""Why each layer changes or stays, in an operator's words."""

from __future__ import annotations

from eplb_service.planner.plan import LayerVerdict
from eplb_service.planner.scoring import Float64
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.candidates import FRESH, KEEP, TABLES
from eplb_service.solver.engine import OutOfTimeError


def kept(layer: int, seen_L: Float64, floor_L: Float64, reason: str) -> LayerVerdict:
    """A layer that stays as it is."""
    seen = float(seen_L[layer])
    return LayerVerdict(layer, seen, seen, float(floor_L[layer]), moves=0, changed=False, reason=reason)


def not_picked(layer: int, seen_L: Float64, floor_L: Float64, settings: PlannerSettings) -> LayerVerdict:
    """A layer that this decision did not look into."""
    seen, floor = float(seen_L[layer]), float(floor_L[layer])
    if seen <= settings.par_threshold:
        reason = f"left alone: {seen:.3f} is at or below the threshold {settings.par_threshold:g}"
    elif seen - floor <= settings.min_gain:
        reason = f"left alone: of {seen:.3f}, {floor:.3f} is token noise that no placement can win"
    else:
        reason = f"waits: only the {settings.max_layers} worst layers change in one decision"
    return kept(layer, seen_L, floor_L, reason)


def no_answer(cause: Exception | str) -> str:
    """Why the solver's answer cannot be used."""
    return f"waits: {cause}" if isinstance(cause, OutOfTimeError) else f"kept: the solver failed ({cause})"


def not_worth_it(taken: int, gain: float, settings: PlannerSettings) -> str | None:
    """Why an answer is not taken up, if it is not."""
    if taken == KEEP:
        return "kept: on this window no change would have paid for itself"
    if gain < settings.min_gain:
        return f"kept: the best candidate wins {gain:.3f}, less than min_gain {settings.min_gain:g}"
    return None


def changed(
    layer: int, seen_L: Float64, floor_L: Float64, planned: float, moves: int, taken: int
) -> LayerVerdict:
    """A layer that switches."""
    seen = float(seen_L[layer])
    if taken == TABLES or moves == 0:
        how = "tables retuned, no weights move"
    elif taken == FRESH:
        how = f"placed anew, {moves} slots receive weights"
    else:
        how = f"improved where it stands, {moves} slots receive weights"
    reason = f"{how}: {seen:.3f} to {planned:.3f}"
    return LayerVerdict(layer, seen, planned, float(floor_L[layer]), moves, changed=True, reason=reason)
