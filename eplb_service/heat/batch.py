"""What one rank counted over a few steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


class Phase(enum.IntEnum):
    """What kind of step it was for one rank; the numbers are the wire's."""

    UNKNOWN = 0
    PREFILL = 1
    DECODE = 2
    DUMMY = 3
    """The rank had no tokens of its own."""


@dataclass(frozen=True)
class HeatBatch:
    """One rank's counts of consecutive steps, all under one placement.

    Parameters
    ----------
    first_step
        Number of the first step.
    layer_epochs
        Epoch of each layer's placement while they were counted.
    slot_counts_TLS
        Tokens that the rank's slots received, integers ``[T, L, S]``.
    phase_T
        ``Phase`` of each step, integers ``[T]``.
    source_counts_TLE
        The rank's own tokens by logical expert, before dispatch, integers ``[T, L, E]``; ``None`` where the host does
        not tell.
    tokens_T
        The rank's own tokens, integers ``[T]``; ``None`` where the host does not tell.
    dropped_steps
        Steps that the rank's agent has had to drop since its Hello.
    """

    first_step: int
    layer_epochs: tuple[int, ...]
    slot_counts_TLS: npt.NDArray[np.integer[Any]]
    phase_T: npt.NDArray[np.uint8]
    source_counts_TLE: npt.NDArray[np.integer[Any]] | None = None
    tokens_T: npt.NDArray[np.integer[Any]] | None = None
    dropped_steps: int = 0

    @property
    def steps(self) -> int:
        """T."""
        return len(self.phase_T)

    @property
    def dummy_T(self) -> npt.NDArray[np.bool_]:
        """Steps in which this rank had no tokens of its own, bool ``[T]``."""
        dummy: npt.NDArray[np.bool_] = self.phase_T == Phase.DUMMY
        return dummy
