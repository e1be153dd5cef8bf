"""One step's counts on their way into a trace, gathered rank by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.io.trace import PHASES
from eplb_service.wire.heat import HeatReport, StepPhase

_MIXED = PHASES.index("mixed")
_PHASE_OF = {
    StepPhase.PREFILL: PHASES.index("prefill"),
    StepPhase.DECODE: PHASES.index("decode"),
}
_UNKNOWN_TOKENS = -1


class StepRecord:
    """What each rank reported of one step; the arrays are those of the reports, not copies.

    ``layer_epochs`` is what the first rank counted under and ``by_slot`` whether it counted what its slots received,
    ``spoilt`` whether another rank said otherwise, ``busy`` whether any rank had tokens.
    """

    def __init__(self, layer_epochs: tuple[int, ...], by_slot: bool, ranks: int) -> None:
        self.layer_epochs = layer_epochs
        self.by_slot = by_slot
        self.spoilt = False
        self.busy = False
        self._missing = ranks
        self._reported: list[tuple[HeatReport, int] | None] = [None] * ranks

    @property
    def whole(self) -> bool:
        """Whether all ranks have reported."""
        return self._missing == 0

    @property
    def has_sources(self) -> bool:
        """Whether all ranks reported which experts their own tokens chose."""
        return all(batch.source_counts_TLE is not None for batch, _ in self._reports())

    def add(self, rank: int, batch: HeatReport, offset: int) -> None:
        """Take step ``offset`` of a rank's report."""
        if self._reported[rank] is None:
            self._missing -= 1
        self._reported[rank] = batch, offset
        self.spoilt |= batch.layer_epochs != self.layer_epochs
        self.spoilt |= (batch.slot_counts_TLS is not None) != self.by_slot
        self.busy |= int(batch.phase_T[offset]) != StepPhase.DUMMY

    def slot_counts(self) -> npt.NDArray[np.uint32]:
        """Tokens by slot, uint32 ``[L, R*S]``; only where ``by_slot``."""
        rows = [
            batch.slot_counts_TLS[offset]
            for batch, offset in self._reports()
            if batch.slot_counts_TLS is not None
        ]
        counts_LRS = np.stack(rows, axis=1).astype(np.uint32)
        return counts_LRS.reshape(len(counts_LRS), -1)

    def source_counts(self) -> npt.NDArray[np.integer[Any]]:
        """Tokens by source rank, unsigned ``[R, L, E]``; only where ``has_sources``."""
        rows = [
            batch.source_counts_TLE[offset]
            for batch, offset in self._reports()
            if batch.source_counts_TLE is not None
        ]
        return np.stack(rows).astype(np.uint32)

    def tokens(self) -> int:
        """Tokens of all ranks, -1 where one did not report them."""
        known = [batch.tokens_T[offset] for batch, offset in self._reports() if batch.tokens_T is not None]
        return int(sum(known)) if len(known) == len(self._reported) else _UNKNOWN_TOKENS

    def phase(self) -> int:
        """Index into ``PHASES``, of the ranks that had tokens."""
        found = {int(batch.phase_T[offset]) for batch, offset in self._reports()} - {int(StepPhase.DUMMY)}
        return _PHASE_OF[StepPhase(found.pop())] if len(found) == 1 else _MIXED

    def _reports(self) -> list[tuple[HeatReport, int]]:
        return [report for report in self._reported if report is not None]
