"""Puts the ranks' heat reports together, step by step, into the window that decisions look at.

Only a step that every rank has reported, all under the same placement, counts; anything else is lost and counted as
lost, never guessed. Where hosts do not count what slots receive, that follows from what every rank's own tokens chose
and the table that they were routed by. Memory is bounded by the shape, whatever the ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.heat.pending import PendingSteps
from eplb_service.heat.placement_history import PLACEMENTS_HELD, TARGETS_HELD, PlacementHistory
from eplb_service.heat.sources import SOURCE_BUCKETS, SourceHeat
from eplb_service.placement import Float64, Int32, mean_par, step_par
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Shape

_TABLES_HELD = 2
"""log2phy of all ranks: in the Hellos that wait, and in what is served."""


class StepCounts(NamedTuple):
    """Steps that all ranks have reported, and steps that are lost: since the start, or by one report."""

    received: int
    lost: int


def memory_bytes(shape: Shape, window_steps: int, pending_steps: int) -> int:
    """What a deployment of ``shape`` costs in memory at most: its assembler, and the tables of what it serves."""
    kept_steps = window_steps + pending_steps
    heat = kept_steps * shape.layers * (4 * shape.experts + 4 * shape.ranks + 16)
    sources = SOURCE_BUCKETS * 4 * shape.ranks * shape.layers * shape.experts
    slots = PLACEMENTS_HELD * 4 * shape.layers * shape.ranks * shape.slots
    tables = (_TABLES_HELD * 4 + TARGETS_HELD * 2) * shape.ranks * shape.layers * shape.experts * shape.width
    return heat + sources + slots + tables


class HeatAssembler:
    """The sliding window of one deployment.

    Parameters
    ----------
    ranks, layers, experts
        R, L and E.
    window_steps
        Steps kept.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest; also the most steps of one report.

    ``placements`` is what counts are read under; ``assembled`` counts the steps that ever entered the window.
    """

    def __init__(self, ranks: int, layers: int, experts: int, window_steps: int, pending_steps: int) -> None:
        self.assembled = 0
        self.placements = PlacementHistory(tuple({} for _ in range(layers)))
        self._pending = PendingSteps(ranks, layers, experts, pending_steps)
        self._sources = SourceHeat(ranks, layers, experts, window_steps)
        self._steps_W = np.full(window_steps, -1, dtype=np.int64)
        self._heat_WLE = np.zeros((window_steps, layers, experts), dtype=np.int32)
        self._loads_WLR = np.zeros((window_steps, layers, ranks), dtype=np.int32)
        self._par_WL = np.full((window_steps, layers), np.nan)
        self._epochs_WL = np.zeros((window_steps, layers), dtype=np.int64)

    @property
    def counted(self) -> StepCounts:
        """Steps so far; lost are those that some rank never reported in time, or under another placement."""
        return StepCounts(self._pending.completed, self._pending.lost)

    @property
    def dummy_steps(self) -> int:
        """How many of the newest steps in a row were dummies on all ranks."""
        return self._pending.dummy_steps

    @property
    def empty_steps(self) -> int:
        """How many of the newest steps in a row, dummies apart, counted no token on any rank."""
        return self._pending.empty_steps

    @property
    def steps(self) -> int:
        """Steps in the window."""
        return min(self.assembled, len(self._steps_W))

    def add(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report; returns how many steps it completed, and how many are lost since.

        A report under an epoch that is not known is left out, so that its steps will count as lost.
        """
        slots_LRS = self.placements.at(report.layer_epochs)
        if slots_LRS is None:
            return StepCounts(0, 0)
        before, restarts = self.counted, self._pending.restarts
        if report.slot_counts_TLS is None:
            targets_LED = self.placements.targets(report.layer_epochs, rank)
            complete = self._pending.add_sources(rank, report, targets_LED)
        else:
            complete = self._pending.add(rank, report, slots_LRS[:, rank])
        for position in complete:
            self._append(position)
        if self._pending.restarts != restarts:
            self._sources.clear()
        if report.source_counts_TLE is not None:
            self._sources.add(rank, report.first_step, report.source_counts_TLE)
        return StepCounts(self.counted.received - before.received, self.counted.lost - before.lost)

    def copy_heat(self) -> tuple[Int32, npt.NDArray[np.float64] | None]:
        """Heat of the window by step, int32 ``[T, L, E]``, and by source rank, float64 ``[R, L, E]`` or ``None``.

        Copies, cheap to take; ``Window`` checks them on whatever thread has the time.
        """
        return self._heat_WLE[self._in_order()], self._sources.sums()

    def measured_loads(
        self, layer_epochs: Sequence[int], newest: int | None = None
    ) -> npt.NDArray[np.float64]:
        """Tokens that each rank really received in the window, or its ``newest`` steps, float64 ``[T, L, R]``.

        Zero where a layer was not yet as it is now.
        """
        rows = self._in_order()
        rows = rows if newest is None else rows[-newest:]
        current_TL = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return np.where(current_TL[:, :, None], self._loads_WLR[rows], 0).astype(np.float64)

    def measured_par(self, layer_epochs: Sequence[int]) -> Float64:
        """``par`` of ``measured_loads``, float64 ``[L]``, of ratios that were taken as the steps came in."""
        par_TL = self._par_WL[: self.steps]
        current_TL = self._epochs_WL[: self.steps] == np.asarray(layer_epochs, dtype=np.int64)
        return mean_par(np.where(current_TL, par_TL, np.nan), axis=0)

    def newest_loads(self, since: int, layer_epochs: Sequence[int]) -> npt.NDArray[np.float64]:
        """Tokens that each rank received in the steps that entered after the first ``since``, in the order of entering.

        Float64 ``[T, L, R]``, as for ``measured_loads``; steps that have left the window since are missing.
        """
        entered = np.arange(max(since, self.assembled - self.steps), self.assembled)
        rows = entered % len(self._steps_W)
        current_TL = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return np.where(current_TL[:, :, None], self._loads_WLR[rows], 0).astype(np.float64)

    def _in_order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self._steps_W[: self.steps], kind="stable")

    def _append(self, position: int) -> None:
        row = self.assembled % len(self._steps_W)
        self._steps_W[row] = self._pending.step_P[position]
        self._heat_WLE[row] = self._pending.heat_PLE[position]
        self._loads_WLR[row] = self._pending.loads_PLR[position]
        self._par_WL[row] = step_par(self._pending.loads_PLR[position])
        self._epochs_WL[row] = self._pending.epochs_PL[position]
        self.assembled += 1
