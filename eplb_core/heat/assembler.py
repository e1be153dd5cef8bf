"""Assembly of the ranks' heat reports, step by step, into the window that decisions use.

A step counts only if every rank has reported it under the same placement. All other steps count as lost; their heat is
never estimated. If hosts do not count the tokens that slots receive, these counts are derived from every rank's
source heat and tables. The memory bound depends on the shape and the configured step limits, but not on the reports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.heat.phase import StepPhase
from eplb_core.heat.sources import HeatPhase, RankSums, ServedSteps, SourceHeat, StepTimes
from eplb_core.placement import Float64, Int32, dealt_to, drawn_by_row, step_par, with_entries
from eplb_core.wire.agent import Shape
from eplb_core.wire.heat import HeatReport

_EPOCHS_KEPT = 4
"""Number of recent epochs per layer whose placement and tables are kept."""
_CELLS_HELD = 2
"""Number of slot index arrays in memory, with 8 bytes per slot: one in use and one under construction."""
_TABLES_HELD = 3
"""Number of table sets (all ranks) in memory: for pending Hellos, the current layout and switched layers."""
_SOURCES_HELD = 2
"""Number of source heat arrays in memory: the live one and a decision's snapshot."""

_Cells: TypeAlias = npt.NDArray[np.intp]
"""Indices into a flattened array."""
_StepValues: TypeAlias = tuple[int, int, int]
"""A rank's phase in a step, its tokens (-1 if unknown) and its time in microseconds (0 if unknown)."""


class StepCounts(NamedTuple):
    """Numbers of completed and lost steps, in total or as a result of one report."""

    received: int
    lost: int


def memory_bytes(shape: Shape, window_steps: int, pending_steps: int) -> int:
    """Return an upper bound on the memory for a deployment's assembler and tables, in bytes.

    Parameters
    ----------
    shape
        Shape of the deployment.
    window_steps
        Number of steps in the window.
    pending_steps
        Maximum number of pending steps.
    """
    ranks = shape.ranks
    layers = shape.layers
    slots = shape.slots
    heat = window_steps * (layers * (4 * shape.experts + 4 * ranks + 16) + 256)
    # A pending step stores either one count per slot, or one per expert plus one per rank. It also stores the epochs
    # and, for each rank, a report flag, the tokens and the time.
    counts = 4 * layers * max(ranks * slots, shape.experts + ranks)
    pending = pending_steps * (counts + 40 * layers + 128 * ranks)
    placements = (4 * _EPOCHS_KEPT + 8 * _CELLS_HELD) * ranks * layers * slots
    tables = 4 * (_TABLES_HELD + _EPOCHS_KEPT) * ranks * layers * shape.experts * shape.width
    # Comparing sent with received tokens requires one more array of 8-byte sums.
    sources = (4 * _SOURCES_HELD * ranks + 8) * layers * shape.experts
    return heat + pending + placements + tables + sources


