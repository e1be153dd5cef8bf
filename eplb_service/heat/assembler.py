"""Puts the ranks' heat reports together, step by step, into the window that decisions look at.

Only a step that every rank has reported, all under the same placement, counts; anything else is lost and counted as
lost, never guessed. Memory is bounded by the shape, whatever the ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.heat.batch import HeatBatch
from eplb_service.heat.pending import PendingSteps
from eplb_service.heat.sources import SourceHeat
from eplb_service.heat.window import Window
from eplb_service.placement import Int32

_EPOCHS_KEPT = 8
_PLACEMENTS_KEPT = 4
"""Placements of all layers that reports are read under at a time: before and after a switch, and ranks in between."""


class HeatSnapshot(NamedTuple):
    """A copy of a window's counts, cheap to take; ``window`` checks it, on whatever thread has the time.

    ``heat_TLE`` is int32 ``[T, L, E]``, ``source_RLE`` float64 ``[R, L, E]`` or ``None``.
    """

    heat_TLE: Int32
    source_RLE: npt.NDArray[np.float64] | None

    def window(self) -> Window:
        """Heat by logical expert and by source rank."""
        return Window(self.heat_TLE, self.source_RLE)


class HeatAssembler:
    """The sliding window of one deployment.

    Parameters
    ----------
    ranks, layers, experts
        R, L and E.
    window_steps
        Steps kept.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest; also the most steps of one batch.
    """

    def __init__(self, ranks: int, layers: int, experts: int, window_steps: int, pending_steps: int) -> None:
        self.assembled = 0
        self._ranks = ranks
        self._placements: list[dict[int, Int32]] = [{} for _ in range(layers)]
        self._whole: dict[tuple[int, ...], Int32] = {}
        self._pending = PendingSteps(ranks, layers, experts, pending_steps)
        self._sources = SourceHeat(ranks, layers, experts, window_steps)
        self._steps_W = np.full(window_steps, -1, dtype=np.int64)
        self._heat_WLE = np.zeros((window_steps, layers, experts), dtype=np.int32)
        self._loads_WLR = np.zeros((window_steps, layers, ranks), dtype=np.int32)
        self._epochs_WL = np.zeros((window_steps, layers), dtype=np.int64)

    @property
    def received(self) -> int:
        """Steps that all ranks have reported."""
        return self._pending.completed

    @property
    def lost(self) -> int:
        """Steps that some rank never reported in time, or that the ranks reported under different placements."""
        return self._pending.lost

    @property
    def steps(self) -> int:
        """Steps in the window."""
        return min(self.assembled, len(self._steps_W))

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Counts of ``layer`` at ``epoch`` are of these slots; replaces what was said of that epoch before."""
        self._whole.clear()
        placements = self._placements[layer]
        placements.pop(epoch, None)
        placements[epoch] = phy2log_RS
        while len(placements) > _EPOCHS_KEPT:
            placements.pop(next(iter(placements)))

    def add(self, rank: int, batch: HeatBatch) -> int:
        """Take one rank's report; returns how many steps it completed.

        A report under an epoch that is not known is left out, so that its steps will count as lost.
        """
        slots_LRS = self._placement_at(batch.layer_epochs)
        if slots_LRS is None:
            return 0
        if batch.source_counts_TLE is not None:
            self._sources.add(rank, batch.first_step, batch.source_counts_TLE)
        complete = self._pending.add(rank, batch, slots_LRS[:, rank])
        for position in complete:
            self._append(position)
        return len(complete)

    def snapshot(self) -> HeatSnapshot:
        """The window as it is now."""
        return HeatSnapshot(self._heat_WLE[self._in_order()], self._sources.sums())

    def measured_loads(self, layer_epochs: Sequence[int]) -> npt.NDArray[np.float64]:
        """Tokens that each rank really received, float64 ``[T, L, R]``; zero where a layer was not yet as it is now."""
        rows = self._in_order()
        current_TL = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return np.where(current_TL[:, :, None], self._loads_WLR[rows], 0).astype(np.float64)

    def _in_order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self._steps_W[: self.steps], kind="stable")

    def _placement_at(self, layer_epochs: tuple[int, ...]) -> Int32 | None:
        """Experts in all slots ``[L, R, S]``; ``None`` where one of the epochs is not known."""
        known = self._whole.get(layer_epochs)
        if known is not None:
            return known
        layers = list(zip(self._placements, layer_epochs, strict=True))
        if not all(epoch in placements for placements, epoch in layers):
            return None
        if len(self._whole) >= _PLACEMENTS_KEPT:
            self._whole.pop(next(iter(self._whole)))
        whole_LRS = np.stack([placements[epoch] for placements, epoch in layers])
        self._whole[layer_epochs] = whole_LRS
        return whole_LRS

    def _append(self, position: int) -> None:
        row = self.assembled % len(self._steps_W)
        self._steps_W[row] = self._pending.step_P[position]
        self._heat_WLE[row] = self._pending.heat_PLE[position]
        self._loads_WLR[row] = self._pending.loads_PLR[position]
        self._epochs_WL[row] = self._pending.epochs_PL[position]
        self.assembled += 1
