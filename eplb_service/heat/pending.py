"""Steps that some ranks have reported and others not yet."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32, dealt_to
from eplb_service.wire.fields import LAST_STEP
from eplb_service.wire.heat import HeatReport

_MOST_IN_16_BITS = np.iinfo(np.uint16).max

_Rows: TypeAlias = slice | npt.NDArray[np.intp]
"""Positions in the ring; one piece of it where they are one, which is several times as quick."""


class PendingSteps:
    """A ring of the newest steps, each filled rank by rank.

    Parameters
    ----------
    ranks, layers, experts, slots
        R, L, E and S.
    capacity
        P, steps in the ring; a step that falls out of it unfinished is lost.

    ``epochs_PL``, ``micros_PR`` (wall time by rank, 0 where not known), ``tokens_PR`` (own tokens by rank, -1 where not
    known) and ``step_P`` are rows of steps by the positions that ``add`` and ``add_sources`` return, and hold while
    those steps are in the ring (``kept_from``), as does what ``by_slot`` and ``by_source`` give of them. What a rank's
    slots received is only kept until its step is whole: all ranks' counts are put together at once, which is quicker
    than rank by rank.

    The newest step decides where the ring is, but no rank's claim is final: where the latest report of *every* rank is
    of steps before the ring, whatever moved it so far ahead was wrong, and the ring goes back to where they are. What
    a leap skips counts as lost only once a step after it is complete. ``restarts`` counts how often it went back;
    of the newest whole steps in a row, ``dummy_steps`` were dummies on all ranks, or ``empty_steps`` others counted no
    token.
    """

    def __init__(self, ranks: int, layers: int, experts: int, slots: int, capacity: int) -> None:
        self._shape = (ranks, layers, experts, slots)
        self.capacity = capacity
        self.completed = 0
        self.lost = 0
        self.restarts = 0
        self.dummy_steps = self.empty_steps = 0
        self.step_P = np.zeros(capacity, dtype=np.int64)
        self.epochs_PL = np.zeros((capacity, layers), dtype=np.int64)
        self.micros_PR = np.zeros((capacity, ranks), dtype=np.uint32)
        self.tokens_PR = np.full((capacity, ranks), -1, dtype=np.int64)
        self._seen_PR = np.zeros((capacity, ranks), dtype=bool)
        self._reported_P = np.zeros(capacity, dtype=np.int32)
        self._busy_P = np.zeros(capacity, dtype=bool)
        self._counted_P = np.zeros(capacity, dtype=bool)
        self._spoilt_P = np.zeros(capacity, dtype=bool)
        self._by_slot_P = np.zeros(capacity, dtype=bool)
        self._latest_end_R = np.full(ranks, -1, dtype=np.int64)
        # Tokens by slot, where ranks count them: a rank's reports are written in one piece, and in 16 bits where those
        # hold them, for the first touch of so much memory is most of what it costs.
        self._slots_RPLS: npt.NDArray[np.integer[Any]] | None = None
        self._leapt = 0
        self._first: int | None = None
        self._end = 0

    @cached_property
    def _heat_PLE(self) -> Int32:
        """Tokens by expert, where they follow from the ranks' own."""
        _, layers, experts, _ = self._shape
        return np.zeros((self.capacity, layers, experts), dtype=np.int32)

    @cached_property
    def _loads_PLR(self) -> Int32:
        """Tokens by rank, where they follow from the ranks' own."""
        ranks, layers, _, _ = self._shape
        return np.zeros((self.capacity, layers, ranks), dtype=np.int32)

    def add(self, rank: int, report: HeatReport) -> npt.NDArray[np.intp]:
        """Fill in what the slots of a rank received.

        Returns the positions of steps that are now complete and carry tokens. A step that this rank has reported
        before, or that has fallen out of the ring, is left as it is. At most ``capacity`` steps at a time.
        """
        assert report.slot_counts_TLS is not None
        rows, taken = self._open(rank, report)
        counts_TLS = report.slot_counts_TLS[taken]
        if self._slots_RPLS is None:
            ranks, layers, _, slots = self._shape
            self._slots_RPLS = np.zeros((ranks, self.capacity, layers, slots), dtype=np.uint16)
        if self._slots_RPLS.dtype == np.uint16 and counts_TLS.max(initial=0) > _MOST_IN_16_BITS:
            self._slots_RPLS = self._slots_RPLS.astype(np.int32)
        self._slots_RPLS[rank, rows] = counts_TLS
        self._note_counted(rows, counts_TLS)
        return self._close(rank, report, rows, taken)

    @property
    def slowest(self) -> tuple[int, int]:
        """The rank that has reported least far, and the step that its latest report ended before; -1 for none yet."""
        rank = int(self._latest_end_R.argmin())
        return rank, int(self._latest_end_R[rank])

    def outrun_by(self, rank: int, report: HeatReport) -> int | None:
        """How far the slowest other rank has reported, where ``report`` would push out steps that it may yet report.

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
        """The first step that is certainly still in the ring once ``report`` has been filled in."""
        end = report.first_step + report.steps
        if end <= self._end - self.capacity:
            # The ring may go back to it.
            return LAST_STEP
        return max(end, self._end) - self.capacity

    def by_slot(self, position: int, cells_LRS: npt.NDArray[np.intp]) -> tuple[Int32, Int32]:
        """Of a whole step: tokens by expert, int32 ``[L, E]``, and by rank, int32 ``[L, R]``.

        ``cells_LRS`` says where in the first, flattened, each slot's tokens go.
        """
        _, layers, experts, _ = self._shape
        assert self._slots_RPLS is not None
        # Layer by layer, as the sums are: ranks' rows are too far apart to be gone through in their own order.
        counts_LRS = np.ascontiguousarray(self._slots_RPLS[:, position].transpose(1, 0, 2), dtype=np.int32)
        # Sums of whole numbers, exact in float64.
        sums_C = np.bincount(cells_LRS.ravel(), counts_LRS.ravel(), minlength=layers * experts)
        loads_LR: Int32 = np.einsum("lrs->lr", counts_LRS)
        return sums_C.astype(np.int32).reshape(layers, experts), loads_LR

    def by_source(self, position: int) -> tuple[Int32, Int32]:
        """The same of a step whose counts follow from the ranks' own tokens."""
        return self._heat_PLE[position].copy(), self._loads_PLR[position]

    def add_sources(
        self, rank: int, report: HeatReport, targets_LED: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.intp]:
        """Fill in what a rank's own tokens chose, which went to ``targets_LED`` in turn; otherwise as ``add``."""
        assert report.source_counts_TLE is not None
        rows, taken = self._open(rank, report)
        counts_TLE = report.source_counts_TLE[taken]
        self._heat_PLE[rows] += counts_TLE
        self._note_counted(rows, counts_TLE)
        ranks, layers, _, _ = self._shape
        cells_C = (targets_LED + ranks * np.arange(layers)[:, None, None]).ravel()
        width = targets_LED.shape[2]
        for position, counts_LE in zip(_numbers(rows), counts_TLE, strict=True):
            dealt_LED = np.stack([dealt_to(counts_LE, entry, width) for entry in range(width)], axis=2)
            # Sums of whole numbers, exact in float64.
            sums_C = np.bincount(cells_C, dealt_LED.ravel(), minlength=layers * ranks)
            self._loads_PLR[position] += sums_C.reshape(layers, ranks).astype(np.int32)
        return self._close(rank, report, rows, taken)

    def _open(self, rank: int, report: HeatReport) -> tuple[_Rows, _Rows]:
        """Positions of the steps that this rank may still fill in, and which of the report's they are."""
        start, steps = report.first_step, report.steps
        end = start + steps
        self._latest_end_R[rank] = end
        if end <= self._end - self.capacity and self._is_contradicted():
            self._go_back()
        if self._first is None or end > self._end:
            self._make_room(start, end)
        steps_T = np.arange(start, end)
        begin = start % self.capacity
        one_piece = begin + steps <= self.capacity
        rows_T: _Rows = slice(begin, begin + steps) if one_piece else steps_T % self.capacity
        open_T = (self.step_P[rows_T] == steps_T) & ~self._seen_PR[rows_T, rank]
        rows: _Rows = rows_T
        taken: _Rows = slice(None)
        if not open_T.all():
            rows, taken = _numbers(rows_T)[open_T], np.flatnonzero(open_T)
        self._agree(rows, report)
        return rows, taken

    def _close(self, rank: int, report: HeatReport, rows: _Rows, taken: _Rows) -> npt.NDArray[np.intp]:
        """The rank's part of these steps is in; positions of those that are whole now and carry tokens."""
        if report.micros_T is not None:
            self.micros_PR[rows, rank] = report.micros_T[taken]
        if report.tokens_T is not None:
            self.tokens_PR[rows, rank] = report.tokens_T[taken]
        self._busy_P[rows] |= ~report.dummy_T[taken]
        self._seen_PR[rows, rank] = True
        self._reported_P[rows] += 1
        done = self._done(rows)
        if not done.any():
            return _NONE
        positions = _numbers(rows)
        self._look_at(positions[done])
        self.completed += int(done.sum())
        self.lost += self._leapt
        self._leapt = 0
        complete: npt.NDArray[np.intp] = positions[done & self._busy_P[rows]]
        return complete

    def _note_counted(self, rows: _Rows, counts_TLX: npt.NDArray[np.integer[Any]]) -> None:
        """Which of these steps carry a token; the first rank's counts usually say so of all of them."""
        blank_T = ~self._counted_P[rows]
        if blank_T.any():
            self._counted_P[_numbers(rows)[blank_T]] = counts_TLX[blank_T].any(axis=(1, 2))

    def _look_at(self, complete: npt.NDArray[np.intp]) -> None:
        """How many of the newest whole steps carried nothing, and why."""
        for position in complete:
            busy, tokens = self._busy_P[position], self._counted_P[position]
            self.dummy_steps = 0 if busy else self.dummy_steps + 1
            self.empty_steps = (
                self.empty_steps + 1 if busy and not tokens else self.empty_steps if not busy else 0
            )

    def _done(self, rows: _Rows) -> npt.NDArray[np.bool_]:
        whole = self._reported_P[rows] == self._shape[0]
        done: npt.NDArray[np.bool_] = whole & ~self._spoilt_P[rows]
        return done

    def _agree(self, rows: _Rows, report: HeatReport) -> None:
        """Steps are spoilt where ranks counted under different placements, or only some of them by slot."""
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

    def _is_contradicted(self) -> bool:
        """Whether no rank is where the ring is."""
        reported = self._latest_end_R[self._latest_end_R >= 0]
        return self._first is not None and bool((reported <= self._end - self.capacity).all())

    def _go_back(self) -> None:
        """Empty the ring; the report at hand begins it again."""
        self.step_P[:] = -1
        self._first, self._leapt = None, 0
        self.restarts += 1

    def _make_room(self, start: int, end: int) -> None:
        """Begin steps up to ``end``, past those that the ring has; as many leave it."""
        if self._first is None:
            self._first = self._end = start
        kept_from = end - self.capacity
        leaving = (
            np.arange(max(self._first, self._end - self.capacity), min(self._end, kept_from)) % self.capacity
        )
        self.lost += int((~self._done(leaving)).sum())
        self._leapt += max(0, kept_from - max(self._end, self._first))
        coming = np.arange(max(self._end, kept_from), end)
        positions = coming % self.capacity
        self.step_P[positions] = coming
        # Counts by slot are written whole by each rank; those by source are added up, where there are any.
        sums = [self.__dict__[name] for name in ("_heat_PLE", "_loads_PLR") if name in self.__dict__]
        flags = (self._seen_PR, self._reported_P, self._busy_P, self._counted_P, self._spoilt_P)
        for rows in (*sums, self.micros_PR, *flags):
            rows[positions] = 0
        self.tokens_PR[positions] = -1
        self._end = end


_NONE: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)


def _numbers(rows: _Rows) -> npt.NDArray[np.intp]:
    """Positions one by one."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
