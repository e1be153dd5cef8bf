"""Records a deployment's heat while it is served: the ranks' reports, step by step, into a native trace."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_core.atomic_write import OutputError
from eplb_core.heat.phase import StepPhase
from eplb_core.heat.window import HeatError
from eplb_core.placement import Int32, dealt_to, with_entries
from eplb_core.wire.heat import HeatReport
from eplb_service.io.containers import Array
from eplb_service.io.native import TraceWriter
from eplb_service.io.trace import PHASES, TraceFacts

MAX_SOURCE_COUNTS = 1 << 21
"""Most ranks x layers x experts for which tokens by source rank are recorded: beyond, a step takes 8 MB and more."""

_PHASE_OF = {
    phase: PHASES.index(phase.name.lower())
    for phase in (StepPhase.PREFILL, StepPhase.DECODE, StepPhase.MIXED)
}


@dataclass
class _Step:
    """One step's reports by rank. The arrays are not copied from the reports."""

    number: int
    reports: dict[int, HeatReport] = field(default_factory=dict)

    @property
    def layer_epochs(self) -> tuple[int, ...] | None:
        """Epoch of each layer's placement during the step, or ``None`` if the ranks differ."""
        found = {report.layer_epochs for report in self.reports.values()}
        return found.pop() if len(found) == 1 else None

    def by_rank(self, name: str) -> list[Array] | None:
        """Return each rank's row of the named array, in rank order, or ``None`` if a rank lacks it."""
        reports = [self.reports[rank] for rank in sorted(self.reports)]
        if any(getattr(report, name) is None for report in reports):
            return None
        return [getattr(report, name)[self.number - report.first_step] for report in reports]

    @property
    def tokens(self) -> int:
        """Total tokens of the ranks, or -1 if a rank did not report its tokens."""
        known = self.by_rank("tokens_T")
        return -1 if known is None else int(sum(known))

    @property
    def phases(self) -> set[int]:
        """Phases of the ranks that had tokens."""
        return set(map(int, self.by_rank("phase_T") or ())) - {int(StepPhase.DUMMY)}

    @property
    def phase(self) -> int:
        """Index into ``PHASES``."""
        found = self.phases
        return _PHASE_OF[StepPhase(found.pop())] if len(found) == 1 else PHASES.index("mixed")


class _Lock:
    """Exclusive right to write the trace at ``path``, by a lock on a file beside it; it ends with the process.

    Raises ``OutputError`` if another recorder has it, or no such file can be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._file: int | None = None
        while self._file is None:
            try:
                file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise OutputError(f"{self._path}: cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                raise OutputError(
                    f"{path}: another recording is writing to it; end that one, or choose another name"
                ) from None
            # The one before may have removed the file between our opening and locking it.
            if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                self._file = file
            else:
                os.close(file)

    def release(self) -> None:
        """Let others write the trace."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


