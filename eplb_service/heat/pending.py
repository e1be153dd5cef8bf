"""Steps that some ranks have reported and others not yet."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32, dealt_to
from eplb_service.wire.heat import HeatReport


class PendingSteps:
    """A ring of the newest steps, each filled rank by rank.

    Parameters
    ----------
    ranks, layers, experts, slots
        R, L, E and S.
    capacity
        P, steps in the ring; a step that falls out of it unfinished is lost.

    ``epochs_PL``, ``micros_PR`` (wall time by rank, 0 where not known), ``tokens_PR`` (own tokens by rank, -1 where not
    known) and ``step_P`` are rows of steps by the positions that ``add`` and ``add_sources`` return, and hold until the
    next call, as does what ``by_slot`` and ``by_source`` give of them. What a rank's slots received is only kept until
    its step is whole: all ranks' counts are put together at once, which is quicker than rank by rank.

    The newest step decides where the ring is, but no rank's claim is final: where the latest report of *every* rank is
    of steps before the ring, whatever moved it so far ahead was wrong, and the ring goes back to where they are. What
    a leap skips counts as lost only once a step after it is complete. ``restarts`` counts how often it went back;
    of the newest whole steps in a row, ``dummy_steps`` were dummies on all ranks, or ``empty_steps`` others counted no
    token.
    """

    def __init__(self, ranks: int, layers: int, experts: int, slots: int, capacity: int) -> None:
        self._shape = (ranks, layers, experts, slots)
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
        self._spoilt_P = np.zeros(capacity, dtype=bool)
        self._by_slot_P = np.zeros(capacity, dtype=bool)
        self._latest_end_R = np.full(ranks, -1, dtype=np.int64)
        self._leapt = 0
        self._first: int | None = None
        self._end = 0

    @property
    def capacity(self) -> int:
        """P."""
        return len(self.step_P)

    @cached_property
    def _slots_PRLS(self) -> Int32:
        """Tokens by slot, where ranks count them."""
        ranks, layers, _, slots = self._shape
        return np.zeros((self.capacity, ranks, layers, slots), dtype=np.int32)

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
        positions, taken = self._open(rank, report)
        self._slots_PRLS[positions, rank] = report.slot_counts_TLS[taken]
        return self._close(rank, report, positions, taken)

    def by_slot(self, position: int, cells_LRS: npt.NDArray[np.intp]) -> tuple[Int32, Int32]:
        """Of a whole step: tokens by expert, int32 ``[L, E]``, and by rank, int32 ``[L, R]``.

        ``cells_LRS`` says where in the first, flattened, each slot's tokens go.
        """
        _, layers, experts, _ = self._shape
        # Layer by layer, as the sums are: ranks' rows are too far apart to be gone through in their own order.
        counts_LRS = np.ascontiguousarray(self._slots_PRLS[position].transpose(1, 0, 2))
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
        positions, taken = self._open(rank, report)
        counts_TLE = report.source_counts_TLE[taken]
        self._heat_PLE[positions] += counts_TLE
        ranks, layers, _, _ = self._shape
        cells_C = (targets_LED + ranks * np.arange(layers)[:, None, None]).ravel()
        width = targets_LED.shape[2]
        for position, counts_LE in zip(positions, counts_TLE, strict=True):
            dealt_LED = np.stack([dealt_to(counts_LE, entry, width) for entry in range(width)], axis=2)
            # Sums of whole numbers, exact in float64.
            sums_C = np.bincount(cells_C, dealt_LED.ravel(), minlength=layers * ranks)
            self._loads_PLR[position] += sums_C.reshape(layers, ranks).astype(np.int32)
        return self._close(rank, report, positions, taken)

    def _open(self, rank: int, report: HeatReport) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Positions of the steps that this rank may still fill in, and which of the report's they are."""
        self._latest_end_R[rank] = report.first_step + report.steps
        if self._latest_end_R[rank] <= self._end - self.capacity and self._is_contradicted():
            self._go_back()
        self._make_room(report.first_step, report.first_step + report.steps)
        steps_T = np.arange(report.first_step, report.first_step + report.steps)
        positions_T = steps_T % self.capacity
        open_T = (self.step_P[positions_T] == steps_T) & ~self._seen_PR[positions_T, rank]
        positions, taken = positions_T[open_T], np.flatnonzero(open_T)
        self._agree(positions, report)
        return positions, taken

    def _close(
        self,
        rank: int,
        report: HeatReport,
        positions: npt.NDArray[np.intp],
        taken: npt.NDArray[np.intp],
    ) -> npt.NDArray[np.intp]:
        """The rank's part of these steps is in; positions of those that are whole now and carry tokens."""
        if report.micros_T is not None:
            self.micros_PR[positions, rank] = report.micros_T[taken]
        if report.tokens_T is not None:
            self.tokens_PR[positions, rank] = report.tokens_T[taken]
        self._busy_P[positions] |= ~report.dummy_T[taken]
        self._seen_PR[positions, rank] = True
        self._reported_P[positions] += 1
        done = self._done(positions)
        if done.any():
            self._look_at(positions[done])
            self.completed += int(done.sum())
            self.lost += self._leapt
            self._leapt = 0
        complete: npt.NDArray[np.intp] = positions[done & self._busy_P[positions]]
        return complete

    def _look_at(self, complete: npt.NDArray[np.intp]) -> None:
        """How many of the newest whole steps carried nothing, and why."""
        for position in complete:
            counts = self._slots_PRLS if self._by_slot_P[position] else self._loads_PLR
            busy, tokens = self._busy_P[position], counts[position].any()
            self.dummy_steps = 0 if busy else self.dummy_steps + 1
            self.empty_steps = (
                self.empty_steps + 1 if busy and not tokens else self.empty_steps if not busy else 0
            )

    def _done(self, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        whole = self._reported_P[positions] == self._shape[0]
        done: npt.NDArray[np.bool_] = whole & ~self._spoilt_P[positions]
        return done

    def _agree(self, positions: npt.NDArray[np.intp], report: HeatReport) -> None:
        """Steps are spoilt where ranks counted under different placements, or only some of them by slot."""
        epochs_L, by_slot = (
            np.asarray(report.layer_epochs, dtype=np.int64),
            report.slot_counts_TLS is not None,
        )
        fresh = self._reported_P[positions] == 0
        self.epochs_PL[positions[fresh]] = epochs_L
        self._by_slot_P[positions[fresh]] = by_slot
        self._spoilt_P[positions] |= (self.epochs_PL[positions] != epochs_L).any(axis=1)
        self._spoilt_P[positions] |= self._by_slot_P[positions] != by_slot

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
        if self._first is None:
            self._first = self._end = start
        if end <= self._end:
            return
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
        flags = (self._seen_PR, self._reported_P, self._busy_P, self._spoilt_P)
        for rows in (*sums, self.micros_PR, *flags):
            rows[positions] = 0
        self.tokens_PR[positions] = -1
        self._end = end
