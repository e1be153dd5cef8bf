"""Puts the ranks' heat reports together, step by step, into the window that decisions look at.

Only a step that every rank has reported, all under the same placement, counts; anything else is lost and counted as
lost, never guessed. Where hosts do not count what slots receive, that follows from what every rank's own tokens chose
and the table that they were routed by. Memory is bounded by the shape, whatever the ranks send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.heat.pending import PendingSteps
from eplb_service.heat.placement_history import PLACEMENTS_HELD, TARGETS_HELD, PlacementHistory
from eplb_service.heat.sources import SOURCE_BUCKETS, SourceHeat, SourceSums
from eplb_service.heat.step_times import StepTimes, StepTimesRing
from eplb_service.placement import Float64, Int32, mean_par, step_par
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Shape

_MOST_IN_16_BITS = np.iinfo(np.uint16).max
_TABLES_HELD = 3
"""log2phy of all ranks: in the Hellos that wait, in what is served, and of its layers that have switched."""


class StepCounts(NamedTuple):
    """Steps that all ranks have reported, and steps that are lost: since the start, or by one report."""

    received: int
    lost: int


def memory_bytes(shape: Shape, window_steps: int, pending_steps: int) -> int:
    """What a deployment of ``shape`` costs in memory at most: its assembler, and the tables of what it serves."""
    kept_steps = window_steps + pending_steps
    heat = kept_steps * shape.layers * (4 * shape.experts + 4 * shape.ranks + 16)
    counts = 4 * pending_steps * shape.layers * shape.ranks * shape.slots
    sources = SOURCE_BUCKETS * 4 * shape.ranks * shape.layers * shape.experts
    times = pending_steps * 12 * shape.ranks + window_steps * 16
    slots = PLACEMENTS_HELD * 4 * shape.layers * shape.ranks * shape.slots
    tables = (_TABLES_HELD * 4 + TARGETS_HELD * 2) * shape.ranks * shape.layers * shape.experts * shape.width
    return heat + counts + sources + times + slots + tables


class _WholeStep(NamedTuple):
    """A step that all ranks have reported, by its position in the ring, and the cells of its counts if by slot."""

    position: int
    cells_LRS: npt.NDArray[np.intp] | None


@dataclass(frozen=True)
class RememberedHeat:
    """Heat of the window as it was at one moment: cheap to take, and put together by whoever has the time.

    Parameters
    ----------
    rows
        Of each step, in order, int32 ``[L, E]``; nothing writes to them.
    shape
        L and E.
    sources
        By source rank.
    """

    rows: tuple[Int32, ...]
    shape: tuple[int, int]
    sources: SourceSums

    def arrays(self) -> tuple[Int32, npt.NDArray[np.float64] | None]:
        """By step, int32 ``[T, L, E]``, and by source rank, float64 ``[R, L, E]`` or ``None``."""
        heat_TLE = np.stack(self.rows) if self.rows else np.zeros((0, *self.shape), dtype=np.int32)
        return heat_TLE, self.sources.total()


class HeatAssembler:
    """The sliding window of one deployment.

    Parameters
    ----------
    ranks, layers, experts, slots
        R, L, E and S.
    window_steps
        Steps kept.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest; also the most steps of one report.
    token_groups_R
        Ranks with the same number see the same tokens; by default each has its own.

    ``placements`` is what counts are read under; ``assembled`` counts the steps that ever entered the window. A step
    enters it where ``put_together`` comes to it: long reports make many steps whole at once.
    """

    def __init__(
        self,
        ranks: int,
        layers: int,
        experts: int,
        slots: int,
        window_steps: int,
        pending_steps: int,
        token_groups_R: Int32 | None = None,
    ) -> None:
        self.assembled = 0
        self.placements = PlacementHistory(tuple({} for _ in range(layers)))
        self._shape = (layers, experts)
        self._whole: deque[_WholeStep] = deque()
        self._pending = PendingSteps(ranks, layers, experts, slots, pending_steps)
        self._sources = SourceHeat(ranks, window_steps)
        self._steps_W = np.full(window_steps, -1, dtype=np.int64)
        # Rows are replaced, never written to: they can be read while steps come in. What ranks received is kept in 16
        # bits where that holds it: the first touch of memory is most of what a step costs while the window fills.
        self._heat_W: list[Int32] = []
        self._loads_W: list[npt.NDArray[np.integer[Any]]] = []
        self._ranks = ranks
        self._par_WL = np.full((window_steps, layers), np.nan)
        self._epochs_WL = np.zeros((window_steps, layers), dtype=np.int64)
        groups_R = np.arange(ranks) if token_groups_R is None else token_groups_R
        self._times = StepTimesRing(window_steps, np.unique(groups_R, return_index=True)[1])

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

    @property
    def waiting(self) -> int:
        """Steps that all ranks have reported and that are not in the window yet."""
        return len(self._whole)

    @property
    def slowest(self) -> tuple[int, int]:
        """The rank that has reported least far, and the step that its latest report ended before; -1 for none yet."""
        return self._pending.slowest

    def outrun_by(self, rank: int, report: HeatReport) -> int | None:
        """How far the slowest other rank has reported, where a rank's report would lose steps that it may yet report.

        ``None`` where it would lose none.
        """
        return self._pending.outrun_by(rank, report)

    def add(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report, and put together what is whole; returns as ``take`` does."""
        counts = self.take(rank, report)
        self.put_together()
        return counts

    def take(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report; returns how many steps it completed, and how many are lost since.

        A report under an epoch that is not known is left out, so that its steps will count as lost.
        """
        cells_LRS = self.placements.cells(report.layer_epochs, self._shape[1])
        if cells_LRS is None:
            return StepCounts(0, 0)
        pending = self._pending
        if self._whole:
            self._put_together_before(pending.kept_from(report))
        received, lost, restarts = pending.completed, pending.lost, pending.restarts
        if report.slot_counts_TLS is None:
            targets_LED = self.placements.targets(report.layer_epochs, rank)
            whole, cells = pending.add_sources(rank, report, targets_LED), None
        else:
            whole, cells = pending.add(rank, report), cells_LRS
        if whole.size:
            self._whole.extend(_WholeStep(position, cells) for position in whole.tolist())
        if pending.restarts != restarts:
            self._sources.clear()
        if report.source_counts_TLE is not None:
            self._sources.add(rank, report.first_step, report.source_counts_TLE)
        elif report.source_sums_LE is not None:
            self._sources.add_sums(rank, report.first_step, report.steps, report.source_sums_LE)
        return StepCounts(pending.completed - received, pending.lost - lost)

    def put_together(self, most: int | None = None) -> None:
        """Let steps that all ranks have reported enter the window: all, or at most so many, the first ones first."""
        for _ in range(len(self._whole) if most is None else min(most, len(self._whole))):
            position, cells_LRS = self._whole.popleft()
            if cells_LRS is None:
                self._append(position, *self._pending.by_source(position))
            else:
                self._append(position, *self._pending.by_slot(position, cells_LRS))

    def remembered(self) -> RememberedHeat:
        """Heat of the window by now."""
        rows = tuple(self._heat_W[row] for row in self._in_order())
        return RememberedHeat(rows, self._shape, self._sources.sums())

    def step_times(self, layer_epochs: Sequence[int]) -> StepTimes:
        """How long the steps of ``remembered`` took, in its order; unknown where a layer was not yet as it is now."""
        rows = self._in_order()
        current_TL = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return self._times.of(rows, current_TL.all(axis=1))

    def timed_steps(self) -> tuple[Float64, Float64]:
        """Numbers of the window's steps in order, and how long each took in microseconds, float64 ``[T]`` each.

        Whatever served them; NaN where no rank measured it.
        """
        rows = self._in_order()
        times = self._times.of(rows, np.ones(len(rows), dtype=bool))
        return self._steps_W[rows].astype(np.float64), times.us_T

    def measured_loads(self, layer_epochs: Sequence[int], newest: int | None = None) -> Iterator[Int32]:
        """Tokens that each rank really received, int32 ``[L, R]`` for each step of the window, or its ``newest``.

        Zero where a layer was not yet as it is now.
        """
        epochs_L = np.asarray(layer_epochs, dtype=np.int64)
        rows = self._in_order()
        for row in rows if newest is None else rows[-newest:]:
            yield self._loads_W[row].astype(np.int32) * (self._epochs_WL[row] == epochs_L)[:, None]

    def load_sums(self, layer_epochs: Sequence[int], newest: int) -> tuple[int, Float64]:
        """``measured_loads`` summed: how many steps, and float64 ``[L, R]``."""
        epochs_L = np.asarray(layer_epochs, dtype=np.int64)
        rows, sums_LR = self._in_order()[-newest:], np.zeros((self._shape[0], self._ranks))
        for row in rows:
            current_L = self._epochs_WL[row] == epochs_L
            sums_LR += self._loads_W[row] if current_L.all() else self._loads_W[row] * current_L[:, None]
        return len(rows), sums_LR

    def measured_par(self, layer_epochs: Sequence[int]) -> Float64:
        """``par`` of ``measured_loads``, float64 ``[L]``, of ratios that were taken as the steps came in."""
        par_TL = self._par_WL[: self.steps]
        current_TL = self._epochs_WL[: self.steps] == np.asarray(layer_epochs, dtype=np.int64)
        return mean_par(np.where(current_TL, par_TL, np.nan), axis=0)

    def newest_par(self, since: int, layer_epochs: Sequence[int]) -> Float64:
        """Ratios of the steps that entered after the first ``since``, float64 ``[T, L]``, in the order of entering.

        NaN where a layer was not yet as it is now, or had no tokens; steps that have left the window since are missing.
        """
        entered = np.arange(max(since, self.assembled - self.steps), self.assembled)
        rows = entered % len(self._steps_W)
        current_TL = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return np.where(current_TL, self._par_WL[rows], np.nan)

    def _put_together_before(self, step: int) -> None:
        """Those that will have left the ring by the time that it begins with ``step``."""
        if any(self._pending.step_P[whole.position] < step for whole in self._whole):
            self.put_together()

    def _in_order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self._steps_W[: self.steps], kind="stable")

    def _append(self, position: int, heat_LE: Int32, loads_LR: Int32) -> None:
        row = self.assembled % len(self._steps_W)
        self._steps_W[row] = self._pending.step_P[position]
        most = int(loads_LR.max(initial=0))
        kept_LR = loads_LR.astype(np.uint16 if most <= _MOST_IN_16_BITS else np.int32)
        if row == len(self._heat_W):
            self._heat_W.append(heat_LE)
            self._loads_W.append(kept_LR)
        else:
            self._heat_W[row], self._loads_W[row] = heat_LE, kept_LR
        self._par_WL[row] = step_par(loads_LR)
        self._epochs_WL[row] = self._pending.epochs_PL[position]
        self._times.put(row, self._pending.micros_PR[position], self._pending.tokens_PR[position])
        self.assembled += 1
