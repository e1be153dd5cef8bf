"""Record a deployment's heat while it serves: write the steps in the ranks' reports to a native trace."""

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
from eplb_core.placement import Int32, dealt_to, drawn_by_row, with_entries
from eplb_core.planner.settings import EVEN
from eplb_core.wire.heat import HeatReport
from eplb_service.io.containers import Array
from eplb_service.io.native import TraceWriter
from eplb_service.io.trace import PHASES, TraceFacts

MAX_SOURCE_COUNTS = 1 << 21
"""Maximum of ranks x layers x experts for recording source heat. At the maximum, a step takes up 8 MB."""

_PHASE_OF = {
    phase: PHASES.index(phase.name.lower())
    for phase in (StepPhase.PREFILL, StepPhase.DECODE, StepPhase.MIXED)
}
"""Index into ``PHASES`` for each phase that a rank with tokens can report."""


@dataclass
class _Step:
    """Reports of one step, keyed by rank. Their arrays are not copied."""

    number: int
    reports: dict[int, HeatReport] = field(default_factory=dict)

    @property
    def layer_epochs(self) -> tuple[int, ...] | None:
        """Epoch of each layer's placement during the step, or ``None`` if the ranks differ."""
        epochs = {report.layer_epochs for report in self.reports.values()}
        return epochs.pop() if len(epochs) == 1 else None

    def by_rank(self, name: str) -> list[Array] | None:
        """Return each rank's row of the named array, in rank order, or ``None`` if a rank did not report it."""
        reports = [self.reports[rank] for rank in sorted(self.reports)]
        if any(getattr(report, name) is None for report in reports):
            return None
        return [getattr(report, name)[self.number - report.first_step] for report in reports]

    @property
    def tokens(self) -> int:
        """Total tokens of the ranks, or -1 if a rank did not report its tokens."""
        tokens_R = self.by_rank("tokens_T")
        return -1 if tokens_R is None else int(sum(tokens_R))

    @property
    def phases(self) -> set[int]:
        """Phases of the ranks that had tokens."""
        return set(map(int, self.by_rank("phase_T") or ())) - {int(StepPhase.DUMMY)}

    @property
    def phase(self) -> int:
        """Index of the step's phase in ``PHASES``. A step is mixed if its ranks' phases differ."""
        phases = self.phases
        return _PHASE_OF[StepPhase(phases.pop())] if len(phases) == 1 else PHASES.index("mixed")


class _Lock:
    """Exclusive lock for writing a trace, on a lock file in the same folder. It is released when the process ends.

    Parameters
    ----------
    path
        Folder of the trace.

    Raises
    ------
    OutputError
        If another recorder holds the lock, or the lock file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._file: int | None = None
        while self._file is None:
            try:
                file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                raise OutputError(
                    f"{path}: another recording is writing to this trace; stop that recording, or choose another name"
                ) from None
            # The previous holder may have removed the file between this process opening and locking it.
            if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                self._file = file
            else:
                os.close(file)

    def release(self) -> None:
        """Release the lock, so that another recorder can write the trace."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


