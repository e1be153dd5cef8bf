"""Records a deployment's heat while it is served: the ranks' reports, step by step, into a native trace."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError
from eplb_service.io.native.writer import BATCH_STEPS, TraceWriter
from eplb_service.io.routing_tables import LayerTables, RoutingTables, slots_of_sources
from eplb_service.io.step_record import StepRecord
from eplb_service.io.trace import PHASES, TraceFacts
from eplb_service.placement import Int32
from eplb_service.wire.heat import HeatReport

MOST_SOURCE_COUNTS = 1 << 21
"""Most ranks x layers x experts for which tokens by source rank are recorded: beyond, a step takes 8 MB and more."""

_BATCHES_WAITING = 8
"""Batches that may wait for the disk; what comes beyond is lost and counted."""
_BATCH_COUNTS = 1 << 24
"""Counts in a batch; with them its steps become fewer than ``BATCH_STEPS`` where steps are large."""


class Recorder:
    """Writes one trace on a thread of its own; never waits for the disk.

    Parameters
    ----------
    path
        Folder to make, or to go on with where it holds a trace of the same deployment.
    facts
        Of the deployment; ``ranks`` and ``slots`` must be set. The recorder names the phases itself.
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
        self._lost = 0
        self._lost_late = 0
        self._facts = replace(facts, phases=PHASES)
        source_counts = facts.ranks * layers * experts
        sources = None if source_counts <= MOST_SOURCE_COUNTS else False
        self._writer = TraceWriter(path, self._facts, layers, experts, by_slot=True, sources=sources)
        counts = layers * facts.ranks * facts.slots + (source_counts if sources is None else 0)
        self._batch_steps = max(1, min(BATCH_STEPS, _BATCH_COUNTS // counts))
        self._pending_steps = pending_steps
        self._room = most_steps
        self._pending: dict[int, StepRecord] = {}
        self._newest_gone = -1
        self._first_whole: int | None = None
        self._complete: list[tuple[int, StepRecord]] = []
        self._placements = {key: row.tobytes() for key, row in self._writer.placements().items()}
        self._tables = RoutingTables(layers)
        self._has_tables = True
        self._known: set[tuple[int, ...]] = set()
        self._handed_over = 0
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
        """Whether all steps asked for have been recorded."""
        return self._room is not None and self.steps >= self._room

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32 | None) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``; known ones are not written again.

        ``log2phy_RE`` is where each source rank's tokens go, ``None`` where that is not known.
        """
        self._has_tables = log2phy_RE is not None
        if log2phy_RE is not None:
            self._tables.place(layer, epoch, log2phy_RE)
        data = np.ascontiguousarray(phy2log_RS, dtype=np.int32)
        if self._placements.get((layer, epoch)) != data.tobytes():
            self._placements[layer, epoch] = data.tobytes()
            self._write(self._writer.place, layer, epoch, data.copy())

    def contradicts(self, layer: int, epoch: int, phy2log_RS: Int32) -> bool:
        """Whether another placement of ``layer`` is already recorded under ``epoch``."""
        known = self._placements.get((layer, epoch))
        return known is not None and known != np.ascontiguousarray(phy2log_RS, dtype=np.int32).tobytes()

    def begin_again(self) -> None:
        """The ranks have come together again: they may count steps from the beginning again."""
        self._hand_over()
        self._lost += len(self._pending)
        self._pending.clear()
        self._newest_gone, self._first_whole = -1, None

    def add(self, rank: int, batch: HeatReport) -> None:
        """Take one rank's report, whose arrays must not change any more."""
        if batch.slot_counts_TLS is None and not self._has_tables:
            self.error = self.error or HeatError(
                f"rank {rank} does not count tokens by slot, and the tables that they would follow from are not known: "
                "the service is of an older release, or they are too large to be sent; record with eplb serve --record"
            )
            return
        for offset in range(batch.steps):
            number = batch.first_step + offset
            if number <= self._newest_gone:
                continue
            step = self._pending.get(number)
            if step is None:
                step = self._pending[number] = StepRecord(
                    batch.layer_epochs, batch.slot_counts_TLS is not None, self._facts.ranks
                )
            step.add(rank, batch, offset)
            if step.whole:
                self._finish(number)
        self._newest_gone = max(self._newest_gone, batch.first_step + batch.steps - 1 - self._pending_steps)
        for number in [number for number in self._pending if number <= self._newest_gone]:
            del self._pending[number]
            # Where a recording begins in the midst of the ranks' reports, the first of them are none of its steps.
            self._lost += self._first_whole is not None and number > self._first_whole
        if len(self._complete) >= self._batch_steps:
            self._hand_over(before=min(self._pending, default=self._complete[-1][0] + 1))

    def close(self) -> None:
        """Write what waits; whatever was not reported by all ranks is lost."""
        self._hand_over()
        self._thread.shutdown(wait=True)

    def _finish(self, number: int) -> None:
        step = self._pending.pop(number)
        if self._first_whole is None:
            self._first_whole = number
        if step.spoilt:
            self._lost += 1
        elif step.busy and not self.full:
            bisect.insort(self._complete, (number, step), key=lambda entry: entry[0])

    def _hand_over(self, before: int | None = None) -> None:
        """Give what is complete to the disk, up to the step ``before``: those from it on may still come in between.

        Steps that were counted under a placement that is not yet known wait for it; at the end they are lost.
        """
        ready: list[tuple[int, StepRecord]] = []
        kept: list[tuple[int, StepRecord]] = []
        tables: dict[tuple[int, ...], LayerTables | None] = {}
        for number, step in self._complete:
            in_time = before is None or number < before
            if step.layer_epochs not in tables:
                tables[step.layer_epochs] = self._tables.at(step.layer_epochs)
            is_known = self._is_known(step.layer_epochs) and (
                step.by_slot or tables[step.layer_epochs] is not None
            )
            (ready if in_time and not kept and is_known else kept).append((number, step))
        if before is None or len(kept) > _BATCHES_WAITING * self._batch_steps:
            self._lost += len(kept)
            kept = []
        self._complete = kept
        self._waiting = [write for write in self._waiting if not write.done()]
        if not ready:
            return
        if len(self._waiting) >= _BATCHES_WAITING or self.error is not None:
            self._lost += len(ready)
            return
        self._handed_over += len(ready)
        self._write(self._append, ready, tables)

    def _is_known(self, layer_epochs: tuple[int, ...]) -> bool:
        if layer_epochs not in self._known:
            if not all(key in self._placements for key in enumerate(layer_epochs)):
                return False
            self._known.add(layer_epochs)
        return True

    def _append(
        self, steps: list[tuple[int, StepRecord]], tables: dict[tuple[int, ...], LayerTables | None]
    ) -> None:
        """On the thread: put the ranks' counts together and write them."""
        wanted = self._writer.sources
        if wanted is None:
            wanted = any(step.has_sources for _, step in steps)
        if wanted:
            whole = [(number, step) for number, step in steps if step.has_sources]
            self._lost_late += len(steps) - len(whole)
            steps = whole
        if not steps:
            return
        records = [step for _, step in steps]
        self._writer.append_slots(
            np.stack([self._slot_counts(step, tables[step.layer_epochs]) for step in records]),
            np.array([step.layer_epochs for step in records], dtype=np.int64),
            step_T=[number for number, _ in steps],
            tokens_T=[step.tokens() for step in records],
            phase_T=[step.phase() for step in records],
            source_TRLE=np.stack([step.source_counts() for step in records]) if wanted else None,
        )
        self._writer.flush()

    def _slot_counts(self, step: StepRecord, tables: LayerTables | None) -> npt.NDArray[np.uint32]:
        if step.by_slot:
            return step.slot_counts()
        assert tables is not None
        return slots_of_sources(step.source_counts(), tables, self._facts.ranks * self._facts.slots)

    def _write(self, call: Callable[..., None], *arguments: object) -> None:
        self._waiting.append(self._thread.submit(self._guarded, call, *arguments))

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """On the thread: once a write has failed no other is tried, so that the trace has no holes."""
        if self.error is not None:
            return
        try:
            call(*arguments)
        except Exception as error:
            self.error = error
