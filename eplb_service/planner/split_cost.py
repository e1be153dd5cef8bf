"""What a stepwise split takes whatever it wins: an exchange of counts, and its computing."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.planner.settings import STEP, PlannerSettings

BYTES_PER_COUNT = 4
_LATENCY_US = 20.0
"""Of a collective that carries next to nothing, between nodes; nobody has measured it here."""
_COMPUTING_US = 170.0
"""Of the split of 256 experts on 32 ranks x 9 slots in a captured graph, measured on an H100."""


@dataclass(frozen=True)
class SplitCost:
    """What the split itself takes in one layer of a step.

    Parameters
    ----------
    us
        Microseconds.
    bytes
        Counts that each rank receives from all others; none where every rank has all tokens anyway (all-gather).
    stated
        Whether somebody has set the microseconds; otherwise they are assumed.
    """

    us: float
    bytes: int
    stated: bool

    @classmethod
    def of(cls, settings: PlannerSettings, ranks: int, experts: int) -> SplitCost | None:
        """That of a host that splits by step; ``None`` of any other."""
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * BYTES_PER_COUNT
        if settings.split_overhead_us is not None:
            return cls(settings.split_overhead_us, received, True)
        travel_us = received / (settings.link_bandwidth * 1e9) * 1e6
        return cls(_LATENCY_US + travel_us + _COMPUTING_US, received, False)

    def ms_of_step(self, layers: int) -> float:
        """Milliseconds of all layers together."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        if self.stated:
            return f"{self.us:.4g} us per layer (stated), {self.bytes:,} bytes of counts to each rank"
        return (
            f"{self.us:.4g} us per layer (assumed: {_LATENCY_US:g} us for a collective, {self.bytes:,} bytes of counts "
            f"to each rank at link_bandwidth, {_COMPUTING_US:g} us of computing, as on an H100)"
        )
