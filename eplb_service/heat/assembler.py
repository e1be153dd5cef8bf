"""Puts the ranks' heat reports together, step by step, into the window that decisions look at.

Only a step that every rank has reported, all under the same placement, counts; anything else is lost and counted as
lost, never guessed. Where hosts do not count what slots receive, that follows from what every rank's own tokens chose
and the table that they were routed by. Memory is bounded by the shape, whatever the ranks send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.heat.sources import SOURCE_BUCKETS, RankSums, SourceHeat, StepTimes, StepTimesRing
from eplb_service.placement import Float64, Int32, dealt_to, mean_par, step_par, with_entries
from eplb_service.wire.agent import Shape
from eplb_service.wire.fields import LAST_STEP
from eplb_service.wire.heat import HeatReport

_EPOCHS_KEPT = 8
_PLACEMENTS_KEPT = 4
"""Placements of all layers kept stacked: before and after a switch, and ranks in between."""
_TABLES_HELD = 3
"""log2phy of all ranks: in the Hellos that wait, in what is served, and of its layers that have switched."""
_MOST_IN_16_BITS = np.iinfo(np.uint16).max

_Cells: TypeAlias = npt.NDArray[np.intp]
_Rows: TypeAlias = slice | _Cells
"""Positions in the ring; one piece of it where they are one, which is several times as quick."""
PlacedLayer: TypeAlias = tuple[Int32, npt.NDArray[np.int16]]
"""One layer at one epoch: experts of its slots ``[R, S]``, and the ranks that each source rank's tokens of an expert
go to in turn, ``[R, E, D]``."""


class StepCounts(NamedTuple):
    """Steps that all ranks have reported, and steps that are lost: since the start, or by one report."""

    received: int
    lost: int


def memory_bytes(shape: Shape, window_steps: int, pending_steps: int) -> int:
    """Bound on a deployment's memory: its assembler, and the tables of what it serves."""
    kept_steps = window_steps + pending_steps
    heat = kept_steps * shape.layers * (4 * shape.experts + 4 * shape.ranks + 16)
    counts = 4 * pending_steps * shape.layers * shape.ranks * shape.slots
    sources = SOURCE_BUCKETS * 4 * shape.ranks * shape.layers * shape.experts
    times = pending_steps * 12 * shape.ranks + window_steps * 16
    # Those of all layers that are stacked are twice as wide.
    slots = (_EPOCHS_KEPT + 2 * _PLACEMENTS_KEPT) * 4 * shape.layers * shape.ranks * shape.slots
    tables = (_TABLES_HELD * 4 + _EPOCHS_KEPT * 2) * shape.ranks * shape.layers * shape.experts * shape.width
    return heat + counts + sources + times + slots + tables


def placed_layer(phy2log_RS: Int32, log2phy_RE: Int32) -> PlacedLayer:
    """Return one layer at one epoch, by its slots and tables."""
    return phy2log_RS, with_entries(log2phy_RE // phy2log_RS.shape[1], 2).astype(np.int16)


class PlacementHistory:
    """The newest epochs of every layer, bounded: what counts are read under.

    Parameters
    ----------
    by_layer
        For each layer its placements by epoch, oldest first.
    """

    def __init__(self, by_layer: tuple[dict[int, PlacedLayer], ...]) -> None:
        self.by_layer = by_layer
        self._stacked: dict[tuple[int, ...], _Cells] = {}

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32) -> None:
        """Read counts of ``layer`` at ``epoch`` by these slots and tables; replaces what was known of that epoch."""
        self.put(layer, epoch, placed_layer(phy2log_RS, log2phy_RE))

    def put(self, layer: int, epoch: int, placed: PlacedLayer) -> None:
        """Read counts of ``layer`` at ``epoch`` under this, as ``place`` does."""
        self._stacked.clear()
        epochs = self.by_layer[layer]
        epochs.pop(epoch, None)
        epochs[epoch] = placed
        while len(epochs) > _EPOCHS_KEPT:
            epochs.pop(next(iter(epochs)))

    def cells(self, layer_epochs: tuple[int, ...], experts: int) -> _Cells | None:
        """Index into heat ``[L, E]``, flattened, of each slot, ``[L, R, S]``; ``None`` where an epoch is not known."""
        known = self._stacked.get(layer_epochs)
        if known is not None:
            return known
        placed_L = [epochs.get(epoch) for epochs, epoch in zip(self.by_layer, layer_epochs, strict=True)]
        rows = [
            experts * layer + placed[0].astype(np.intp) for layer, placed in enumerate(placed_L) if placed
        ]
        if len(rows) < len(placed_L):
            return None
        if len(self._stacked) >= _PLACEMENTS_KEPT:
            self._stacked.pop(next(iter(self._stacked)))
        self._stacked[layer_epochs] = np.stack(rows)
        return self._stacked[layer_epochs]

    def targets(self, layer_epochs: tuple[int, ...], rank: int) -> npt.NDArray[np.int16]:
        """Ranks that the tokens of source ``rank`` go to in turn, int16 ``[L, E, D]``; the epochs must be known."""
        layers = zip(self.by_layer, layer_epochs, strict=True)
        return np.stack([epochs[epoch][1][rank] for epochs, epoch in layers])


