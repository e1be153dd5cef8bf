"""Puts the ranks' heat reports together, step by step, into the window that decisions look at.

Only a step that every rank has reported, all under the same placement, counts; anything else is lost and counted as
lost, never guessed. Where hosts do not count what slots receive, that follows from what every rank's own tokens chose
and the table that they were routed by. Memory is bounded by the shape, whatever the ranks send.
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
from eplb_core.placement import Float64, Int32, dealt_to, step_par, with_entries
from eplb_core.wire.agent import Shape
from eplb_core.wire.heat import HeatReport

_EPOCHS_KEPT = 4
_CELLS_HELD = 2
"""Indices of all slots, 8 bytes each: those of the newest step, and those that are being made."""
_TABLES_HELD = 3
"""log2phy of all ranks: in the Hellos that wait, in what is served, and of its layers that have switched."""
_SOURCES_HELD = 2
"""Own tokens of all ranks: as they are, and as a decision remembers them."""

_Cells: TypeAlias = npt.NDArray[np.intp]


class StepCounts(NamedTuple):
    """Steps that all ranks have reported, and steps that are lost: since the start, or by one report."""

    received: int
    lost: int


def memory_bytes(shape: Shape, window_steps: int, pending_steps: int) -> int:
    """Bound on a deployment's memory: its assembler, and the tables of what it serves."""
    ranks, layers, slots = shape.ranks, shape.layers, shape.slots
    heat = window_steps * (layers * (4 * shape.experts + 4 * ranks + 16) + 256)
    # Counts by slot, or by expert and by rank; its epochs; and of each rank whether it has reported, tokens and time.
    counts = 4 * layers * max(ranks * slots, shape.experts + ranks)
    pending = pending_steps * (counts + 40 * layers + 128 * ranks)
    placements = (4 * _EPOCHS_KEPT + 8 * _CELLS_HELD) * ranks * layers * slots
    tables = 4 * (_TABLES_HELD + _EPOCHS_KEPT) * ranks * layers * shape.experts * shape.width
    # The comparison of what was sent with what was received is a sum of 8 bytes each.
    sources = (4 * _SOURCES_HELD * ranks + 8) * layers * shape.experts
    return heat + pending + placements + tables + sources


