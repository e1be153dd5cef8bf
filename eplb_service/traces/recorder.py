"""Records a deployment's heat while it is served: the ranks' reports, step by step, into a native trace."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.heat.batch import HeatBatch
from eplb_service.placement import Int32
from eplb_service.traces.trace import TraceFacts
from eplb_service.traces.writer import BATCH_STEPS, TraceWriter

_BATCHES_WAITING = 8
"""Batches that may wait for the disk; what comes beyond is lost and counted."""


class _Step:
    """One step's counts, rank by rank."""

    def __init__(self, epochs_L: npt.NDArray[np.int64], ranks: int, slots: int) -> None:
        self.epochs_L = epochs_L
        self.counts_LRS = np.zeros((len(epochs_L), ranks, slots), dtype=np.int32)
        self.seen_R = np.zeros(ranks, dtype=bool)
        self.busy = False
        self.spoilt = False


class Recorder:
    """Writes one trace on a thread of its own; never waits for the disk.

    Parameters
    ----------
    path
        Folder to make.
    facts
        Of the deployment; ``ranks`` and ``slots`` must be set.
    layers, experts
        L and E.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest.

    ``lost`` counts steps that were not recorded: not told by all ranks, told under different placements, or too many
    for the disk. ``error`` is what ended the recording, or ``None``. Raises ``OutputError`` where nothing can be
    written.
    """

    def __init__(self, path: Path, facts: TraceFacts, layers: int, experts: int, pending_steps: int) -> None:
        self.lost = 0
        self.error: Exception | None = None
        self._facts = facts
        self._writer = TraceWriter(path, facts, layers, experts, by_slot=True)
        self._pending_steps = pending_steps
        self._pending: dict[int, _Step] = {}
        self._newest_gone = -1
        self._complete: list[tuple[int, _Step]] = []
        self._placements: dict[tuple[int, int], bytes] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-recorder")
        self._waiting: list[Future[None]] = []

    def place(self, layer: int, epoch: int, phy2log_RS: Int32) -> None:
        """Say which expert stands in each slot of ``layer`` at ``epoch``; known ones are not written again."""
        data = np.ascontiguousarray(phy2log_RS, dtype=np.int32)
        if self._placements.get((layer, epoch)) != data.tobytes():
            self._placements[layer, epoch] = data.tobytes()
            self._write(self._writer.place, layer, epoch, data.copy())

    def contradicts(self, layer: int, epoch: int, phy2log_RS: Int32) -> bool:
        """Whether another placement of ``layer`` is already recorded under ``epoch``."""
        known = self._placements.get((layer, epoch))
        return known is not None and known != np.ascontiguousarray(phy2log_RS, dtype=np.int32).tobytes()

    def add(self, rank: int, batch: HeatBatch) -> None:
        """Take one rank's report."""
        epochs_L = np.asarray(batch.layer_epochs, dtype=np.int64)
        for offset, dummy in enumerate(batch.dummy_T.tolist()):
            number = batch.first_step + offset
            if number <= self._newest_gone:
                continue
            step = self._pending.get(number)
            if step is None:
                step = self._pending[number] = _Step(epochs_L, self._facts.ranks, self._facts.slots)
            step.spoilt |= not np.array_equal(step.epochs_L, epochs_L)
            step.counts_LRS[:, rank] = batch.slot_counts_TLS[offset]
            step.seen_R[rank] = True
            step.busy |= not dummy
            if step.seen_R.all():
                self._finish(number)
        self._newest_gone = max(self._newest_gone, batch.first_step + batch.steps - 1 - self._pending_steps)
        for number in [number for number in self._pending if number <= self._newest_gone]:
            del self._pending[number]
            self.lost += 1
        if len(self._complete) >= BATCH_STEPS:
            self._hand_over(before=min(self._pending, default=self._complete[-1][0] + 1))

    def close(self) -> None:
        """Write what waits; whatever was not told by all ranks is lost."""
        self._hand_over()
        self._thread.shutdown(wait=True)

    def _finish(self, number: int) -> None:
        step = self._pending.pop(number)
        if step.spoilt:
            self.lost += 1
        elif step.busy:
            bisect.insort(self._complete, (number, step), key=lambda entry: entry[0])

    def _hand_over(self, before: int | None = None) -> None:
        """Give what is complete to the disk, up to the step ``before``: those from it on may still come in between."""
        keys = [number for number, _ in self._complete]
        end = len(keys) if before is None else bisect.bisect_left(keys, before)
        complete, self._complete = self._complete[:end], self._complete[end:]
        self._waiting = [write for write in self._waiting if not write.done()]
        if not complete:
            return
        if len(self._waiting) >= _BATCHES_WAITING or self.error is not None:
            self.lost += len(complete)
            return
        counts_TLP = np.stack([step.counts_LRS.reshape(len(step.epochs_L), -1) for _, step in complete])
        epochs_TL = np.stack([step.epochs_L for _, step in complete])
        self._write(self._append, counts_TLP, epochs_TL, [number for number, _ in complete])

    def _append(self, counts_TLP: Int32, epochs_TL: npt.NDArray[np.int64], numbers: list[int]) -> None:
        self._writer.append_slots(counts_TLP, epochs_TL, step_T=numbers)
        self._writer.flush()

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
