"""What moving weights costs, beside the time that a lower ratio saves: the price of moves where none is stated.

A moved expert's weights take bytes / bandwidth on the link of the rank that receives them; while they travel, steps are
slower by a part; then they are copied from staging into place, and the ranks wait for the switch. A layer's
experts take so much time in a step, in proportion to the ratio, for as many steps as the plan is expected to serve.
Each of these is what the ranks have measured, once they have often enough (``cost.moving``); until then it is what the
settings state, or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_service.planner.settings import AUTO, PlannerSettings, is_default

MEASURED, PARTLY, STATED, ASSUMED = "measured", "partly measured", "stated", "assumed"
KINDS = (MEASURED, PARTLY, STATED, ASSUMED)
"""Where a price of moves comes from. ``measured``: transfers, slowed steps and commits are the ranks' own; ``partly
measured``: some of them; ``stated``: somebody wrote the price, or the link's bandwidth, down; ``assumed``: nobody
did."""
MOST = 10.0
"""A price at which nothing moves; no higher one is meant."""
# Assumed where neither the ranks nor the settings say; the price then says so.
_ASSUMED_BYTES = 16 << 20
"""Of an expert."""
_SLOWER_WHILE_MOVING = 0.2
"""Part of their time that steps lose while weights travel."""
_COPY_BYTES_PER_SECOND = 1e12
"""Of a commit's copy within a device."""
_SWITCH_MS = 0.5
"""Of a commit, besides that copy."""
ASSUMED_SERVING_STEPS = 256
"""Steps that a change serves."""


@dataclass(frozen=True)
class MovePrice:
    """The price of moves, and where it comes from.

    Parameters
    ----------
    value
        Part of its ratio that a layer must win to have every slot moved.
    reason
        For operators: what it was computed from, and where each part comes from.
    kind
        One of ``KINDS``.
    move_ms
        Milliseconds of steps that are lost for each expert that a rank receives; ``None`` where the price itself is
        stated.
    switch_ms
        Milliseconds for which the model waits for a layer's switch; ``None`` as before.
    bytes_per_expert
        Weights of one expert in one layer; 0 where not known.
    """

    value: float
    reason: str
    kind: str = STATED
    move_ms: float | None = None
    switch_ms: float | None = None
    bytes_per_expert: int = 0

    @property
    def ms_per_megabyte(self) -> float | None:
        """Milliseconds of steps lost for each megabyte moved; ``None`` where that or an expert's size is not known."""
        if self.move_ms is None or not self.bytes_per_expert:
            return None
        return self.move_ms / (self.bytes_per_expert / 1e6)


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds that one layer's experts take in a step, and where that comes from."""

    ms: float
    source: str


def move_price(
    settings: PlannerSettings,
    slots: int,
    bytes_per_expert: int = 0,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
    layer: LayerTime | None = None,
) -> MovePrice:
    """The price that ``settings`` state, or what moves cost.

    Parameters
    ----------
    settings
        With ``move_price``, ``link_bandwidth`` and ``layer_ms``.
    slots
        S, slots of a rank: as many experts it receives where all move.
    bytes_per_expert
        Weights of one expert in one layer; 0 where not known.
    serving_steps
        Steps that the plan is expected to serve; ``None`` where not known.
    moving
        What ranks have measured of moves so far.
    layer
        How long a layer's experts take; by default ``layer_ms``.
    """
    if settings.move_price != AUTO:
        return MovePrice(settings.move_price, "stated", bytes_per_expert=bytes_per_expert)
    layer = layer or LayerTime(settings.layer_ms, _source(settings, "layer_ms"))
    steps = serving_steps or ASSUMED_SERVING_STEPS
    travel_ms, travel = _travel(settings, bytes_per_expert, moving)
    lost, slowed = _lost(moving)
    stop_ms, stop = _stop(slots, bytes_per_expert, moving)
    value = (slots * travel_ms * lost + stop_ms) / (layer.ms * steps)
    served = f"{steps:.0f} steps served" + ("" if serving_steps else " (assumed)")
    reason = f"{travel}, {slowed}, {stop}, {layer.ms:.3g} ms per layer and step ({layer.source}), {served}"
    if moving.bounded:
        reason += "; what ranks report is beyond what is believed, and was bounded"
    return MovePrice(
        min(value, MOST), reason, _kind(settings, moving), travel_ms * lost, stop_ms, bytes_per_expert
    )


def _travel(settings: PlannerSettings, size: int, moving: MovingCosts) -> tuple[float, str]:
    """Milliseconds that one expert's weights travel, and how that reads."""
    known = f"{_size_text(size)} per expert" if size else ""
    if moving.expert_seconds is not None:
        ms = moving.expert_seconds * 1e3
        rate = f", {size / moving.expert_seconds / 1e9:.3g} GB/s per rank" if size else ""
        return ms, f"{known or f'{ms:.3g} ms per expert'}{rate} (measured, {moving.transfers} layers)"
    known = known or f"{_size_text(_ASSUMED_BYTES)} per expert (assumed)"
    ms = (size or _ASSUMED_BYTES) / (settings.link_bandwidth * 1e9) * 1e3
    source = _source(settings, "link_bandwidth")
    return ms, f"{known}, {settings.link_bandwidth:g} GB/s per rank ({source})"


def _lost(moving: MovingCosts) -> tuple[float, str]:
    """Part of that time that steps lose, and how that reads."""
    if moving.lost_share is None:
        return (
            _SLOWER_WHILE_MOVING,
            f"steps lose {_SLOWER_WHILE_MOVING:.0%} of it while weights travel (assumed)",
        )
    interval = f"95 %: {moving.lost_low:.1%} to {moving.lost_high:.1%}, {moving.plans} plans"
    return (
        moving.lost_share,
        f"steps lose {moving.lost_share:.1%} of it while weights travel (measured, {interval})",
    )


def _stop(slots: int, size: int, moving: MovingCosts) -> tuple[float, str]:
    """Milliseconds that the model waits for a layer's switch, and how that reads."""
    if moving.commit_seconds is not None:
        ms = moving.commit_seconds * 1e3
        return ms, f"{ms:.3g} ms per switch (measured, {moving.commits} layers)"
    copy_ms = slots * (size or _ASSUMED_BYTES) / _COPY_BYTES_PER_SECOND * 1e3
    return copy_ms + _SWITCH_MS, f"{_SWITCH_MS:g} ms per switch and a copy (assumed)"


def _size_text(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size:,} bytes"


def _kind(settings: PlannerSettings, moving: MovingCosts) -> str:
    parts = [part is not None for part in (moving.expert_seconds, moving.lost_share, moving.commit_seconds)]
    if any(parts):
        return MEASURED if all(parts) else PARTLY
    return ASSUMED if is_default(settings, "link_bandwidth") else STATED


def _source(settings: PlannerSettings, name: str) -> str:
    return f"assumed: {name}" if is_default(settings, name) else f"stated: {name}"
