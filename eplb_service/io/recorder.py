"""Records a deployment's heat while it is served: the ranks' reports, step by step, into a native trace."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError
from eplb_service.io.native import BATCH_STEPS, TraceWriter
from eplb_service.io.trace import PHASES, TraceFacts
from eplb_service.placement import Int32, dealt_to, with_entries
from eplb_service.wire.heat import HeatReport, StepPhase

MOST_SOURCE_COUNTS = 1 << 21
"""Most ranks x layers x experts for which tokens by source rank are recorded: beyond, a step takes 8 MB and more."""

_BATCHES_WAITING = 8
"""Batches that may wait for the disk; what comes beyond is lost and counted."""
_BATCH_COUNTS = 1 << 24
"""Counts in a batch; with them its steps become fewer than ``BATCH_STEPS`` where steps are large."""
_EPOCHS_KEPT = 16
"""Tables of a layer that are kept; what waits for the disk was counted under far fewer."""
_PHASE_OF = {
    StepPhase.PREFILL: PHASES.index("prefill"),
    StepPhase.DECODE: PHASES.index("decode"),
}
_UNKNOWN_TOKENS = -1

_Epochs: TypeAlias = tuple[int, ...]
_Tables: TypeAlias = tuple[Int32, ...]
"""The tables of all source ranks, int32 ``[R, E]`` or ``[R, E, D]``, layer by layer."""


class _Step:
    """One step as each rank reported it; the arrays are those of the reports, not copies.

    ``layer_epochs`` is what the first rank counted under and ``by_slot`` whether it counted what its slots received,
    ``spoilt`` whether another rank said otherwise, ``busy`` whether any rank had tokens.
    """

    def __init__(self, number: int, first: HeatReport) -> None:
        self.number = number
        self.layer_epochs = first.layer_epochs
        self.by_slot = first.slot_counts_TLS is not None
        self.spoilt = self.busy = False
        self.reports: dict[int, HeatReport] = {}

    def add(self, rank: int, report: HeatReport) -> None:
        """Take the step of a rank's report."""
        self.reports[rank] = report
        self.spoilt |= report.layer_epochs != self.layer_epochs
        self.spoilt |= (report.slot_counts_TLS is not None) != self.by_slot
        self.busy |= int(report.phase_T[self.number - report.first_step]) != StepPhase.DUMMY

    def by_rank(self, name: str) -> list[npt.NDArray[np.integer]] | None:
        """Rows of the ranks' arrays of that name, in order of rank; ``None`` where one has none."""
        arrays = [(getattr(self.reports[rank], name), self.reports[rank]) for rank in sorted(self.reports)]
        if any(array is None for array, _ in arrays):
            return None
        return [array[self.number - report.first_step] for array, report in arrays]

    @property
    def tokens(self) -> int:
        """Tokens of all ranks, -1 where one did not report them."""
        known = self.by_rank("tokens_T")
        return _UNKNOWN_TOKENS if known is None else int(sum(known))

    @property
    def phase(self) -> int:
        """Index into ``PHASES``, of the ranks that had tokens."""
        found = set(map(int, self.by_rank("phase_T") or ())) - {int(StepPhase.DUMMY)}
        return _PHASE_OF[StepPhase(found.pop())] if len(found) == 1 else PHASES.index("mixed")


