"""Costs of moves and of a stepwise split: measured by the ranks, stated in the settings, or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eplb_core.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_core.figures import digits
from eplb_core.planner.settings import AUTO, STEP, PlannerSettings
from eplb_core.planner.verdicts import MOVE_PRICES, MovePrice

_MEASURED, _PARTLY, _STATED, _ASSUMED = MOVE_PRICES
"""Origin of a move price. ``measured``: the ranks measured transfers, slowed steps and commits; ``partly measured``:
they measured some of these; ``stated``: the settings contain the price or the link bandwidth; ``assumed``: neither the
ranks nor the settings provide a value."""
MAX_PRICE = 10.0
"""Maximum move price. At this price, no expert moves."""
ASSUMED_BYTES = 16 << 20
"""Assumed size of one expert's weights in one layer, in bytes."""
_ASSUMED_SLOWDOWN = 0.2
"""Assumed delay of the steps during a transfer, as a fraction of the transfer time."""
_COPY_BYTES_PER_SECOND = 1e12
"""Assumed rate at which a commit copies weights within a device."""
_COMMIT_MS = 0.5
"""Assumed duration of a commit in milliseconds, excluding the copying of weights."""
_ASSUMED_SERVING_STEPS = 256
"""Assumed number of steps that a change serves."""
_BYTES_PER_COUNT = 4
_LATENCY_US = 20.0
"""Assumed time of a nearly empty collective between nodes. It was not measured in this project."""
_COMPUTING_US = 55.0
"""Time to compute a stepwise split in a captured graph, excluding its rounds, in microseconds. Measured for 256 experts
on 32 ranks x 9 slots."""
_ROUND_US = 5.75
"""Time per round of computing a stepwise split, in microseconds. On an H100, the total for 10, 20 and 40 rounds was
112, 170 and 285 us, respectively, including the constant ``_COMPUTING_US``."""


def move_price(
    settings: PlannerSettings,
    slots: int,
    bytes_per_expert: int = 0,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
) -> MovePrice:
    """Return the stated move price, or compute it from the cost of moves and the time that a lower PAR saves.

    A moved expert's weights occupy the receiving rank's link for bytes / bandwidth, and steps are slower during that
    time. The weights are then copied from staging into place, and the ranks are blocked during this switch. The saving
    is a fraction of the time that a layer's experts take per step, over all steps that the plan is expected to serve.

    Measured values are used once the ranks have measured them often enough (``cost.moving``). Until then, they come
    from the settings or are assumed.

    Parameters
    ----------
    settings
        Settings with ``move_price``, ``link_bandwidth`` and ``layer_ms``.
    slots
        S, slots per rank. If every slot of a layer moves, each rank receives this many experts.
    bytes_per_expert
        Size of one expert's weights in one layer; 0 if unknown.
    serving_steps
        Number of steps that the plan is expected to serve; ``None`` if unknown.
    moving
        Costs that the ranks have measured so far.
    """
    if settings.move_price != AUTO:
        return MovePrice(settings.move_price, _STATED, "stated")
    size = bytes_per_expert or ASSUMED_BYTES
    by_link = f"{size / 2**20:.1f} MiB at {settings.link_bandwidth:g} GB/s"
    link_ms = size / settings.link_bandwidth / 1e6
    transfer_ms, transfer_source = _measured_or(moving.expert_seconds, 1e3, link_ms, by_link)
    lost, lost_source = _measured_or(moving.lost_share, 1.0, _ASSUMED_SLOWDOWN)
    copy_ms = slots * size / _COPY_BYTES_PER_SECOND * 1e3
    switch_ms, switch_source = _measured_or(moving.commit_seconds, 1e3, copy_ms + _COMMIT_MS)
    layer_ms = moving.layer_ms
    layer_source = moving.layer_source
    if layer_ms is None:
        layer_ms = settings.layer_ms
        layer_source = "layer_ms"
    steps = serving_steps or _ASSUMED_SERVING_STEPS
    reason = (
        f"{digits(transfer_ms)} ms per expert ({transfer_source}), of which {lost:.1%} delays steps ({lost_source}), "
        f"{digits(switch_ms)} ms per switch ({switch_source}), {digits(layer_ms)} ms per layer per step "
        f"({layer_source}), {steps:,.0f} steps served"
    )
    return MovePrice(
        min((slots * transfer_ms * lost + switch_ms) / (layer_ms * steps), MAX_PRICE),
        _origin(settings, moving),
        reason,
        ms_per_move=transfer_ms * lost,
        ms_per_megabyte=transfer_ms * lost / (bytes_per_expert / 1e6) if bytes_per_expert else None,
        ms_per_switch=switch_ms,
    )


def _origin(settings: PlannerSettings, moving: MovingCosts) -> str:
    """Return the entry of ``MOVE_PRICES`` that describes how a price based on these inputs was obtained."""
    figures = (moving.expert_seconds, moving.lost_share, moving.commit_seconds)
    measured = [figure is not None for figure in figures]
    if any(measured):
        return _MEASURED if all(measured) else _PARTLY
    return _ASSUMED if settings.is_default("link_bandwidth") else _STATED


def _measured_or(
    measured: float | None, scale: float, default: float, default_source: str = "assumed"
) -> tuple[float, str]:
    """Return the measured value times ``scale``, or else the (already scaled) default, and the source of the value."""
    return (default, default_source) if measured is None else (measured * scale, "measured")


@dataclass(frozen=True)
class SplitCost:
    """Assumed cost of a stepwise split, per layer and per step.

    The cost consists of an exchange of counts and a computation whose number of rounds grows with the number of tokens.
    It does not depend on the gain from the split.

    Parameters
    ----------
    us
        Cost in microseconds.
    """

    us: float

    @classmethod
    def of(
        cls, settings: PlannerSettings, ranks: int, experts: int, choices: float = 0.0
    ) -> SplitCost | None:
        """Return the cost for a host that splits by step, or ``None`` for any other host.

        Parameters
        ----------
        settings
            Settings with ``split`` and ``link_bandwidth``.
        ranks
            R, number of ranks that exchange their counts.
        experts
            E, number of counts that each rank sends.
        choices
            Number of expert choices of all tokens in a step, over all ranks.
        """
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * _BYTES_PER_COUNT
        transfer_us = received / (settings.link_bandwidth * 1e9) * 1e6
        return cls(_LATENCY_US + transfer_us + _COMPUTING_US + _rounds_for(choices) * _ROUND_US)

    def ms_of_step(self, layers: int) -> float:
        """Return the cost per step, summed over the layers, in milliseconds."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        return f"{digits(self.us, 4)} us per layer (assumed: one exchange of counts, and computation at H100 speed)"


def _rounds_for(choices: float) -> int:
    """Return the number of rounds needed to split a layer's ``choices``, counted over all ranks.

    ``docs/research/stepwise.md`` explains this number.
    """
    return 22 + math.ceil(20 * (math.sqrt(max(choices / 8192, 1.0)) - 1.0))
