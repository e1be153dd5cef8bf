"""Which steps' heat a layer records."""

from __future__ import annotations

from enum import Enum

from worker_agent.heat import StepPhase


class HeatStage(str, Enum):
    """The steps whose heat counts. The others get a row of zeros, so that step ``n`` stays in row ``n % W``.

    A dummy step of one rank has no tokens of its own, but slots that others' tokens come to: it counts where all
    steps do. For one stage alone, tell an idle rank the phase of the others, and that none of its tokens is active.
    """

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"

    def records(self, phase: StepPhase) -> bool:
        """Whether a step of this phase counts."""
        return self is HeatStage.ALL or self.name == phase.name
