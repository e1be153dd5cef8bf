"""Reports of an observed engine without a service: log lines and a trace file, written by the first rank.

If several ranks count tokens, the others send their reports to the first rank through the engine's own store, which
its ranks used to find each other. A thread does this work and waits at most ten seconds for a report. The model's
thread never waits.
"""

from __future__ import annotations

import io
import logging
import queue
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eplb_core.wire.heat import HeatReport
from worker_agent.observe.balance import IntervalBalance, Steps
from worker_agent.observe.trace import TraceFile
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings

_log = logging.getLogger("eplb.agent")

_MAX_REPORTS = 64
"""Maximum number of reports that are queued for the thread, and of each rank's reports in the store."""
_PEER_SECONDS = 10.0
"""Maximum wait for another rank's report, in seconds."""
_POLL_SECONDS = 0.01

Shares = npt.NDArray[np.float32]


class Store(Protocol):
    """Key-value store that all ranks share, such as ``torch.distributed.TCPStore``."""

    def set(self, key: str, value: bytes) -> Any:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys have values."""

    def delete_key(self, key: str) -> bool:
        """Delete a value."""


class LocalReports:
    """Turns reports into log lines and a trace file.

    Parameters
    ----------
    settings
        Settings of the agent.
    rank
        Index of this rank.
    counting_ranks
        Ranks that count tokens, in ascending order. The first of them writes.
    store
        Store that these ranks share; not needed if only one rank counts.
    prefix
        Prefix of the keys in the store, different for each group of ranks.
    runtime
        Clock, threads and queues to use.
    """

    def __init__(
        self,
        settings: AgentSettings,
        rank: int,
        counting_ranks: Sequence[int],
        store: Store | None = None,
        prefix: str = "",
        runtime: Runtime = REAL,
    ) -> None:
        self._rank = rank
        self._writes = rank == counting_ranks[0]
        self._peers = [peer for peer in counting_ranks if peer != rank]
        self._counts = rank in counting_ranks
        self._store = store
        self._prefix = prefix
        self._runtime = runtime
        self._balance = IntervalBalance(settings.log_interval_steps)
        self._trace = self._open_trace(settings) if self._writes else None
        self._sent: deque[str] = deque()
        self._reports: queue.SimpleQueue[Any] = runtime.queue()
        self._thread = runtime.spawn("eplb-observe", self._run) if self._counts else None

    @staticmethod
    def _open_trace(settings: AgentSettings) -> TraceFile | None:
        if settings.trace is None:
            return None
        try:
            return TraceFile(settings.trace)
        except ValueError as error:
            _log.error("EPLB_AGENT_TRACE: %s. No trace will be written", error)
            return None

    def put(self, report: HeatReport, shares_LER: Shares) -> None:
        """Queue a report that was counted under these shares. It is dropped if the queue is full."""
        if self._counts and self._reports.qsize() < _MAX_REPORTS:
            self._reports.put((report, shares_LER))

    def close(self, timeout: float) -> None:
        """Process the queued reports, write the trace file, and end the thread within ``timeout`` seconds."""
        if self._thread is not None:
            self._reports.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (item := self._reports.get()) is not None:
            try:
                self._process(*item)
                failed = False
            except Exception:
                if not failed:
                    _log.exception("eplb-agent could not report the balance; the engine is not affected")
                failed = True
        self._write()

    def _process(self, report: HeatReport, shares_LER: Shares) -> None:
        steps = _steps_of(report)
        if not self._writes:
            self._send(steps)
            return
        for peer in self._peers:
            received = self._receive(peer, steps.first_step)
            if received is None or received.heat_TLE.shape != steps.heat_TLE.shape:
                return
            steps = _sum_of(steps, received)
        self._balance.add(steps, shares_LER)
        if self._trace is not None:
            self._trace.append(steps.first_step, steps.heat_TLE)
        if self._balance.is_over:
            _log.info("%s", self._balance.line())
            self._write()

    def _write(self) -> None:
        if self._trace is None:
            return
        try:
            self._trace.write()
        except OSError as error:
            _log.error("EPLB_AGENT_TRACE: the trace could not be written: %s", error)

    def _send(self, steps: Steps) -> None:
        assert self._store is not None
        key = self._key(self._rank, steps.first_step)
        file = io.BytesIO()
        np.savez_compressed(file, heat=steps.heat_TLE, tokens=steps.tokens_T, micros=steps.micros_T)
        self._store.set(key, file.getvalue())
        self._sent.append(key)
        if len(self._sent) > _MAX_REPORTS:
            # The first rank deletes each report that it reads. Delete the oldest one here to limit the number of unread
            # reports.
            self._store.delete_key(self._sent.popleft())

    def _receive(self, peer: int, first_step: int) -> Steps | None:
        """Return another rank's report, or ``None`` if it does not arrive in time."""
        assert self._store is not None
        key = self._key(peer, first_step)
        deadline = self._runtime.now() + _PEER_SECONDS
        while not self._store.check([key]):
            if self._runtime.now() >= deadline:
                return None
            self._runtime.sleep(_POLL_SECONDS)
        with np.load(io.BytesIO(self._store.get(key)), allow_pickle=False) as arrays:
            steps = Steps(first_step, arrays["heat"], arrays["tokens"], arrays["micros"])
        self._store.delete_key(key)
        return steps

    def _key(self, rank: int, first_step: int) -> str:
        return f"{self._prefix}/{rank}/{first_step}"


def _steps_of(report: HeatReport) -> Steps:
    """Return a report's steps. The report must contain source heat."""
    assert report.source_counts_TLE is not None
    tokens_T = np.full(report.steps, -1) if report.tokens_T is None else report.tokens_T
    micros_T = np.zeros(report.steps) if report.micros_T is None else report.micros_T
    return Steps(
        report.first_step,
        report.source_counts_TLE.astype(np.int32),
        tokens_T.astype(np.int64),
        micros_T.astype(np.int64),
    )


def _sum_of(steps: Steps, received: Steps) -> Steps:
    """Return the sum of both ranks' steps. A step's number of tokens is unknown if it is unknown on either rank."""
    known_T = (steps.tokens_T >= 0) & (received.tokens_T >= 0)
    tokens_T = np.where(known_T, steps.tokens_T + received.tokens_T, -1)
    return Steps(steps.first_step, steps.heat_TLE + received.heat_TLE, tokens_T, steps.micros_T)