class Recorder:
    """Writer of the ranks' reports to one trace.

    Parameters
    ----------
    path
        Folder to make, or to go on with where it holds a trace of the same deployment.
    facts
        Facts of the deployment. ``ranks`` and ``slots`` must be set. The recorder sets the phase names.
    layers, experts
        L and E.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest, and reports ahead of the news of a switch.
    most_steps
        Steps to record; ``None`` for no bound.

    Tokens by source rank are recorded where all ranks report them in the first step, up to ``MAX_SOURCE_COUNTS``.
    Where ranks do not count what their slots received, that is derived from the tokens of all sources and the tables
    that those were sent by. ``lost`` counts steps that were not recorded: not reported by all ranks, or reported under
    different placements or one that is not known. Every call raises ``OutputError`` where nothing can be written, or
    another recorder writes the same trace until it is closed, ``HeatError`` where something else is there or is to be
    recorded.
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
        self.lost = self.steps = 0
        self._ranks, self._slots = facts.ranks, facts.slots
        self._lock = _Lock(path)
        try:
            self._writer = TraceWriter(path, replace(facts, phases=PHASES), layers, experts)
        except BaseException:
            self._lock.release()
            raise
        self._few_sources = facts.ranks * layers * experts <= MAX_SOURCE_COUNTS
        self._pending_steps = pending_steps
        self._most_steps = most_steps
        self._pending: dict[int, _Step] = {}
        self._next, self._newest, self._begun = 0, -1, False
        self._tables: dict[tuple[int, int], Int32 | None] = {}
        """Tables of all source ranks, int32 ``[R, E]`` or ``[R, E, D]``, by layer and epoch."""

    @property
    def full(self) -> bool:
        """True once all steps asked for have been recorded."""
        return self._most_steps is not None and self.steps >= self._most_steps

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32 | None) -> None:
        """Record which expert is in each slot of ``layer`` at ``epoch``.

        ``log2phy_RE`` is where each source rank's tokens go, ``None`` where that is not known.
        """
        self._writer.place(layer, epoch, phy2log_RS)
        self._tables[layer, epoch] = log2phy_RE

    def begin_again(self) -> None:
        """Take note that the ranks have come together again: they may count steps from the beginning again."""
        self._take(ended=True)
        self._next, self._newest, self._begun = 0, -1, False

    def add(self, rank: int, report: HeatReport) -> None:
        """Take one rank's report, whose arrays must not change any more."""
        if report.slot_counts_TLS is None and any(table is None for table in self._tables.values()):
            raise HeatError(
                f"rank {rank} does not count tokens by slot, and the tables that they would follow from are too large "
                "to be sent, so that such a deployment cannot be recorded"
            )
        end = report.first_step + report.steps
        for number in range(max(report.first_step, self._next), end):
            self._pending.setdefault(number, _Step(number)).reports[rank] = report
        self._newest = max(self._newest, end - 1)
        self._take()

    def close(self) -> None:
        """Write the pending steps. Steps without a report from every rank are lost."""
        try:
            self._take(ended=True)
            self._writer.flush()
        finally:
            self._lock.release()

    def _take(self, *, ended: bool = False) -> None:
        """Record pending steps in their order, up to one that can still become whole, unless the reports have ended."""
        for number in sorted(self._pending):
            step = self._pending[number]
            whole, epochs = len(step.reports) == self._ranks, step.layer_epochs
            placed = epochs is None or all(key in self._tables for key in enumerate(epochs))
            if not (whole and placed) and not ended and number > self._newest - self._pending_steps:
                return
            self._next = number + 1
            del self._pending[number]
            # Incomplete steps before the first complete one are not lost: the recording began between reports.
            self._begun |= whole
            if self.full or (whole and not step.phases):
                continue
            if whole and placed and epochs is not None and self._write(step, epochs):
                self.steps += 1
            else:
                self.lost += whole or (self._begun and not ended)

    def _write(self, step: _Step, epochs: tuple[int, ...]) -> bool:
        """Write a step. Return False if it lacks a field that the trace's other steps have."""
        writer, sources = self._writer, step.by_rank("source_counts_TLE")
        counts_LP = self._slot_counts(step, sources, epochs)
        if not self._few_sources or (writer.steps and not writer.by_source):
            sources = None
        if counts_LP is None or (sources is None and writer.by_source):
            return False
        writer.append(
            counts_LP[None],
            [epochs],
            step_T=[step.number],
            tokens_T=[step.tokens],
            phase_T=[step.phase],
            source_TRLE=None if sources is None else [sources],
        )
        # Epochs only grow, so no later step uses the older tables.
        self._tables = {key: table for key, table in self._tables.items() if key[1] >= epochs[key[0]]}
        return True

    def _slot_counts(
        self, step: _Step, sources: list[Array] | None, epochs: tuple[int, ...]
    ) -> npt.NDArray[np.int64] | None:
        """Tokens by slot, int64 ``[L, R*S]``: counted, or by the tables that ``sources`` were sent by."""
        counted = step.by_rank("slot_counts_TLS")
        if counted is not None:
            return np.concatenate(counted, axis=1, dtype=np.int64)
        tables = [self._tables[key] for key in enumerate(epochs)]
        if sources is None:
            return None
        source_RLE, slots = np.array(sources), self._ranks * self._slots
        counts_LP = np.zeros((len(tables), slots), dtype=np.int64)
        for layer, table in enumerate(tables):
            assert table is not None
            log2phy_RED = with_entries(table, 2)
            width = log2phy_RED.shape[2]
            for entry in range(width):
                np.add.at(
                    counts_LP[layer], log2phy_RED[:, :, entry], dealt_to(source_RLE[:, layer], entry, width)
                )
        return counts_LP