class PlacementHistory:
    """Recent placements and tables of every layer, keyed by epoch, used to interpret counts.

    Parameters
    ----------
    by_layer
        For each layer, the placement ``[R, S]`` and tables ``[R, E]`` or ``[R, E, D]`` of each epoch, oldest first.
    """

    def __init__(self, by_layer: tuple[dict[int, tuple[Int32, Int32]], ...]) -> None:
        self.by_layer = by_layer
        self._latest: tuple[tuple[int, ...], _Cells] | None = None
        self._latest_unnamed: tuple[tuple[int, ...], npt.NDArray[np.bool_]] | None = None

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32) -> None:
        """Record the placement and tables of a layer at an epoch, and drop the layer's oldest epoch if needed."""
        self._latest = None
        self._latest_unnamed = None
        epochs = self.by_layer[layer]
        epochs.pop(epoch, None)
        epochs[epoch] = phy2log_RS, log2phy_RE
        while len(epochs) > _EPOCHS_KEPT:
            epochs.pop(next(iter(epochs)))

    def knows(self, layer_epochs: tuple[int, ...]) -> bool:
        """Return True if the placements of all these epochs, one per layer, are recorded."""
        return all(epoch in epochs for epochs, epoch in zip(self.by_layer, layer_epochs, strict=True))

    def cells(self, layer_epochs: tuple[int, ...], experts: int) -> _Cells | None:
        """Return each slot's index into the flattened heat, ``[L, R, S]``, or ``None`` if an epoch is unknown."""
        if not self.knows(layer_epochs):
            return None
        if self._latest is None or self._latest[0] != layer_epochs:
            layers = enumerate(zip(self.by_layer, layer_epochs, strict=True))
            rows = [experts * layer + epochs[epoch][0].astype(np.intp) for layer, (epochs, epoch) in layers]
            self._latest = layer_epochs, np.stack(rows)
        return self._latest[1]

    def slots(self, layer_epochs: tuple[int, ...]) -> list[Int32]:
        """Return the placement of each layer, ``[R, S]``. All epochs must be known."""
        return [epochs[epoch][0] for epochs, epoch in zip(self.by_layer, layer_epochs, strict=True)]

    def unnamed(self, layer_epochs: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots that no rank's table contains, ``[R, L, S]``. All epochs must be known."""
        if self._latest_unnamed is None or self._latest_unnamed[0] != layer_epochs:
            unnamed_LRS = np.ones([len(layer_epochs), *self.slots(layer_epochs)[0].shape], dtype=np.bool_)
            for layer, (epochs, epoch) in enumerate(zip(self.by_layer, layer_epochs, strict=True)):
                unnamed_LRS[layer].reshape(-1)[epochs[epoch][1].ravel()] = False
            self._latest_unnamed = layer_epochs, np.ascontiguousarray(unnamed_LRS.swapaxes(0, 1))
        return self._latest_unnamed[1]

    def targets(self, layer_epochs: tuple[int, ...], rank: int) -> Int32:
        """Return the slots that take turns receiving a rank's tokens, ``[L, E, D]``. All epochs must be known."""
        layers = zip(self.by_layer, layer_epochs, strict=True)
        return with_entries(np.stack([epochs[epoch][1][rank] for epochs, epoch in layers]), 2)


class _Step:
    """One step's counts, summed over the reports that have arrived so far.

    Parameters
    ----------
    number
        Step number.
    epochs
        Epoch of each layer, from the first report.
    shape
        Shape of the deployment.
    by_slot
        True if the ranks count tokens by slot; False if they report only source heat.

    Attributes
    ----------
    seen
        Ranks that have reported the step.
    spoilt
        True if the reports differ in their epochs or in how they count tokens.
    busy_R
        bool ``[R]``, True for each rank that did not run the step as a dummy.
    prefills
        True if any rank had requests in prefill.
    micros
        Step times, in microseconds, from the ranks that measured the step.
    tokens_R
        int64 ``[R]``, tokens of each rank; -1 if unknown.
    counts
        Tokens by slot ``[R, L, S]`` if ``by_slot``, or else by expert ``[L, E]`` and by receiving rank ``[L, R]``.
    """

    def __init__(self, number: int, epochs: tuple[int, ...], shape: Shape, *, by_slot: bool) -> None:
        self.number = number
        self.epochs = epochs
        self.seen: set[int] = set()
        self.spoilt = False
        self._by_row = shape.entry_by_row
        self.busy_R = np.zeros(shape.ranks, dtype=np.bool_)
        self.prefills = False
        self.micros: list[int] = []
        self.tokens_R = np.full(shape.ranks, -1, dtype=np.int64)
        sizes: list[tuple[int, ...]] = [(shape.layers, shape.experts), (shape.layers, shape.ranks)]
        if by_slot:
            sizes = [(shape.ranks, shape.layers, shape.slots)]
        self.counts = tuple(np.zeros(size, dtype=np.int32) for size in sizes)

    def add(
        self,
        rank: int,
        epochs: tuple[int, ...],
        values: _StepValues,
        counts_LX: npt.NDArray[np.integer[Any]],
        targets_LED: npt.NDArray[np.integer[Any]] | None,
    ) -> None:
        """Add one rank's report of the step.

        Parameters
        ----------
        rank
            Rank that sent the report.
        epochs
            Epoch of each layer in the report.
        values
            Phase, tokens and time in microseconds.
        counts_LX
            Tokens by slot ``[L, S]`` or, if slots are not counted, the rank's own tokens by expert ``[L, E]``.
        targets_LED
            For each expert, the ranks that took turns receiving this rank's tokens; ``None`` for slot counts.
        """
        self.seen.add(rank)
        phase, self.tokens_R[rank], micros = values
        self.busy_R[rank] = phase != StepPhase.DUMMY
        self.prefills |= StepPhase(phase).prefills
        if micros > 0:
            self.micros.append(micros)
        # Both are usually the same tuple, so the identity check avoids comparing the epochs of many layers.
        differs = epochs is not self.epochs and epochs != self.epochs
        if differs or len(self.counts) != (1 if targets_LED is None else 2):
            self.spoilt = True
        elif targets_LED is None:
            self.counts[0][rank] = counts_LX
        else:
            self._add_sources(rank, counts_LX, targets_LED)

    def heat_and_loads(self, cells_LRS: _Cells, experts: int) -> tuple[Int32, Int32]:
        """Return the tokens by expert, int32 ``[L, E]``, and by rank, int32 ``[L, R]``.

        Parameters
        ----------
        cells_LRS
            Index of each slot, from ``PlacementHistory.cells``.
        experts
            Number of logical experts.
        """
        if len(self.counts) == 2:
            return self.counts[0], self.counts[1]
        counts_LRS = np.ascontiguousarray(self.counts[0].transpose(1, 0, 2))
        layers = len(counts_LRS)
        # ``bincount`` sums in float64, which is exact for these integers.
        sums_C = np.bincount(cells_LRS.ravel(), counts_LRS.ravel(), minlength=layers * experts)
        loads_LR: Int32 = np.einsum("lrs->lr", counts_LRS)
        return sums_C.astype(np.int32).reshape(layers, experts), loads_LR

    def _add_sources(
        self, rank: int, counts_LE: npt.NDArray[np.integer[Any]], targets_LED: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Add a rank's own tokens to the heat and to the loads of the ranks that received them."""
        heat_LE, loads_LR = self.counts
        layers, ranks = loads_LR.shape
        width = targets_LED.shape[2]
        heat_LE += counts_LE
        cells_C = (targets_LED + ranks * np.arange(layers)[:, None, None]).ravel()
        if self._by_row:
            # With the same seed, ranks with similar counts would choose the same replicas.
            dealt_LED = drawn_by_row(counts_LE, targets_LED, (self.number, rank))
        else:
            dealt_LED = np.stack([dealt_to(counts_LE, entry, width) for entry in range(width)], axis=2)
        sums_C = np.bincount(cells_C, dealt_LED.ravel(), minlength=layers * ranks)
        loads_LR += sums_C.reshape(layers, ranks).astype(np.int32)


def _values_by_step(report: HeatReport) -> list[_StepValues]:
    """Return the phase, the tokens and the time in microseconds of each step in a report."""
    phase_T = report.phase_T.tolist()
    tokens_T = [-1] * report.steps if report.tokens_T is None else report.tokens_T.tolist()
    micros_T = [0] * report.steps if report.micros_T is None else report.micros_T.tolist()
    return list(zip(phase_T, tokens_T, micros_T, strict=True))


class PendingSteps:
    """The newest steps, up to ``capacity``, that some ranks have reported and others have not.

    When a newer step is reported, the oldest steps are dropped and count as lost if they are incomplete. A single rank
    with a wrong step number cannot stop the assembly. If the latest report of *every* rank covers only dropped steps, a
    wrong step number must have moved the range too far ahead. All pending steps are then discarded, and assembly
    restarts with the current report.

    Ranks report in step order, so steps are completed in order. Steps skipped between two completed steps are lost.

    Parameters
    ----------
    shape
        Shape of the deployment.
    capacity
        Maximum number of pending steps. It is also the maximum number of steps in a report.

    Attributes
    ----------
    completed
        Number of steps that all ranks have reported.
    lost
        Number of lost steps.
    dummy_steps
        Number of consecutive completed steps, up to the newest one, that were dummies on all ranks.
    mislabelled_steps
        Number of these ``dummy_steps`` that contain tokens, although a dummy step should not.
    empty_steps
        Number of steps, since the last counted token, whose counts were zero although they should not have been. Either
        ranks reported that they had tokens, or busy ranks did not report their tokens and no token has ever been
        counted. Only the first rank of each token group is considered, because it may be the only rank that counts the
        group's tokens.
    tokens_uncounted
        True if ranks reported tokens in any of the steps in ``empty_steps``.
    """

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._shape = shape
        self._capacity = capacity
        self.completed = 0
        self.lost = 0
        self.dummy_steps = 0
        self.mislabelled_steps = 0
        self.empty_steps = 0
        self.tokens_uncounted = False
        self._steps: dict[int, _Step] = {}
        self._last_dropped = -1
        self._last_completed: int | None = None
        self._epochs: tuple[int, ...] = ()
        self._end_R = np.full(shape.ranks, -1, dtype=np.int64)

    def add(
        self, rank: int, report: HeatReport, targets_LED: npt.NDArray[np.integer[Any]] | None
    ) -> list[_Step]:
        """Add one rank's report, ignoring dropped steps and steps that the rank has already reported.

        Parameters
        ----------
        rank
            Rank that sent the report.
        report
            Heat report of at most ``capacity`` steps.
        targets_LED
            For each expert, the ranks that took turns receiving this rank's tokens; ``None`` if the report counts
            tokens by slot.

        Returns
        -------
        list of _Step
            Steps that this report completed, except dummy steps.
        """
        self._end_R[rank] = report.first_step + report.steps
        if self._end_R.max() <= self._last_dropped + 1:
            self._steps.clear()
            self._last_dropped = -1
            self._last_completed = None
        completed = []
        # Reuse one tuple for equal epochs, so that ``_Step.add`` can compare by identity.
        if self._epochs != report.layer_epochs:
            self._epochs = report.layer_epochs
        counts_TLX = report.source_counts_TLE if report.slot_counts_TLS is None else report.slot_counts_TLS
        assert counts_TLX is not None
        values_T = _values_by_step(report)
        end_step = report.first_step + report.steps
        for number in range(max(report.first_step, self._last_dropped + 1), end_step):
            step = self._steps.get(number) or self._begin(number, by_slot=targets_LED is None)
            if rank not in step.seen:
                at = number - report.first_step
                step.add(rank, self._epochs, values_T[at], counts_TLX[at], targets_LED)
                if len(step.seen) == self._shape.ranks and not step.spoilt:
                    self._complete(step)
                    completed += [step] if step.busy_R.any() else []
        return completed

    @property
    def slowest(self) -> tuple[int, int]:
        """Slowest rank, and the end (exclusive) of its latest report; -1 if it has not reported yet."""
        rank = int(self._end_R.argmin())
        return rank, int(self._end_R[rank])

    def behind(self, steps: int) -> tuple[list[int], int]:
        """Return the ranks that are more than ``steps`` steps behind the fastest rank, and the largest lag."""
        late_R = int(self._end_R.max()) - self._end_R
        return np.flatnonzero(late_R > steps).tolist(), int(late_R.max())

    def is_ahead(self, rank: int, report: HeatReport) -> bool:
        """Return True if a report would evict pending steps that a slower rank may still report.

        The result is True only if the report continues the rank's previous one, as in a backlog. After a jump ahead,
        slower ranks cannot catch up, and a rank with a wrong step number must not block its own later reports.
        """
        before = int(self._end_R[rank])
        end = report.first_step + report.steps
        if before < 0 or not self._steps or report.first_step - before > self._capacity:
            return False
        slowest = int(self._end_R.min())
        if slowest == before:
            slowest = int(np.delete(self._end_R, rank).min(initial=end))
        return end - self._capacity > max(slowest, min(self._steps))

    def _begin(self, number: int, *, by_slot: bool) -> _Step:
        """Add a pending step and drop the oldest steps beyond the capacity."""
        step = _Step(number, self._epochs, self._shape, by_slot=by_slot)
        self._steps[number] = step
        self._last_dropped = max(self._last_dropped, number - self._capacity)
        for dropped in [dropped for dropped in self._steps if dropped <= self._last_dropped]:
            del self._steps[dropped]
        return step

    def _complete(self, step: _Step) -> None:
        """Count a step that all ranks have reported, and the lost steps before it."""
        self.completed += 1
        last = step.number - 1 if self._last_completed is None else self._last_completed
        self.lost += max(0, step.number - last - 1)
        self._last_completed = max(last, step.number)
        if step.busy_R.any():
            self.dummy_steps = 0
            self.mislabelled_steps = 0
            return
        self.dummy_steps += 1
        self.mislabelled_steps += int(any(counts.any() for counts in step.counts))


@dataclass(frozen=True)
class HeatSnapshot:
    """Snapshot of the window's heat. It is cheap to create; ``arrays`` does the work and can run on a different thread.

    Parameters
    ----------
    rows
        Heat of each step in order, int32 ``[L, E]``; never modified.
    shape
        L and E, the numbers of layers and experts.
    sources
        Source heat of each rank; empty if not all ranks report it. Never modified.
    """

    rows: tuple[Int32, ...]
    shape: tuple[int, int]
    sources: tuple[RankSums, ...] = ()

    def arrays(self) -> tuple[Int32, Float64 | None]:
        """Return the heat, int32 ``[T, L, E]``, and the source heat per step, float64 ``[R, L, E]``.

        The source heat is ``None`` if not all ranks report it.
        """
        heat_TLE = np.stack(self.rows) if self.rows else np.zeros((0, *self.shape), dtype=np.int32)
        rates_RLE = np.empty((len(self.sources), *self.shape))
        for rate_LE, (sums_LE, steps) in zip(rates_RLE, self.sources, strict=True):
            np.divide(sums_LE, steps, out=rate_LE)
        return heat_TLE, rates_RLE if self.sources else None


class HeatAssembler:
    """Sliding window of one deployment's heat.

    A step enters the window when ``assemble_steps`` processes it. A long report can complete many steps at once, so
    they can be processed in batches.

    Parameters
    ----------
    shape
        Shape of the deployment.
    window_steps
        Number of steps in the window.
    pending_steps
        Maximum lead of the fastest rank over the slowest, in steps. It is also the maximum number of
        steps in a report.
    token_groups_R
        int32 ``[R]``, token group of each rank. Ranks of a group see the same tokens. By default, each rank is its own
        group.
    phase
        Steps that enter the window: ``"prefill"`` for steps in which at least one rank prefills, ``"decode"`` for steps
        in which no rank does, or ``"all"``.

    Attributes
    ----------
    assembled
        Number of steps that have ever entered the window.
    other_phase_steps
        Number of consecutive steps, up to the newest one, that were skipped because they were not in ``phase``.
    misrouted_steps
        Number of steps since the last switch in which a slot received tokens although no rank's table contains it.
    misrouted
        Rank, layer and index of one of these slots in the latest misrouted step; ``None`` if there was no such step.
    placements
        Placements and tables, keyed by epoch.
    pending
        Steps that not all ranks have reported.
    """

    def __init__(
        self,
        shape: Shape,
        window_steps: int,
        pending_steps: int,
        token_groups_R: Int32 | None = None,
        phase: HeatPhase = "all",
    ) -> None:
        self.assembled = 0
        self.other_phase_steps = 0
        self.misrouted_steps = 0
        self.misrouted: tuple[int, int, int] | None = None
        self._misrouted_epochs: tuple[int, ...] = ()
        self._phase: HeatPhase = phase
        self._has_counted = False
        self.placements = PlacementHistory(tuple({} for _ in range(shape.layers)))
        self.pending = PendingSteps(shape, pending_steps)
        self._shape = shape
        self._completed: deque[_Step] = deque()
        self._sources = SourceHeat(shape.ranks, window_steps)
        # The arrays in these queues are replaced and never modified, so snapshots may share them.
        self._heat: deque[Int32] = deque(maxlen=window_steps)
        self._loads: deque[Int32] = deque(maxlen=window_steps)
        self._steps_W, self._us_W, self._tokens_W = np.full((3, window_steps), np.nan)
        self._choices_W, self._slowest_W = np.full((2, window_steps), np.nan)
        self._par_WL = np.full((window_steps, shape.layers), np.nan)
        self._epochs_WL = np.zeros((window_steps, shape.layers), dtype=np.int64)
        groups_R = np.arange(shape.ranks) if token_groups_R is None else token_groups_R
        self._first_of_group_G = np.unique(groups_R, return_index=True)[1]

    @property
    def counted(self) -> StepCounts:
        """Numbers of completed and lost steps so far. Lost steps were reported late or under different placements."""
        return StepCounts(self.pending.completed, self.pending.lost)

    @property
    def steps(self) -> int:
        """Number of steps in the window."""
        return min(self.assembled, len(self._steps_W))

    @property
    def waiting(self) -> int:
        """Number of completed steps that have not entered the window yet."""
        return len(self._completed)

    def take(self, rank: int, report: HeatReport) -> StepCounts:
        """Add one rank's report and return the number of steps that it completed and the number lost before them.

        A report with an unknown epoch is ignored, so its steps will count as lost. Steps that were already complete
        enter the window first, which bounds the memory.
        """
        self.assemble_steps()
        if not self.placements.knows(report.layer_epochs):
            return StepCounts(0, 0)
        before = self.counted
        targets_LED = None
        if report.slot_counts_TLS is None:
            targets_LED = self.placements.targets(report.layer_epochs, rank) // self._shape.slots
        for step in self.pending.add(rank, report, targets_LED):
            if self._phase in ("all", "prefill" if step.prefills else "decode"):
                self._completed.append(step)
                self.other_phase_steps = 0
            else:
                self.other_phase_steps += 1
        self._sources.add(rank, report, self._phase)
        return StepCounts(self.pending.completed - before.received, self.pending.lost - before.lost)

    def assemble_steps(self, most: int | None = None) -> None:
        """Move completed steps into the window, oldest first; ``most`` is the maximum number of steps to move."""
        for _ in range(len(self._completed) if most is None else min(most, len(self._completed))):
            step = self._completed.popleft()
            cells_LRS = self.placements.cells(step.epochs, self._shape.experts)
            # An epoch is unknown only if a layer has switched several times since the step was reported.
            if cells_LRS is not None:
                self._append(step, *step.heat_and_loads(cells_LRS, self._shape.experts))

    def remembered(self) -> HeatSnapshot:
        """Return a snapshot of the window's heat."""
        shape = self._shape.layers, self._shape.experts
        return HeatSnapshot(tuple(self._heat), shape, self._sources.by_rank())

    def step_times(self, layer_epochs: Sequence[int]) -> StepTimes:
        """Return the times of the window's steps; NaN for steps before the latest switch.

        ``layer_epochs`` is the current epoch of each layer.
        """
        rows = self._rows()
        current_T = self._current(rows, layer_epochs).all(axis=1)
        return StepTimes(np.where(current_T, self._us_W[rows], np.nan), self._tokens_W[rows])

    def served_times(self, newest: int) -> StepTimes:
        """Return the times of the ``newest`` steps, regardless of their placement."""
        rows = self._rows(newest)
        return StepTimes(self._us_W[rows], self._tokens_W[rows])

    def served_steps(self, newest: int | None = None) -> ServedSteps:
        """Return the measurements of the window's steps, or of the ``newest`` ones, regardless of their placement."""
        rows = self._rows(newest)
        return ServedSteps(
            self._steps_W[rows], self._us_W[rows], self._choices_W[rows], self._slowest_W[rows]
        )

    def load_sums(self, newest: int) -> tuple[int, Float64]:
        """Return the number of steps summed and each rank's tokens over the ``newest`` steps, float64 ``[L, R]``."""
        sums_LR = np.zeros((self._shape.layers, self._shape.ranks))
        loads = list(self._loads)[-newest:]
        for loads_LR in loads:
            sums_LR += loads_LR
        return len(loads), sums_LR

    def served_par(self, newest: int) -> Float64:
        """Return the PAR of the ``newest`` steps under their own placements, float64 ``[T, L]``.

        It is NaN for layers without tokens.
        """
        return self._par_WL[self._rows(newest)]

    def newest_par(self, since: int, layer_epochs: Sequence[int]) -> Float64:
        """Return the PAR of the steps assembled after the first ``since`` ones, float64 ``[T, L]``, oldest first.

        It is NaN for layers without tokens and for layers whose epoch differed from ``layer_epochs``, the current
        epochs. Steps that have already left the window are omitted.
        """
        rows = self._rows(self.assembled - since)
        return np.where(self._current(rows, layer_epochs), self._par_WL[rows], np.nan)

    def newest_heat(self, since: int) -> Int32:
        """Return the heat of the steps assembled after the first ``since`` ones, int32 ``[T, L, E]``, oldest first."""
        newest = min(self.assembled - since, self.steps)
        return np.stack([self._heat[index] for index in range(-newest, 0)])

    def _rows(self, newest: int | None = None) -> _Cells:
        """Return the ring buffer positions of the window's steps, or of the ``newest`` steps, oldest first."""
        steps = self.steps if newest is None else min(newest, self.steps)
        return np.arange(self.assembled - steps, self.assembled) % len(self._steps_W)

    def _current(self, rows: _Cells, layer_epochs: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of the steps and layers with the given epochs, bool ``[T, L]``."""
        current_TL: npt.NDArray[np.bool_] = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return current_TL

    def _append(self, step: _Step, heat_LE: Int32, loads_LR: Int32) -> None:
        """Append a step to the window."""
        row = self.assembled % len(self._steps_W)
        tokens_G = step.tokens_R[self._first_of_group_G]
        self._heat.append(heat_LE)
        self._loads.append(loads_LR)
        self._steps_W[row] = step.number
        self._us_W[row] = np.median(step.micros) if step.micros else math.nan
        self._tokens_W[row] = tokens_G.sum() if (tokens_G >= 0).all() else math.nan
        self._choices_W[row] = loads_LR.sum(dtype=np.int64)
        self._slowest_W[row] = loads_LR.max(axis=1).sum(dtype=np.int64)
        self._par_WL[row] = step_par(loads_LR)
        self._epochs_WL[row] = step.epochs
        self._note_empty(step, tokens_G, loads_LR)
        self._note_misrouted(step)
        self.assembled += 1

    def _note_misrouted(self, step: _Step) -> None:
        """Count the step as misrouted if tokens arrived at slots that no table contains.

        Such tokens mean that the host ignores its tables.
        """
        if len(step.counts) == 2:
            return
        if step.epochs != self._misrouted_epochs:
            self._misrouted_epochs = step.epochs
            self.misrouted_steps = 0
        misrouted_RLS = self.placements.unnamed(step.epochs) & (step.counts[0] > 0)
        if misrouted_RLS.any():
            rank, layer, slot = np.argwhere(misrouted_RLS)[0].tolist()
            self.misrouted = rank, layer, slot
            self.misrouted_steps += 1

    def _note_empty(self, step: _Step, tokens_G: npt.NDArray[np.int64], loads_LR: Int32) -> None:
        """Count the step as empty if no token was counted even though the ranks do not seem to have been idle.

        Some hosts call the agent in the same way whether they are idle or busy, so their idle steps are not marked as
        dummies. Once any token has been counted, zero counts mean that there were no tokens, unless a rank reports
        tokens.
        """
        if loads_LR.any():
            self._has_counted = True
            self.pending.empty_steps = 0
            self.pending.tokens_uncounted = False
            return
        busy_G = step.busy_R[self._first_of_group_G]
        has_tokens = bool((busy_G & (tokens_G > 0)).any())
        may_have_tokens = bool((busy_G & (tokens_G < 0)).any()) and not self._has_counted
        self.pending.tokens_uncounted |= has_tokens
        self.pending.empty_steps += int(has_tokens or may_have_tokens)
