"""What moving weights costs, beside the time that a lower ratio saves: the price of moves where none is stated.

A moved expert's weights take bytes / bandwidth on the link of the rank that receives them; while they travel, steps are
slower by a part; then they are copied from staging into place, and the ranks wait for the switch. A layer's
experts take so much time in a step, in proportion to the ratio, for as many steps as the plan is expected to serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.planner.settings import PlannerSettings

_ASSUMED_BYTES = 16 << 20
_SLOWER_WHILE_MOVING = 0.2
_COPY_BYTES_PER_SECOND = 1e12
_SWITCH_MS = 0.5
ASSUMED_SERVING_STEPS = 256


@dataclass(frozen=True)
class MovePrice:
    """The price of moves, and where it comes from.

    Parameters
    ----------
    value
        Part of its ratio that a layer must win to have every slot moved.
    reason
        For operators: what it was computed from, assumptions marked as such.
    """

    value: float
    reason: str


def move_price(
    settings: PlannerSettings, slots: int, bytes_per_expert: int = 0, serving_steps: float | None = None
) -> MovePrice:
    """The price that ``settings`` state, or what moves cost.

    Parameters
    ----------
    settings
        With ``move_price``, ``bandwidth`` and ``layer_ms``.
    slots
        S, slots of a rank: as many experts it receives where all move.
    bytes_per_expert
        Weights of one expert in one layer; 0 where not known.
    serving_steps
        Steps that the plan is expected to serve; ``None`` where not known.
    """
    if settings.move_price is not None:
        return MovePrice(settings.move_price, "stated")
    size = bytes_per_expert or _ASSUMED_BYTES
    steps = serving_steps or ASSUMED_SERVING_STEPS
    travel_ms = size / (settings.link_bandwidth * 1e9) * 1e3 * _SLOWER_WHILE_MOVING
    copy_ms = size / _COPY_BYTES_PER_SECOND * 1e3
    lost_ms = slots * (travel_ms + copy_ms) + _SWITCH_MS
    reason = (
        f"{size / 2**20:.1f} MiB per expert{_assumed(not bytes_per_expert)}, "
        f"{settings.link_bandwidth:g} GB/s per rank, "
        f"steps {_SLOWER_WHILE_MOVING:.0%} slower while weights travel (assumed), "
        f"{_SWITCH_MS:g} ms per switch (assumed), "
        f"{settings.layer_ms:g} ms per layer and step, {steps:.0f} steps served{_assumed(not serving_steps)}"
    )
    return MovePrice(lost_ms / (settings.layer_ms * steps), reason)


def _assumed(is_assumed: bool) -> str:
    return " (assumed)" if is_assumed else ""