class PlacementHistory:
    """The newest epochs of every layer, bounded: what counts are read under.

    ``by_layer`` has for each layer its slots ``[R, S]`` and tables ``[R, E]`` or ``[R, E, D]`` by epoch, oldest first.
    """

    def __init__(self, by_layer: tuple[dict[int, tuple[Int32, Int32]], ...]) -> None:
        self.by_layer = by_layer
        self._latest: tuple[tuple[int, ...], _Cells] | None = None
        self._latest_unnamed: tuple[tuple[int, ...], npt.NDArray[np.bool_]] | None = None

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32) -> None:
        """Read counts of ``layer`` at ``epoch`` by these slots and tables; replaces what was known of that epoch."""
        self._latest = self._latest_unnamed = None
        epochs = self.by_layer[layer]
        epochs.pop(epoch, None)
        epochs[epoch] = phy2log_RS, log2phy_RE
        while len(epochs) > _EPOCHS_KEPT:
            epochs.pop(next(iter(epochs)))

    def knows(self, layer_epochs: tuple[int, ...]) -> bool:
        """Return whether counts at these epochs can be read."""
        return all(epoch in epochs for epochs, epoch in zip(self.by_layer, layer_epochs, strict=True))

    def cells(self, layer_epochs: tuple[int, ...], experts: int) -> _Cells | None:
        """Index into heat ``[L, E]``, flattened, of each slot, ``[L, R, S]``; ``None`` where an epoch is not known."""
        if not self.knows(layer_epochs):
            return None
        if self._latest is None or self._latest[0] != layer_epochs:
            layers = enumerate(zip(self.by_layer, layer_epochs, strict=True))
            rows = [experts * layer + epochs[epoch][0].astype(np.intp) for layer, (epochs, epoch) in layers]
            self._latest = layer_epochs, np.stack(rows)
        return self._latest[1]

    def slots(self, layer_epochs: tuple[int, ...]) -> list[Int32]:
        """Slots of all ranks, of each layer ``[R, S]``; the epochs must be known."""
        return [epochs[epoch][0] for epochs, epoch in zip(self.by_layer, layer_epochs, strict=True)]

    def unnamed(self, layer_epochs: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Mask of the slots that no rank's table names, ``[R, L, S]``. All epochs must be known."""
        if self._latest_unnamed is None or self._latest_unnamed[0] != layer_epochs:
            unnamed_LRS = np.ones([len(layer_epochs), *self.slots(layer_epochs)[0].shape], dtype=np.bool_)
            for layer, (epochs, epoch) in enumerate(zip(self.by_layer, layer_epochs, strict=True)):
                unnamed_LRS[layer].reshape(-1)[epochs[epoch][1].ravel()] = False
            self._latest_unnamed = layer_epochs, np.ascontiguousarray(unnamed_LRS.swapaxes(0, 1))
        return self._latest_unnamed[1]

    def targets(self, layer_epochs: tuple[int, ...], rank: int) -> Int32:
        """Physical ids that tokens of source ``rank`` go to in turn, ``[L, E, D]``; the epochs must be known."""
        layers = zip(self.by_layer, layer_epochs, strict=True)
        return with_entries(np.stack([epochs[epoch][1][rank] for epochs, epoch in layers]), 2)


class _Step:
    """One step as far as ranks have ``seen`` it; ``spoilt`` where not all counted it alike, under one placement.

    ``counts`` are tokens by slot, ``[R, L, S]``, or where hosts do not count them the sums of own tokens by expert,
    ``[L, E]``, and by the rank that they went to, ``[L, R]``. ``busy_R`` says on which ranks it was no dummy,
    ``prefills`` if some rank prefilled.
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
        counted: tuple[int, int, int],
        counts_LX: npt.NDArray[np.integer[Any]],
        targets_LED: npt.NDArray[np.integer[Any]] | None,
    ) -> None:
        """Fill in one rank's report of it: its phase there, its tokens, -1 for unknown, and microseconds.

        Counts under these ``epochs`` are by slot, ``[L, S]``, or own tokens by expert, ``[L, E]``, which went to the
        ranks ``targets_LED`` in turn.
        """
        self.seen.add(rank)
        phase, self.tokens_R[rank], micros = counted
        self.busy_R[rank] = phase != StepPhase.DUMMY
        self.prefills |= StepPhase(phase).prefills
        if micros > 0:
            self.micros.append(micros)
        # Most often it is the same tuple, and many layers need not be compared.
        other = epochs is not self.epochs and epochs != self.epochs
        if other or len(self.counts) != (1 if targets_LED is None else 2):
            self.spoilt = True
        elif targets_LED is None:
            self.counts[0][rank] = counts_LX
        else:
            self._add_sources(counts_LX, targets_LED)

    def heat_and_loads(self, cells_LRS: _Cells, experts: int) -> tuple[Int32, Int32]:
        """Tokens by expert, int32 ``[L, E]``, and by rank, int32 ``[L, R]``; ``cells_LRS`` as in ``cells``."""
        if len(self.counts) == 2:
            return self.counts[0], self.counts[1]
        counts_LRS = np.ascontiguousarray(self.counts[0].transpose(1, 0, 2))
        layers = len(counts_LRS)
        # Sums of whole numbers, exact in float64.
        sums_C = np.bincount(cells_LRS.ravel(), counts_LRS.ravel(), minlength=layers * experts)
        loads_LR: Int32 = np.einsum("lrs->lr", counts_LRS)
        return sums_C.astype(np.int32).reshape(layers, experts), loads_LR

    def _add_sources(
        self, counts_LE: npt.NDArray[np.integer[Any]], targets_LED: npt.NDArray[np.integer[Any]]
    ) -> None:
        heat_LE, loads_LR = self.counts
        layers, ranks = loads_LR.shape
        width = targets_LED.shape[2]
        if self._by_row:
            # The batch row picks the entry, so a step's tokens may begin at any entry.
            targets_LED = np.roll(targets_LED, self.number, axis=2)
        heat_LE += counts_LE
        cells_C = (targets_LED + ranks * np.arange(layers)[:, None, None]).ravel()
        dealt_LED = np.stack([dealt_to(counts_LE, entry, width) for entry in range(width)], axis=2)
        sums_C = np.bincount(cells_C, dealt_LED.ravel(), minlength=layers * ranks)
        loads_LR += sums_C.reshape(layers, ranks).astype(np.int32)


def _counted_by_step(report: HeatReport) -> list[tuple[int, int, int]]:
    """Return each step's phase in a report, its tokens, -1 for unknown, and microseconds, 0 for unknown."""
    phase_T = report.phase_T.tolist()
    tokens_T = [-1] * report.steps if report.tokens_T is None else report.tokens_T.tolist()
    micros_T = [0] * report.steps if report.micros_T is None else report.micros_T.tolist()
    return list(zip(phase_T, tokens_T, micros_T, strict=True))


class PendingSteps:
    """The newest ``capacity`` steps that ranks have reported; one that leaves before all have is lost.

    The newest step decides which are kept, but no rank's claim is final: where the latest report of *every* rank is of
    steps that have left, what moved it so far ahead was wrong, and all begins again with the report at hand. Ranks
    report in order, so that steps are whole in order: what lies between two of them is lost. Of the newest whole steps
    in a row, ``dummy_steps`` were dummies on all ranks, and ``mislabelled_steps`` of these counted tokens nevertheless.
    In the newest ``empty_steps`` others no token was counted although there were some, or although none has ever been
    counted; the former if ``tokens_uncounted``. Of ranks that see the same tokens the first may count for all, so steps
    in which it had none prove nothing.
    """

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._shape, self._capacity = shape, capacity
        self.completed = self.lost = 0
        self.dummy_steps = self.mislabelled_steps = self.empty_steps = 0
        self.tokens_uncounted = False
        self._steps: dict[int, _Step] = {}
        self._left = -1
        self._last_whole: int | None = None
        self._epochs: tuple[int, ...] = ()
        self._end_R = np.full(shape.ranks, -1, dtype=np.int64)

    def add(
        self, rank: int, report: HeatReport, targets_LED: npt.NDArray[np.integer[Any]] | None
    ) -> list[_Step]:
        """Take what a rank's slots received, or its own tokens chose, which went to the ranks ``targets_LED`` in turn.

        Returns the steps that are whole now and no dummies. A step that this rank has reported before, or that has
        left, is passed over. At most ``capacity`` steps at a time.
        """
        self._end_R[rank] = report.first_step + report.steps
        if self._end_R.max() <= self._left + 1:
            self._steps.clear()
            self._left, self._last_whole = -1, None
        whole = []
        if self._epochs != report.layer_epochs:
            self._epochs = report.layer_epochs
        counts_TLX = report.source_counts_TLE if report.slot_counts_TLS is None else report.slot_counts_TLS
        assert counts_TLX is not None
        counted_T = _counted_by_step(report)
        for number in range(max(report.first_step, self._left + 1), report.first_step + report.steps):
            step = self._steps.get(number) or self._begin(number, by_slot=targets_LED is None)
            if rank not in step.seen:
                at = number - report.first_step
                step.add(rank, self._epochs, counted_T[at], counts_TLX[at], targets_LED)
                if len(step.seen) == self._shape.ranks and not step.spoilt:
                    self._complete(step)
                    whole += [step] if step.busy_R.any() else []
        return whole

    @property
    def slowest(self) -> tuple[int, int]:
        """The rank that has reported least far, and the step that its latest report ended before; -1 for none yet."""
        rank = int(self._end_R.argmin())
        return rank, int(self._end_R[rank])

    def behind(self, steps: int) -> tuple[list[int], int]:
        """Return the ranks whose heat is more than ``steps`` behind the furthest rank's, and how far at most."""
        late_R = int(self._end_R.max()) - self._end_R
        return np.flatnonzero(late_R > steps).tolist(), int(late_R.max())

    def is_ahead(self, rank: int, report: HeatReport) -> bool:
        """Return whether ``report`` would push out steps that a slower rank may still report.

        Only where it goes on where the rank's last one ended, as a backlog does: nobody catches up with a leap, and who
        lies about its steps is not to hold up what it reports next.
        """
        before, end = int(self._end_R[rank]), report.first_step + report.steps
        if before < 0 or not self._steps or report.first_step - before > self._capacity:
            return False
        slowest = int(self._end_R.min())
        if slowest == before:
            slowest = int(np.delete(self._end_R, rank).min(initial=end))
        return end - self._capacity > max(slowest, min(self._steps))

    def _begin(self, number: int, *, by_slot: bool) -> _Step:
        step = self._steps[number] = _Step(number, self._epochs, self._shape, by_slot=by_slot)
        self._left = max(self._left, number - self._capacity)
        for old in [old for old in self._steps if old <= self._left]:
            del self._steps[old]
        return step

    def _complete(self, step: _Step) -> None:
        self.completed += 1
        last = step.number - 1 if self._last_whole is None else self._last_whole
        self.lost += max(0, step.number - last - 1)
        self._last_whole = max(last, step.number)
        if step.busy_R.any():
            self.dummy_steps = self.mislabelled_steps = 0
            return
        self.dummy_steps += 1
        self.mislabelled_steps += int(any(counts.any() for counts in step.counts))


@dataclass(frozen=True)
class RememberedHeat:
    """Heat of the window as it was at one moment: cheap to take, and put together by whoever has the time.

    ``rows`` are the counts of each step, in order, int32 ``[L, E]`` (``shape``); ``sources`` are sums by source rank,
    empty where not all ranks report them. Nothing writes to either.
    """

    rows: tuple[Int32, ...]
    shape: tuple[int, int]
    sources: tuple[RankSums, ...] = ()

    def arrays(self) -> tuple[Int32, Float64 | None]:
        """Return heat by step, int32 ``[T, L, E]``, and per step by source rank, float64 ``[R, L, E]`` or ``None``."""
        heat_TLE = np.stack(self.rows) if self.rows else np.zeros((0, *self.shape), dtype=np.int32)
        rates_RLE = np.empty((len(self.sources), *self.shape))
        for rate_LE, (sums_LE, steps) in zip(rates_RLE, self.sources, strict=True):
            np.divide(sums_LE, steps, out=rate_LE)
        return heat_TLE, rates_RLE if self.sources else None


class HeatAssembler:
    """The sliding window of one deployment, of ``window_steps``.

    ``pending_steps`` is how far the fastest rank may be ahead of the slowest; also the most steps of one report. Ranks
    with the same number in ``token_groups_R`` see the same tokens; by default each has its own.

    ``phase`` chooses the steps that enter the window: ``"prefill"`` those in which some rank prefills, ``"decode"`` the
    others, ``"all"`` both. ``passed_over`` are the newest steps in a row that were of the other phase.

    ``misrouted_steps`` are the steps since the last switch in which slots received tokens although no rank's table
    names them, and ``misrouted`` is the rank, layer and slot of the latest such count.

    ``placements`` is what counts are read under, ``pending`` are the newest steps of the ranks' reports; ``assembled``
    counts the steps that ever entered the window. A step enters it only when ``put_together`` gets to that step: one
    long report can complete many steps at once.
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
        self.passed_over = 0
        self.misrouted_steps = 0
        self.misrouted: tuple[int, int, int] | None = None
        self._misrouted_epochs: tuple[int, ...] = ()
        self._phase: HeatPhase = phase
        self._has_counted = False
        self.placements = PlacementHistory(tuple({} for _ in range(shape.layers)))
        self.pending = PendingSteps(shape, pending_steps)
        self._shape = shape
        self._whole: deque[_Step] = deque()
        self._sources = SourceHeat(shape.ranks, window_steps)
        # Counts are replaced, never written to: they can be read while steps come in.
        self._heat: deque[Int32] = deque(maxlen=window_steps)
        self._loads: deque[Int32] = deque(maxlen=window_steps)
        self._steps_W, self._us_W, self._tokens_W = np.full((3, window_steps), np.nan)
        self._choices_W, self._slowest_W = np.full((2, window_steps), np.nan)
        self._par_WL = np.full((window_steps, shape.layers), np.nan)
        self._epochs_WL = np.zeros((window_steps, shape.layers), dtype=np.int64)
        groups_R = np.arange(shape.ranks) if token_groups_R is None else token_groups_R
        self._counted_G = np.unique(groups_R, return_index=True)[1]

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

    def take(self, rank: int, report: HeatReport) -> StepCounts:
        """Take one rank's report; returns how many steps it completed, and how many were found lost by that.

        A report under an epoch that is not known is left out, so that its steps will count as lost. What still waits
        enters the window first, so that memory stays bounded.
        """
        self.put_together()
        if not self.placements.knows(report.layer_epochs):
            return StepCounts(0, 0)
        before, targets_LED = self.counted, None
        if report.slot_counts_TLS is None:
            targets_LED = self.placements.targets(report.layer_epochs, rank) // self._shape.slots
        for step in self.pending.add(rank, report, targets_LED):
            if self._phase in ("all", "prefill" if step.prefills else "decode"):
                self._whole.append(step)
                self.passed_over = 0
            else:
                self.passed_over += 1
        self._sources.add(rank, report, self._phase)
        return StepCounts(self.pending.completed - before.received, self.pending.lost - before.lost)

    def put_together(self, most: int | None = None) -> None:
        """Let steps that all ranks have reported enter the window: all, or at most so many, the first ones first."""
        for _ in range(len(self._whole) if most is None else min(most, len(self._whole))):
            step = self._whole.popleft()
            cells_LRS = self.placements.cells(step.epochs, self._shape.experts)
            # Unknown by now only where every layer switched again and again meanwhile.
            if cells_LRS is not None:
                self._append(step, *step.heat_and_loads(cells_LRS, self._shape.experts))

    def remembered(self) -> RememberedHeat:
        """Heat of the window by now."""
        shape = self._shape.layers, self._shape.experts
        return RememberedHeat(tuple(self._heat), shape, self._sources.by_rank())

    def step_times(self, layer_epochs: Sequence[int]) -> StepTimes:
        """Times of the steps of ``remembered``, in its order; unknown where a layer was not yet as it is now."""
        rows = self._rows()
        current_T = self._current(rows, layer_epochs).all(axis=1)
        return StepTimes(np.where(current_T, self._us_W[rows], np.nan), self._tokens_W[rows])

    def served_times(self, newest: int) -> StepTimes:
        """Return times of the newest steps as they were served, whatever placement served them."""
        rows = self._rows(newest)
        return StepTimes(self._us_W[rows], self._tokens_W[rows])

    def served_steps(self, newest: int | None = None) -> ServedSteps:
        """Return the window's steps, or the newest of them, as they were served, whatever placement served them."""
        rows = self._rows(newest)
        return ServedSteps(
            self._steps_W[rows], self._us_W[rows], self._choices_W[rows], self._slowest_W[rows]
        )

    def load_sums(self, newest: int) -> tuple[int, Float64]:
        """Tokens that each rank received in the newest steps, as they were served: steps, and sums, ``[L, R]``."""
        sums_LR = np.zeros((self._shape.layers, self._shape.ranks))
        loads = list(self._loads)[-newest:]
        for loads_LR in loads:
            sums_LR += loads_LR
        return len(loads), sums_LR

    def served_par(self, newest: int) -> Float64:
        """Ratios of the newest steps as they were served, float64 ``[T, L]``; NaN without tokens."""
        return self._par_WL[self._rows(newest)]

    def newest_par(self, since: int, layer_epochs: Sequence[int]) -> Float64:
        """Ratios of the steps that entered after the first ``since``, float64 ``[T, L]``, in the order of entering.

        NaN where a layer was not yet as it is now, or had no tokens; steps that have left the window since are missing.
        """
        rows = self._rows(self.assembled - since)
        return np.where(self._current(rows, layer_epochs), self._par_WL[rows], np.nan)

    def newest_heat(self, since: int) -> Int32:
        """Return the heat of the steps that entered after the first ``since``, int32 ``[T, L, E]``, oldest first."""
        newest = min(self.assembled - since, self.steps)
        return np.stack([self._heat[place] for place in range(-newest, 0)])

    def _rows(self, newest: int | None = None) -> _Cells:
        """Positions of the window's steps, or the newest of them, in the order of entering."""
        steps = self.steps if newest is None else min(newest, self.steps)
        return np.arange(self.assembled - steps, self.assembled) % len(self._steps_W)

    def _current(self, rows: _Cells, layer_epochs: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Rows of layers that were as they are now, bool ``[T, L]``."""
        current_TL: npt.NDArray[np.bool_] = self._epochs_WL[rows] == np.asarray(layer_epochs, dtype=np.int64)
        return current_TL

    def _append(self, step: _Step, heat_LE: Int32, loads_LR: Int32) -> None:
        row, tokens_G = self.assembled % len(self._steps_W), step.tokens_R[self._counted_G]
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
        """Count the step if slots that no table names received tokens: the host does not route by its tables."""
        if len(step.counts) == 2:
            return
        if step.epochs != self._misrouted_epochs:
            self._misrouted_epochs = step.epochs
            self.misrouted_steps = 0
        wrong_RLS = self.placements.unnamed(step.epochs) & (step.counts[0] > 0)
        if wrong_RLS.any():
            rank, layer, slot = np.argwhere(wrong_RLS)[0].tolist()
            self.misrouted = rank, layer, slot
            self.misrouted_steps += 1

    def _note_empty(self, step: _Step, tokens_G: npt.NDArray[np.int64], loads_LR: Int32) -> None:
        """Count a step without a counted token, unless the ranks may just have been idle.

        A host that calls the agent in the same way whether it serves or not cannot label its idle steps. Once its
        counters have counted, zeros mean that there was nothing to count, unless a rank reports tokens.
        """
        if loads_LR.any():
            self._has_counted = True
            self.pending.empty_steps = 0
            self.pending.tokens_uncounted = False
            return
        busy_G = step.busy_R[self._counted_G]
        has_tokens = bool((busy_G & (tokens_G > 0)).any())
        may_have = bool((busy_G & (tokens_G < 0)).any()) and not self._has_counted
        self.pending.tokens_uncounted |= has_tokens
        self.pending.empty_steps += int(has_tokens or may_have)
