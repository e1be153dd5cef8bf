"""Moves experts between ranks in the background, from live slots into staging."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from worker_agent.adapters.live_layer import ExpertWeights, LiveLayer
from worker_agent.device import Mark, SideStream
from worker_agent.swap.actions import StartTransfer
from worker_agent.swap.carrier import ByteBudget, Carrier
from worker_agent.swap.lane.lane import Deadline
from worker_agent.swap.lane.lanes import Lanes
from worker_agent.swap.staging import Staging
from worker_agent.swap.transfer_schedule import Leg, incoming_slots, legs

_REST_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""A busy host wakes a thread late, which is no reason to take it for hung."""


@dataclass(frozen=True)
class TransferResult:
    """What became of one transfer: the staged rows and their slots, or the error that ended it."""

    generation: int
    staged: list[ExpertWeights]
    slots: list[int]
    bytes_received: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class TransferLimits:
    """How a transfer is carried out.

    Parameters
    ----------
    timeout
        Bound on one whole transfer, the opening of its lane included.
    chunk_bytes
        Largest single message.
    verify
        Whether a checksum of each expert is sent along and compared.
    """

    timeout: timedelta
    chunk_bytes: int
    verify: bool = False


@dataclass(frozen=True)
class _Job:
    order: StartTransfer
    weights: Sequence[ExpertWeights]
    ready: Mark


class TransferWorker:
    """One thread that carries out a transfer at a time; results are read with ``poll``.

    Parameters
    ----------
    lanes
        What experts travel over; used by this thread alone from here on.
    limits
        Deadline, message size and verification.
    budget
        Bytes per step.
    """

    def __init__(self, lanes: Lanes, limits: TransferLimits, budget: ByteBudget) -> None:
        self._lanes = lanes
        self._limits = limits
        self._budget = budget
        self._stream = SideStream(lanes.device)
        self.staging = Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._overdue_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="eplb-transfer", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> str | None:
        """Why no answer is to be hoped for any more, or ``None``: the thread is dead or has missed its own deadline."""
        if not self._thread.is_alive():
            return "the transfer thread has died"
        if self._overdue_at is not None and time.monotonic() > self._overdue_at:
            return "the transfer thread has missed its deadline and does not answer"
        return None

    @property
    def running(self) -> bool:
        """Whether a transfer still reads live slots or writes into staging."""
        return self._overdue_at is not None and self._thread.is_alive()

    def start(self, order: StartTransfer, layer: LiveLayer) -> None:
        """Begin; called on the model's thread, so that what it has queued so far is waited for.

        That is a commit before all: what it copies out of staging is read before anything new is written there.
        """
        weights = layer.expert_weights()
        self._overdue_at = time.monotonic() + 2 * self._limits.timeout.total_seconds() + _LATE_SECONDS
        self._jobs.put(_Job(order, weights, Mark(weights[0][0].device)))

    def poll(self) -> TransferResult | None:
        """A transfer that has ended since the last call, or ``None``; never waits."""
        # Asked at every step: an exception costs more than the question.
        if self._results.empty():
            return None
        self._overdue_at = None
        return self._results.get_nowait()

    def close(self) -> None:
        """Let the thread end after its present job, and its lane with it."""
        self._jobs.put(None)
        # One that is at rest ends at once: a lane must not be taken down while Python itself is.
        self._thread.join(_REST_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            slots = incoming_slots(job.order.layer.moves_M5, self._lanes.rank)
            # A layer may change its tables alone.
            staged: list[ExpertWeights] = [weight[:0] for weight in job.weights]
            error = None
            try:
                if len(job.order.layer.moves_M5):
                    staged = self._move(job, len(slots))
            except Exception as failure:
                error = f"transfer of layer {job.order.layer.layer} failed: {failure}"
                # Late bytes may still be written into what was staged, and the other ranks must not wait for this one:
                # without the lane's links they know at once.
                self._lanes.retire()
                self.staging.drop()
            received = sum(row.nbytes for buffer in staged for row in buffer) if error is None else 0
            seconds = time.monotonic() - began
            self._results.put(TransferResult(job.order.generation, staged, slots, received, seconds, error))
        self._lanes.retire()

    def _move(self, job: _Job, rows: int) -> list[ExpertWeights]:
        """Send and receive this rank's part of the layer, round by round; the staged buffers, all bytes in them."""
        deadline = Deadline(self._limits.timeout.total_seconds())
        with self._stream.current():
            # Every rank joins the lane, also one that neither sends nor receives: its mesh is built by all.
            lane = self._lanes.lane(job.order.lane)
            carrier = Carrier(lane, self._limits.chunk_bytes, self._budget, deadline)
            job.ready.hold_current_stream()
            staged = self.staging.reserve(job.weights, rows)
            for outgoing, incoming in legs(job.order.layer.moves_M5, self._lanes.rank, job.weights, staged):
                if outgoing is not None and incoming is not None and outgoing.peer == self._lanes.rank:
                    _copy(outgoing, incoming)
                    continue
                carrier.carry(outgoing, incoming)
                if self._limits.verify:
                    carrier.verify(outgoing, incoming)
        # Late is late, also where this rank had nothing to send or receive.
        deadline.left()
        return staged


def _copy(outgoing: Leg, incoming: Leg) -> None:
    """An expert changes its slot on this rank."""
    for source, target in zip(outgoing.parts, incoming.parts, strict=True):
        target.copy_(source)