class PendingSteps:
    """A ring of the newest ``capacity`` steps, each filled rank by rank; one that falls out unfinished is lost.

    Rows of steps are by the positions that ``add`` returns, and hold while those steps are in the ring
    (``kept_from``), as does what ``heat_and_loads`` gives of them. What a rank's slots received is only kept until its
    step is whole: all ranks' counts are put together at once, which is quicker than rank by rank.

    The newest step decides where the ring is, but no rank's claim is final: where the latest report of *every* rank is
    of steps before the ring, whatever moved it so far ahead was wrong, and the ring goes back to where they are. What
    a leap skips counts as lost only once a step after it is complete. ``restarts`` counts how often it went back;
    of the newest whole steps in a row, ``dummy_steps`` were dummies on all ranks, or ``empty_steps`` others counted no
    token.
    """

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._shape, self.capacity = shape, capacity
        self.completed = self.lost = self.restarts = 0
        self.dummy_steps = self.empty_steps = 0
        self.step_P = np.zeros(capacity, dtype=np.int64)
        self.epochs_PL = np.zeros((capacity, shape.layers), dtype=np.int64)
        self.micros_PR = np.zeros((capacity, shape.ranks), dtype=np.uint32)
        self.tokens_PR = np.full((capacity, shape.ranks), -1, dtype=np.int64)
        self._seen_PR = np.zeros((capacity, shape.ranks), dtype=bool)
        self._reported_P = np.zeros(capacity, dtype=np.int32)
        self._busy_P, self._counted_P, self._spoilt_P, self._by_slot_P = np.zeros((4, capacity), dtype=bool)
        self._latest_end_R = np.full(shape.ranks, -1, dtype=np.int64)
        # Tokens by slot, where ranks count them: a rank's reports are written in one piece, and in 16 bits where those
        # hold them, for the first touch of so much memory is most of what it costs.
        self._slots_RPLS: npt.NDArray[np.integer[Any]] | None = None
        # Tokens by expert and by rank, where they follow from the ranks' own.
        self._sums: tuple[Int32, Int32] | None = None
        self._leapt = 0
        self._first: int | None = None
        self._end = 0

    def add(self, rank: int, report: HeatReport, targets_LED: npt.NDArray[np.integer[Any]] | None) -> _Cells:
        """Fill in what the slots of a rank received, or its own tokens chose, which went to ``targets_LED`` in turn.

        Returns the positions of steps that are now complete and carry tokens. A step that this rank has reported
        before, or that has fallen out of the ring, is left as it is. At most ``capacity`` steps at a time.
        """
        rows, taken = self._open(rank, report)
        counts_TLX = report.source_counts_TLE if targets_LED is not None else report.slot_counts_TLS
        assert counts_TLX is not None
        counts_TLX = counts_TLX[taken]
        if targets_LED is None:
            self._add_slots(rank, rows, counts_TLX)
        else:
            self._add_sources(rows, counts_TLX, targets_LED)
        # Steps that carry a token; the first rank's counts usually say so of all of them.
        blank_T = ~self._counted_P[rows]
        if blank_T.any():
            self._counted_P[_numbers(rows)[blank_T]] = counts_TLX[blank_T].any(axis=(1, 2))
        return self._close(rank, report, rows, taken)

    @property
    def slowest(self) -> tuple[int, int]:
        """The rank that has reported least far, and the step that its latest report ended before; -1 for none yet."""
        rank = int(self._latest_end_R.argmin())
        return rank, int(self._latest_end_R[rank])

    def outrun_by(self, rank: int, report: HeatReport) -> int | None:
        """Return the step that the slowest other rank is at, where ``report`` would push out steps that it may report.

        Only by one that goes on where the rank's last one ended, as a backlog does: nobody catches up with a leap, and
        who lies about its steps is not to hold up what it reports next. ``None`` where nothing would be lost.
        """
        before = int(self._latest_end_R[rank])
        if before < 0 or report.first_step - before > self.capacity:
            return None
        begin = report.first_step + report.steps - self.capacity
        if self._first is None or begin <= max(self._first, self.slowest[1]):
            return None
        behind = int(np.delete(self._latest_end_R, rank).min(initial=LAST_STEP))
        return behind if begin > max(behind, self._first) else None

    def kept_from(self, report: HeatReport) -> int:
        """Return the first step that is certainly still in the ring once ``report`` has been filled in."""
        end = report.first_step + report.steps
        # The ring may go back to a step before it.
        return LAST_STEP if end <= self._end - self.capacity else max(end, self._end) - self.capacity

    def heat_and_loads(self, position: int, cells_LRS: _Cells | None) -> tuple[Int32, Int32]:
        """Tokens of a whole step by expert, int32 ``[L, E]``, and by rank, int32 ``[L, R]``.

        ``cells_LRS`` says where in the first, flattened, each slot's tokens go; ``None`` where its counts follow from
        the ranks' own tokens.
        """
        if cells_LRS is None:
            assert self._sums is not None
            heat_PLE, loads_PLR = self._sums
            return heat_PLE[position].copy(), loads_PLR[position]
        assert self._slots_RPLS is not None
        layers, experts = self._shape.layers, self._shape.experts
        # Layer by layer, as the sums are: ranks' rows are too far apart to be gone through in their own order.
        counts_LRS = np.ascontiguousarray(self._slots_RPLS[:, position].transpose(1, 0, 2), dtype=np.int32)
        # Sums of whole numbers, exact in float64.
        sums_C = np.bincount(cells_LRS.ravel(), counts_LRS.ravel(), minlength=layers * experts)
        loads_LR: Int32 = np.einsum("lrs->lr", counts_LRS)
        return sums_C.astype(np.int32).reshape(layers, experts), loads_LR

    def _add_slots(self, rank: int, rows: _Rows, counts_TLS: npt.NDArray[np.integer[Any]]) -> None:
        if self._slots_RPLS is None:
            shape = (self._shape.ranks, self.capacity, self._shape.layers, self._shape.slots)
            self._slots_RPLS = np.zeros(shape, dtype=np.uint16)
        if self._slots_RPLS.dtype == np.uint16 and counts_TLS.max(initial=0) > _MOST_IN_16_BITS:
            self._slots_RPLS = self._slots_RPLS.astype(np.int32)
        self._slots_RPLS[rank, rows] = counts_TLS

    def _add_sources(
        self, rows: _Rows, counts_TLE: npt.NDArray[np.integer[Any]], targets_LED: npt.NDArray[np.integer[Any]]
    ) -> None:
        ranks, layers, width = self._shape.ranks, self._shape.layers, targets_LED.shape[2]
        if self._sums is None:
            steps = self.capacity, layers
            self._sums = (
                np.zeros((*steps, self._shape.experts), np.int32),
                np.zeros((*steps, ranks), np.int32),
            )
        heat_PLE, loads_PLR = self._sums
        heat_PLE[rows] += counts_TLE
        cells_C = (targets_LED + ranks * np.arange(layers)[:, None, None]).ravel()
        for position, counts_LE in zip(_numbers(rows), counts_TLE, strict=True):
            dealt_LED = np.stack([dealt_to(counts_LE, entry, width) for entry in range(width)], axis=2)
            # Sums of whole numbers, exact in float64.
            sums_C = np.bincount(cells_C, dealt_LED.ravel(), minlength=layers * ranks)
            loads_PLR[position] += sums_C.reshape(layers, ranks).astype(np.int32)

    def _open(self, rank: int, report: HeatReport) -> tuple[_Rows, _Rows]:
        """Find the positions of the steps that this rank may still fill in, and which of the report's they are."""
        start, steps = report.first_step, report.steps
        end = start + steps
        self._latest_end_R[rank] = end
        # Where every rank is before the ring it is emptied, and begins again with the report at hand.
        if self._first is not None and (self._latest_end_R <= self._end - self.capacity).all():
            self.step_P[:] = -1
            self._first, self._leapt = None, 0
            self.restarts += 1
        if self._first is None or end > self._end:
            self._make_room(start, end)
        steps_T = np.arange(start, end)
        begin = start % self.capacity
        one_piece = begin + steps <= self.capacity
        rows: _Rows = slice(begin, begin + steps) if one_piece else steps_T % self.capacity
        taken: _Rows = slice(None)
        open_T = (self.step_P[rows] == steps_T) & ~self._seen_PR[rows, rank]
        if not open_T.all():
            rows, taken = _numbers(rows)[open_T], np.flatnonzero(open_T)
        self._agree(rows, report)
        return rows, taken

    def _close(self, rank: int, report: HeatReport, rows: _Rows, taken: _Rows) -> _Cells:
        """Note the rank's part of these steps; returns positions of those that are whole now and carry tokens."""
        if report.micros_T is not None:
            self.micros_PR[rows, rank] = report.micros_T[taken]
        if report.tokens_T is not None:
            self.tokens_PR[rows, rank] = report.tokens_T[taken]
        self._busy_P[rows] |= ~report.dummy_T[taken]
        self._seen_PR[rows, rank] = True
        self._reported_P[rows] += 1
        done = self._done(rows)
        if not done.any():
            return np.zeros(0, dtype=np.intp)
        positions = _numbers(rows)
        for busy, tokens in zip(self._busy_P[positions[done]], self._counted_P[positions[done]], strict=True):
            self.dummy_steps = 0 if busy else self.dummy_steps + 1
            if busy:
                self.empty_steps = 0 if tokens else self.empty_steps + 1
        self.completed += int(done.sum())
        self.lost += self._leapt
        self._leapt = 0
        complete: _Cells = positions[done & self._busy_P[rows]]
        return complete

    def _done(self, rows: _Rows) -> npt.NDArray[np.bool_]:
        whole = self._reported_P[rows] == self._shape.ranks
        done: npt.NDArray[np.bool_] = whole & ~self._spoilt_P[rows]
        return done

    def _agree(self, rows: _Rows, report: HeatReport) -> None:
        """Spoil steps that ranks counted under different placements, or only some of them by slot."""
        epochs_L = np.asarray(report.layer_epochs, dtype=np.int64)
        by_slot = report.slot_counts_TLS is not None
        fresh = self._reported_P[rows] == 0
        if fresh.any():
            positions = _numbers(rows)[fresh]
            self.epochs_PL[positions] = epochs_L
            self._by_slot_P[positions] = by_slot
        other_TL, other_T = self.epochs_PL[rows] != epochs_L, self._by_slot_P[rows] != by_slot
        # Hardly ever: one look at all of them is quicker than one at each.
        if other_TL.any() or other_T.any():
            self._spoilt_P[rows] |= other_TL.any(axis=1) | other_T

    def _make_room(self, start: int, end: int) -> None:
        """Begin steps up to ``end``, past those that the ring has; as many leave it."""
        if self._first is None:
            self._first = self._end = start
        kept_from = end - self.capacity
        leaving = np.arange(max(self._first, self._end - self.capacity), min(self._end, kept_from))
        self.lost += int((~self._done(leaving % self.capacity)).sum())
        self._leapt += max(0, kept_from - max(self._end, self._first))
        coming = np.arange(max(self._end, kept_from), end)
        positions = coming % self.capacity
        self.step_P[positions] = coming
        # Counts by slot are written whole by each rank; those by source are added up, where there are any.
        flags = (self._seen_PR, self._reported_P, self._busy_P, self._counted_P, self._spoilt_P)
        for rows in (*(self._sums or ()), self.micros_PR, *flags):
            rows[positions] = 0
        self.tokens_PR[positions] = -1
        self._end = end


