"""What one rank counted over a few steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32


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
        Tokens that the rank's slots received, int32 ``[T, L, S]``.
    dummy_T
        Steps in which this rank had no tokens of its own, bool ``[T]``.
    source_counts_TLE
        The rank's own tokens by logical expert, before dispatch, int32 ``[T, L, E]``; ``None`` where the host does
        not tell.
    """

    first_step: int
    layer_epochs: tuple[int, ...]
    slot_counts_TLS: Int32
    dummy_T: npt.NDArray[np.bool_]
    source_counts_TLE: Int32 | None = None

    @property
    def steps(self) -> int:
        """T."""
        return len(self.dummy_T)
