"""Phase of a step: prefill, decode, mixed or dummy."""

from __future__ import annotations

import enum


class StepPhase(enum.IntEnum):
    """Phase of a step on one rank. The values are the same as in the wire format."""

    PREFILL = 1
    DECODE = 2
    DUMMY = 3
    """The rank had no tokens."""
    MIXED = 4
    """Some of the rank's requests were in prefill and others in decode."""

    @property
    def prefills(self) -> bool:
        """True if any request was in prefill."""
        return self in (StepPhase.PREFILL, StepPhase.MIXED)
