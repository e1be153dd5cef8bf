"""What a stepwise split takes whatever it wins: an exchange of counts, and its computing."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from eplb_service.planner.settings import STEP, PlannerSettings

BYTES_PER_COUNT = 4
_LATENCY_US = 20.0
"""Of a collective that carries next to nothing, between nodes; nobody has measured it here."""
_COMPUTING_US, _ROUND_US = 55.0, 5.75
"""Of the split of 256 experts on 32 ranks x 9 slots in a captured graph, but for its rounds; and of each of these.
Measured on an H100: 112, 170 and 285 with 10, 20 and 40 rounds."""


def rounds_for(choices: float) -> int:
    """The rounds that the layer takes in a step with so many choices of all ranks; ``docs/stepwise.md``."""
    return 22 + ceil(20 * (sqrt(max(choices / 8192, 1.0)) - 1.0))


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
    rounds
        Those of a step, of which the assumed microseconds grow.
    """

    us: float
    bytes: int
    stated: bool
    rounds: int = rounds_for(0)

    @classmethod
    def of(
        cls, settings: PlannerSettings, ranks: int, experts: int, choices: float = 0.0
    ) -> SplitCost | None:
        """That of a host that splits by step, in steps of so many choices of all ranks; ``None`` of any other."""
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * BYTES_PER_COUNT
        if settings.split_overhead_us is not None:
            return cls(settings.split_overhead_us, received, True)
        travel_us = received / (settings.link_bandwidth * 1e9) * 1e6
        rounds = rounds_for(choices)
        return cls(_LATENCY_US + travel_us + _COMPUTING_US + rounds * _ROUND_US, received, False, rounds)

    def ms_of_step(self, layers: int) -> float:
        """Milliseconds of all layers together."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        if self.stated:
            return f"{self.us:.4g} us per layer (stated), {self.bytes:,} bytes of counts to each rank"
        return (
            f"{self.us:.4g} us per layer (assumed: {_LATENCY_US:g} us for a collective, {self.bytes:,} bytes of counts "
            f"to each rank at link_bandwidth, {_COMPUTING_US + self.rounds * _ROUND_US:g} us of computing in "
            f"{self.rounds} rounds, as on an H100)"
        )