class Recorder:
    """Writes one trace on a thread of its own; never waits for the disk.

    Parameters
    ----------
    path
        Folder to make, or to go on with where it holds a trace of the same deployment.
    facts
        Facts of the deployment; ``ranks`` and ``slots`` must be set. The recorder names the phases itself.
    layers, experts
        L and E.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest.
    most_steps
        Steps to record; ``None`` for no bound.

    Tokens by source rank are recorded where all ranks report them, up to ``MOST_SOURCE_COUNTS``. Where ranks do not
    count what their slots received, that is derived from the tokens of all sources and the tables that those were sent
    by. ``lost`` counts steps that were not recorded: not reported by all ranks, reported under different placements or
    one that is not known, or too many for the disk. ``error`` is what ended the recording, or ``None``. Raises
    ``OutputError`` where nothing can be written, ``HeatError`` where something else is there.
    """

    def __init__(
        self,
        path: Path,
        facts: TraceFacts,
        layers: int,
        experts: int,
        pending_steps: int,
        most_steps: int | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._lost = self._lost_late = self._handed_over = 0
        self._facts = replace(facts, phases=PHASES)
        source_counts = facts.ranks * layers * experts
        sources = None if source_counts <= MOST_SOURCE_COUNTS else False
        self._writer = TraceWriter(path, self._facts, layers, experts, by_slot=True, sources=sources)
        counts = layers * facts.ranks * facts.slots + (source_counts if sources is None else 0)
        self._batch_steps = max(1, min(BATCH_STEPS, _BATCH_COUNTS // counts))
        self._pending_steps = pending_steps
        self._room = most_steps
        self._pending: dict[int, _Step] = {}
        self._newest_gone = -1
        self._first_whole: int | None = None
        self._complete: list[_Step] = []
        self._placements = {key: row.tobytes() for key, row in self._writer.placements().items()}
        self._tables_L: list[dict[int, Int32]] = [{} for _ in range(layers)]
        self._has_tables = True
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-recorder")
        self._waiting: list[Future[None]] = []

    @property
    def lost(self) -> int:
        """Steps that were not recorded."""
        return self._lost + self._lost_late

    @property
    def steps(self) -> int:
        """Steps recorded, those that wait to be written included."""
        return self._handed_over - self._lost_late + len(self._complete)

    @property
    def full(self) -> bool:
        """True once all steps asked for have been recorded."""
        return self._room is not None and self.steps >= self._room

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32 | None) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``; known ones are not written again.

        ``log2phy_RE`` is where each source rank's tokens go, ``None`` where that is not known.
        """
        self._has_tables = log2phy_RE is not None
        if log2phy_RE is not None:
            epochs = self._tables_L[layer]
            epochs.pop(epoch, None)
            epochs[epoch] = np.array(log2phy_RE, dtype=np.int32)
            while len(epochs) > _EPOCHS_KEPT:
                epochs.pop(next(iter(epochs)))
        data = np.ascontiguousarray(phy2log_RS, dtype=np.int32)
        if self._placements.get((layer, epoch)) != data.tobytes():
            self._placements[layer, epoch] = data.tobytes()
            self._write(self._writer.place, layer, epoch, data.copy())

    def contradicts(self, layer: int, epoch: int, phy2log_RS: Int32) -> bool:
        """Return whether another placement of ``layer`` is already recorded under ``epoch``."""
        known = self._placements.get((layer, epoch))
        return known is not None and known != np.ascontiguousarray(phy2log_RS, dtype=np.int32).tobytes()

    def begin_again(self) -> None:
        """Take note that the ranks have come together again: they may count steps from the beginning again."""
        self._hand_over()
        self._lost += len(self._pending)
        self._pending.clear()
        self._newest_gone, self._first_whole = -1, None

    def add(self, rank: int, report: HeatReport) -> None:
        """Take one rank's report, whose arrays must not change any more."""
        if report.slot_counts_TLS is None and not self._has_tables:
            self.error = self.error or HeatError(
                f"rank {rank} does not count tokens by slot, and the tables that they would follow from are too large "
                "to be sent, so that such a deployment cannot be recorded"
            )
            return
        end = report.first_step + report.steps
        for number in range(max(report.first_step, self._newest_gone + 1), end):
            step = self._pending.setdefault(number, _Step(number, report))
            step.add(rank, report)
            if len(step.reports) == self._facts.ranks:
                self._finish(self._pending.pop(number))
        self._newest_gone = max(self._newest_gone, end - 1 - self._pending_steps)
        for number in [number for number in self._pending if number <= self._newest_gone]:
            del self._pending[number]
            # Where a recording begins in the midst of the ranks' reports, the first of them are none of its steps.
            self._lost += self._first_whole is not None and number > self._first_whole
        if len(self._complete) >= self._batch_steps:
            self._hand_over(before=min(self._pending, default=self._complete[-1].number + 1))

    def close(self) -> None:
        """Write what waits; whatever was not reported by all ranks is lost."""
        self._hand_over()
        self._thread.shutdown(wait=True)

    def _finish(self, step: _Step) -> None:
        if self._first_whole is None:
            self._first_whole = step.number
        if step.spoilt:
            self._lost += 1
        elif step.busy and not self.full:
            bisect.insort(self._complete, step, key=lambda other: other.number)

    def _hand_over(self, before: int | None = None) -> None:
        """Give what is complete to the disk, up to the step ``before``: those from it on may still come in between.

        Steps that were counted under a placement that is not yet known wait for it; at the end they are lost.
        """
        tables = {
            epochs: self._tables_at(epochs) for epochs in {step.layer_epochs for step in self._complete}
        }
        placed = {epochs for epochs in tables if all(key in self._placements for key in enumerate(epochs))}
        ready = list(
            takewhile(
                lambda step: (
                    (before is None or step.number < before)
                    and step.layer_epochs in placed
                    and (step.by_slot or tables[step.layer_epochs] is not None)
                ),
                self._complete,
            )
        )
        self._complete = self._complete[len(ready) :]
        if before is None or len(self._complete) > _BATCHES_WAITING * self._batch_steps:
            self._lost += len(self._complete)
            self._complete = []
        self._waiting = [write for write in self._waiting if not write.done()]
        if not ready:
            return
        if len(self._waiting) >= _BATCHES_WAITING or self.error is not None:
            self._lost += len(ready)
            return
        self._handed_over += len(ready)
        self._write(self._append, ready, tables)

    def _tables_at(self, layer_epochs: _Epochs) -> _Tables | None:
        """Tables of all layers, not copied; ``None`` where those of one of the epochs are not known."""
        layers = list(zip(self._tables_L, layer_epochs, strict=True))
        if not all(epoch in epochs for epochs, epoch in layers):
            return None
        return tuple(epochs[epoch] for epochs, epoch in layers)

    def _append(self, steps: list[_Step], tables: dict[_Epochs, _Tables | None]) -> None:
        """Put the ranks' counts together and write them; on the thread."""
        sources = [step.by_rank("source_counts_TLE") for step in steps]
        wanted = self._writer.sources
        if wanted is None:
            wanted = any(rows is not None for rows in sources)
        whole = [
            (step, rows) for step, rows in zip(steps, sources, strict=True) if rows is not None or not wanted
        ]
        self._lost_late += len(steps) - len(whole)
        if not whole:
            return
        steps = [step for step, _ in whole]
        self._writer.append(
            np.stack([self._slot_counts(step, tables[step.layer_epochs]) for step in steps]),
            np.array([step.layer_epochs for step in steps], dtype=np.int64),
            step_T=[step.number for step in steps],
            tokens_T=[step.tokens for step in steps],
            phase_T=[step.phase for step in steps],
            source_TRLE=np.array([rows for _, rows in whole], dtype=np.uint32) if wanted else None,
        )
        self._writer.flush()

    def _slot_counts(self, step: _Step, tables: _Tables | None) -> npt.NDArray[np.uint32]:
        """Tokens by slot, uint32 ``[L, R*S]``; where ranks do not count them, by what their own tokens were sent by."""
        if step.by_slot:
            counts_LRS = np.stack(step.by_rank("slot_counts_TLS") or (), axis=1).astype(np.uint32)
            return counts_LRS.reshape(len(counts_LRS), -1)
        assert tables is not None
        source_RLE, slots = np.array(step.by_rank("source_counts_TLE")), self._facts.ranks * self._facts.slots
        counts_LP = np.zeros((len(tables), slots), dtype=np.uint32)
        for layer, table in enumerate(tables):
            log2phy_RED = with_entries(table, 2)
            width = log2phy_RED.shape[2]
            for entry in range(width):
                dealt_RE = dealt_to(source_RLE[:, layer], entry, width)
                # Sums of whole numbers, exact in float64.
                sums_P = np.bincount(log2phy_RED[:, :, entry].ravel(), dealt_RE.ravel(), minlength=slots)
                counts_LP[layer] += sums_P.astype(np.uint32)
        return counts_LP

    def _write(self, call: Callable[..., None], *arguments: object) -> None:
        self._waiting.append(self._thread.submit(self._guarded, call, *arguments))

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Write, on the thread; once a write has failed no other is tried, so that the trace has no holes."""
        if self.error is not None:
            return
        try:
            call(*arguments)
        except Exception as error:
            self.error = error
