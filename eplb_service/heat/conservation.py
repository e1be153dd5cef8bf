"""Conservation of tokens: over all ranks, slots receive by expert what the ranks' own tokens chose, and nothing else.

Whatever its cause, a difference is tokens that went to slots that do not hold their expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32
from eplb_service.wire.heat import HeatReport

_ONE_IN = 16
"""Of so many reports of each rank one is compared."""
_MOST_WAITED = 64
"""Reports of each rank after which a comparison that some rank's has not come to is given up."""
_NEWEST = 64
"""Comparisons after which a breach is over."""


@dataclass(frozen=True)
class Breach:
    """Layer in which tokens were not conserved: in the newest steps, and in comparison ``before`` of all.

    ``ranks`` hold the experts that received more than was sent.
    """

    layer: int
    ranks: tuple[int, ...]
    steps: range
    number: int
    before: int | None


class Conservation:
    """Compares what hosts report that promise conservation: a block of steps now and then, ``compared`` so far.

    Its steps must be one report of every rank, under one placement.
    """

    def __init__(self, ranks: int) -> None:
        self.compared = 0
        self._ranks = ranks
        self._reports, self._furthest = 0, -1
        self._block: tuple[range, tuple[int, ...]] | None = None
        self._seen = set[int]()
        self._slots_L: Sequence[Int32] = ()
        self._excess_LE: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self._newest: dict[int, Breach] = {}

    @property
    def breaches(self) -> list[Breach]:
        """Breaches of the layers that have had two of late, in order."""
        ended = self.compared - _NEWEST
        return [
            one for _, one in sorted(self._newest.items()) if one.before is not None and one.before > ended
        ]

    def add(self, rank: int, report: HeatReport, slots_L: Sequence[Int32]) -> None:
        """Take a rank's report, counted while the slots held these experts, of each layer int32 ``[R, S]``."""
        block = range(report.first_step, report.first_step + report.steps), report.layer_epochs
        is_new, self._furthest = report.first_step > self._furthest, max(self._furthest, report.first_step)
        self._reports += 1
        sent_LE = report.source_sums_LE
        if sent_LE is None and report.source_counts_TLE is not None:
            sent_LE = report.source_counts_TLE.sum(axis=0, dtype=np.int64)
        if not report.conserved or report.slot_counts_TLS is None or sent_LE is None:
            return
        if self._block is None and is_new and self._reports > _ONE_IN * self._ranks:
            self._block, self._reports = block, 0
            self._seen, self._slots_L = set(), slots_L
            self._excess_LE = np.zeros(sent_LE.shape, dtype=np.int64)
        # Another placement may have taken an epoch's number since.
        alike = all(here is there for here, there in zip(slots_L, self._slots_L, strict=False))
        if self._reports > _MOST_WAITED * self._ranks or (self._block == block and not alike):
            self._block, self._furthest = None, -1
        elif self._block == block and rank not in self._seen:
            self._seen.add(rank)
            held_LS = np.stack([slots_RS[rank] for slots_RS in slots_L])
            received_LS = report.slot_counts_TLS.sum(axis=0, dtype=np.int64)
            # No expert is twice on a rank.
            self._excess_LE[np.arange(len(held_LS))[:, None], held_LS] += received_LS
            np.subtract(self._excess_LE, sent_LE, out=self._excess_LE)
            if len(self._seen) == self._ranks:
                self._compare(block[0])

    def _compare(self, steps: range) -> None:
        self._block = None
        self.compared += 1
        for layer in np.flatnonzero(self._excess_LE.any(axis=1)).tolist():
            excess_E, before = self._excess_LE[layer], self._newest.get(layer)
            more_E = excess_E > 0 if excess_E.max() > 0 else excess_E < 0
            ranks = np.flatnonzero(more_E[self._slots_L[layer]].any(axis=1)).tolist()
            self._newest[layer] = Breach(
                layer, tuple(ranks), steps, self.compared, None if before is None else before.number
            )