def _numbers(rows: _Rows) -> _Cells:
    """Return positions one by one."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


@dataclass(frozen=True)
class RememberedHeat:
    """Heat of the window as it was at one moment: cheap to take, and put together by whoever has the time.

    ``rows`` are the counts of each step, in order, int32 ``[L, E]`` (``shape``); nothing writes to them. ``buckets``
    are tokens by source rank: for each stretch of steps that all ranks report, their sums, float32 ``[L, E]`` each.
    """

    rows: tuple[Int32, ...]
    shape: tuple[int, int]
    buckets: tuple[tuple[RankSums, ...], ...] = ()

    def arrays(self) -> tuple[Int32, Float64 | None]:
        """Return heat by step, int32 ``[T, L, E]``, and by source rank, float64 ``[R, L, E]`` or ``None``."""
        heat_TLE = np.stack(self.rows) if self.rows else np.zeros((0, *self.shape), dtype=np.int32)
        if not self.buckets:
            return heat_TLE, None
        source_RLE = np.zeros((len(self.buckets[0]), *self.shape))
        for bucket in self.buckets:
            for source_LE, sums_LE in zip(source_RLE, bucket, strict=True):
                source_LE += sums_LE
        return heat_TLE, source_RLE


class HeatAssembler:
    """The sliding window of one deployment, of ``window_steps``.

    ``pending_steps`` is how far the fastest rank may be ahead of the slowest; also the most steps of one report. Ranks
    with the same number in ``token_groups_R`` see the same tokens; by default each has its own.

    ``placements`` is what counts are read under, ``pending`` are the newest steps of the ranks' reports; ``assembled``
    counts the steps that ever entered the window. A step enters it where ``put_together`` comes to it: long reports
    make many steps whole at once.
    """

    def __init__(
        self, shape: Shape, window_steps: int, pending_steps: int, token_groups_R: Int32 | None = None
    ) -> None:
        self.assembled = 0
        self.placements = PlacementHistory(tuple({} for _ in range(shape.layers)))
        self._shape = shape
        # Steps that all ranks have reported, by their position in the ring, and the cells of their counts if by slot.
        self._whole: deque[tuple[int, _Cells | None]] = deque()
        self.pending = PendingSteps(shape, pending_steps)
        self._sources = SourceHeat(shape.ranks, window_steps)
        self._steps_W = np.full(window_steps, -1, dtype=np.int64)
        # Rows are replaced, never written to: they can be read while steps come in. What ranks received is kept in 16
        # bits where that holds it: the first touch of memory is most of what a step costs while the window fills.
        self._heat_W: list[Int32] = []
        self._loads_W: list[npt.NDArray[np.integer[Any]]] = []
        self._par_WL = np.full((window_steps, shape.layers), np.nan)
        self._epochs_WL = np.zeros((window_steps, shape.layers), dtype=np.int64)
        groups_R = np.arange(shape.ranks) if token_groups_R is None else token_groups_R
        self._times = StepTimesRing(window_steps, np.unique(groups_R, return_index=True)[1])

    @property
    def counted(self) -> StepCounts:
        """Steps so far; lost are those that some rank never reported in time, or under another placement."""
        return StepCounts(self.pending.completed, self.pending.lost)

    @property
    def steps(self) -> int:
        """Steps in the window."""
        return min(self.assembled, len(self._steps_W))

    @property
    def waiting(self) -> int:
        """Steps that all ranks have reported and that are not in the window yet."""
        return len(self._whole)

    def add(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report, and put together what is whole; returns as ``take`` does."""
        counts = self.take(rank, report)
        self.put_together()
        return counts

    def take(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report; returns how many steps it completed, and how many are lost since.

        A report under an epoch that is not known is left out, so that its steps will count as lost.
        """
        cells_LRS = self.placements.cells(report.layer_epochs, self._shape.experts)
        if cells_LRS is None:
            return StepCounts(0, 0)
        pending = self.pending
        kept_from = pending.kept_from(report)
        if any(pending.step_P[position] < kept_from for position, _ in self._whole):
            self.put_together()
        received, lost, restarts = pending.completed, pending.lost, pending.restarts
        targets_LED = None
        if report.slot_counts_TLS is None:
            targets_LED, cells_LRS = self.placements.targets(report.layer_epochs, rank), None
        whole = pending.add(rank, report, targets_LED)
        self._whole.extend((position, cells_LRS) for position in whole.tolist())
        if pending.restarts != restarts:
            self._sources.clear()
        self._sources.add(rank, report)
        return StepCounts(pending.completed - received, pending.lost - lost)

    def put_together(self, most: int | None = None) -> None:
        """Let steps that all ranks have reported enter the window: all, or at most so many, the first ones first."""
        for _ in range(len(self._whole) if most is None else min(most, len(self._whole))):
            position, cells_LRS = self._whole.popleft()
            self._append(position, *self.pending.heat_and_loads(position, cells_LRS))

    def remembered(self) -> RememberedHeat:
        """Heat of the window by now."""
        rows = tuple(self._heat_W[row] for row in self._in_order())
        return RememberedHeat(rows, (self._shape.layers, self._shape.experts), self._sources.buckets())

    def step_times(self, layer_epochs: Sequence[int]) -> StepTimes:
        """Times of the steps of ``remembered``, in its order; unknown where a layer was not yet as it is now."""
        rows = self._in_order()
        current_T = np.asarray(self._current(rows, layer_epochs).all(axis=1))
        return self._times.of(rows, current_T)

    def timed_steps(self) -> tuple[Float64, Float64]:
        """Numbers of the window's steps in order, and the microseconds that each took, float64 ``[T]`` each.

        Whatever served them; NaN where no rank measured it.
        """
        rows = self._in_order()
        times = self._times.of(rows, np.ones(len(rows), dtype=bool))
        return self._steps_W[rows].astype(np.float64), times.us_T

    def load_sums(self, layer_epochs: Sequence[int], newest: int) -> tuple[int, Float64]:
        """Tokens that each rank really received in the newest steps: how many steps, and sums, float64 ``[L, R]``.

        Zero where a layer was not yet as it is now.
        """
        rows, sums_LR = self._in_order()[-newest:], np.zeros((self._shape.layers, self._shape.ranks))
        for row, current_L in zip(rows, self._current(rows, layer_epochs), strict=True):
            sums_LR += self._loads_W[row] if current_L.all() else self._loads_W[row] * current_L[:, None]
        return len(rows), sums_LR

    def measured_par(self, layer_epochs: Sequence[int]) -> Float64:
        """Peak-to-average ratios of the window, float64 ``[L]``, that were taken as the steps came in."""
        return mean_par(self._par_of(np.arange(self.steps), layer_epochs), axis=0)

    def newest_par(self, since: int, layer_epochs: Sequence[int]) -> Float64:
        """Ratios of the steps that entered after the first ``since``, float64 ``[T, L]``, in the order of entering.

        NaN where a layer was not yet as it is now, or had no tokens; steps that have left the window since are missing.
        """
        entered = np.arange(max(since, self.assembled - self.steps), self.assembled)
        return self._par_of(entered % len(self._steps_W), layer_epochs)

    def _par_of(self, rows: _Cells, layer_epochs: Sequence[int]) -> Float64:
        return np.where(self._current(rows, layer_epochs), self._par_WL[rows], np.nan)

    def _current(self, rows: _Cells, layer_epochs: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Rows of layers that were as they are now, bool ``[T, L]``."""
        current_TL: npt.NDArray[np.bool_] = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return current_TL

    def _in_order(self) -> _Cells:
        return np.argsort(self._steps_W[: self.steps], kind="stable")

    def _append(self, position: int, heat_LE: Int32, loads_LR: Int32) -> None:
        row = self.assembled % len(self._steps_W)
        self._steps_W[row] = self.pending.step_P[position]
        most = int(loads_LR.max(initial=0))
        kept_LR = loads_LR.astype(np.uint16 if most <= _MOST_IN_16_BITS else np.int32)
        if row == len(self._heat_W):
            self._heat_W.append(heat_LE)
            self._loads_W.append(kept_LR)
        else:
            self._heat_W[row], self._loads_W[row] = heat_LE, kept_LR
        self._par_WL[row] = step_par(loads_LR)
        self._epochs_WL[row] = self.pending.epochs_PL[position]
        self._times.put(row, self.pending.micros_PR[position], self.pending.tokens_PR[position])
        self.assembled += 1