class Recorder:
    """Recorder that writes the ranks' reports to a native trace.

    A step is recorded once every rank has reported it under the same placement and that placement is recorded.
    Otherwise it is counted in ``lost``.

    Source heat is recorded if every rank reports it in the first step and its size is at most ``MAX_SOURCE_COUNTS``.
    If the ranks do not count tokens by slot, the recorder computes these counts from the source heat and the tables.

    Parameters
    ----------
    path
        Folder of the trace. If it contains a trace of the same deployment, the recording is appended to it.
    facts
        Facts about the deployment. ``ranks`` and ``slots`` are required. The recorder sets the names of the phases.
    layers
        Number of layers L.
    experts
        Number of experts E.
    pending_steps
        Maximum lead, in steps, of the fastest rank over the slowest, and of a report over the placement it refers to.
    max_steps
        Number of steps to record; ``None`` for no limit.

    Raises
    ------
    OutputError
        If the trace cannot be written, or, in the constructor, if another recorder is writing it. Any method may raise
        this.
    HeatError
        If the trace in the folder or a report does not match the recording. Any method may raise this.
    """

    def __init__(
        self,
        path: Path,
        facts: TraceFacts,
        layers: int,
        experts: int,
        pending_steps: int,
        max_steps: int | None = None,
    ) -> None:
        self.steps = 0
        """Number of steps recorded."""
        self.lost = 0
        """Number of steps that could not be recorded."""
        self._ranks = facts.ranks
        self._slots = facts.slots
        self._by_row = facts.split == EVEN
        self._lock = _Lock(path)
        try:
            self._writer = TraceWriter(path, replace(facts, phases=PHASES), layers, experts)
        except BaseException:
            self._lock.release()
            raise
        self._records_sources = facts.ranks * layers * experts <= MAX_SOURCE_COUNTS
        self._pending_steps = pending_steps
        self._max_steps = max_steps
        self._pending: dict[int, _Step] = {}
        self._next = 0
        self._newest = -1
        self._begun = False
        self._tables: dict[tuple[int, int], Int32 | None] = {}
        """Tables of all source ranks, int32 ``[R, E]`` or ``[R, E, D]``, keyed by layer and epoch."""

    @property
    def full(self) -> bool:
        """True once ``max_steps`` steps are recorded."""
        return self._max_steps is not None and self.steps >= self._max_steps

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32 | None) -> None:
        """Record a placement and its tables.

        Parameters
        ----------
        layer
            Layer of the placement.
        epoch
            Epoch of the layer at which this placement was installed.
        phy2log_RS
            Expert in each slot.
        log2phy_RE
            Tables of all source ranks, int32 ``[R, E]`` or ``[R, E, D]``; ``None`` if they are unknown.
        """
        self._writer.place(layer, epoch, phy2log_RS)
        self._tables[layer, epoch] = log2phy_RE

    def begin_again(self) -> None:
        """Start over after the ranks have formed a new group, because they may count steps from 0 again."""
        self._record_pending(ended=True)
        self._next = 0
        self._newest = -1
        self._begun = False

    def add(self, rank: int, report: HeatReport) -> None:
        """Add a rank's report. The caller must not modify its arrays afterwards."""
        if report.slot_counts_TLS is None and any(table is None for table in self._tables.values()):
            raise HeatError(
                f"rank {rank} does not count tokens by slot, and the tables needed to compute the counts are too "
                "large to send, so this deployment cannot be recorded"
            )
        end = report.first_step + report.steps
        for number in range(max(report.first_step, self._next), end):
            self._pending.setdefault(number, _Step(number)).reports[rank] = report
        self._newest = max(self._newest, end - 1)
        self._record_pending()

    def close(self) -> None:
        """Write the pending steps and release the trace. Steps that some rank has not reported are dropped."""
        try:
            self._record_pending(ended=True)
            self._writer.flush()
        finally:
            self._lock.release()

    def _record_pending(self, *, ended: bool = False) -> None:
        """Record pending steps in order, up to the first one whose reports or placement may still arrive.

        Parameters
        ----------
        ended
            True if no more reports will arrive. In that case, all pending steps are recorded or dropped.
        """
        for number in sorted(self._pending):
            step = self._pending[number]
            epochs = step.layer_epochs
            complete = len(step.reports) == self._ranks
            placed = epochs is None or all(key in self._tables for key in enumerate(epochs))
            if not (complete and placed) and not ended and number > self._newest - self._pending_steps:
                return
            self._next = number + 1
            del self._pending[number]
            # Incomplete steps before the first complete one do not count as lost: the recording began between reports.
            self._begun |= complete
            if self.full or (complete and not step.phases):
                continue
            if complete and placed and epochs is not None and self._write(step, epochs):
                self.steps += 1
            else:
                self.lost += complete or (self._begun and not ended)

    def _write(self, step: _Step, epochs: tuple[int, ...]) -> bool:
        """Write a step. Return False if it has no counts by slot, or no source heat in a trace that has it."""
        writer = self._writer
        sources = step.by_rank("source_counts_TLE")
        counts_LP = self._slot_counts(step, sources, epochs)
        if not self._records_sources or (writer.steps and not writer.by_source):
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
        # Epochs only increase, so no later step uses older tables.
        self._tables = {key: table for key, table in self._tables.items() if key[1] >= epochs[key[0]]}
        return True

    def _slot_counts(
        self, step: _Step, sources: list[Array] | None, epochs: tuple[int, ...]
    ) -> npt.NDArray[np.int64] | None:
        """Return the tokens by slot, int64 ``[L, R*S]``, or ``None`` if they are unknown.

        They are either reported by the ranks or computed from the source heat and the tables at these epochs.
        """
        rank_counts = step.by_rank("slot_counts_TLS")
        if rank_counts is not None:
            return np.concatenate(rank_counts, axis=1, dtype=np.int64)
        tables = [self._tables[key] for key in enumerate(epochs)]
        if sources is None:
            return None
        source_RLE = np.array(sources)
        counts_LP = np.zeros((len(tables), self._ranks * self._slots), dtype=np.int64)
        for layer, table in enumerate(tables):
            assert table is not None
            log2phy_RED = with_entries(table, 2)
            source_RE = source_RLE[:, layer]
            width = log2phy_RED.shape[2]
            if self._by_row:
                dealt_RED = drawn_by_row(source_RE, log2phy_RED, (step.number, layer))
            else:
                dealt_RED = np.stack([dealt_to(source_RE, entry, width) for entry in range(width)], axis=2)
            np.add.at(counts_LP[layer], log2phy_RED, dealt_RED)
        return counts_LP
