"""Moves experts between ranks in the background, from live slots into staging."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.device import Mark, side_stream
from worker_agent.swap.budget import ByteBudget
from worker_agent.swap.checksum import bytes_of, expert_checksum
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.schedule import rounds
from worker_agent.swap.staging import Staging


@dataclass(frozen=True)
class TransferResult:
    """What became of one transfer: the staged rows and their slots, or the error that ended it."""

    generation: int
    staged: list[torch.Tensor]
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
        Bound on one whole transfer, the building of its lane included.
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
    weights: list[torch.Tensor]
    ready: Mark


@dataclass(frozen=True)
class _Leg:
    """One expert, all its tensors, on its way to or from ``peer``."""

    peer: int
    expert: int
    parts: list[torch.Tensor]


class TransferWorker:
    """One thread that carries out a transfer at a time; results are read with ``poll``.

    Parameters
    ----------
    group
        The agents' group; each lane of ``StartTransfer`` gets a process group of its own, built in the background.
    limits
        Deadline, message size and verification.
    budget
        Bytes per step.
    """

    def __init__(self, group: AgentGroup, limits: TransferLimits, budget: ByteBudget) -> None:
        self._group = group
        self._limits = limits
        self._budget = budget
        self.staging = Staging()
        self._lane: tuple[int, dist.ProcessGroup] | None = None
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
        """Begin; called on the model's thread, so that what it has queued so far is waited for."""
        weights = layer.expert_weights()
        self._overdue_at = time.monotonic() + 2 * self._limits.timeout.total_seconds()
        self._jobs.put(_Job(order, weights, Mark(weights[0].device)))

    def poll(self) -> TransferResult | None:
        """A transfer that has ended since the last call, or ``None``; never waits."""
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self._overdue_at = None
        return result

    def close(self) -> None:
        """Let the thread end after its present job."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            moves = job.order.layer.moves_M5.tolist()
            slots = [slot for _, _, rank, slot, _ in moves if rank == self._group.rank]
            # A layer may change its tables alone.
            staged = [weight[:0] for weight in job.weights]
            error = None
            try:
                if moves:
                    staged = self._move(job, len(slots), began + self._limits.timeout.total_seconds())
            except Exception as failure:
                error = f"transfer of layer {job.order.layer.layer} failed: {failure}"
                # Late bytes may still be written into what was staged, and the other ranks must not wait for this one:
                # without the lane's links they know at once.
                self._lane = None
                self.staging.drop()
            received = sum(buffer.nbytes for buffer in staged) if error is None else 0
            seconds = time.monotonic() - began
            self._results.put(TransferResult(job.order.generation, staged, slots, received, seconds, error))

    def _move(self, job: _Job, rows: int, deadline: float) -> list[torch.Tensor]:
        """Send and receive this rank's part of the layer, round by round; the staged buffers."""
        # Every rank joins the lane, also one that neither sends nor receives: its mesh is built by all.
        lane = self._lane_group(job.order.lane)
        staged = self.staging.reserve(job.weights, rows)
        with side_stream(job.weights[0].device):
            job.ready.hold_current_stream()
            for outgoing, incoming in self._legs(job, staged):
                parts = max(len(outgoing.parts) if outgoing else 0, len(incoming.parts) if incoming else 0)
                for part in range(parts):
                    self._exchange(
                        lane,
                        outgoing and _Leg(outgoing.peer, outgoing.expert, [outgoing.parts[part]]),
                        incoming and _Leg(incoming.peer, incoming.expert, [incoming.parts[part]]),
                        deadline,
                    )
                if self._limits.verify:
                    self._verify(lane, outgoing, incoming, deadline)
        return staged

    def _legs(self, job: _Job, staged: Sequence[torch.Tensor]) -> list[tuple[_Leg | None, _Leg | None]]:
        """What this rank sends and receives in each round; staged rows are in order of the moves."""
        moves_M5, rank = job.order.layer.moves_M5, self._group.rank
        moves = moves_M5.tolist()
        incoming = [move for move, (_, _, destination, _, _) in enumerate(moves) if destination == rank]
        row_of = {move: row for row, move in enumerate(incoming)}
        legs: list[tuple[_Leg | None, _Leg | None]] = []
        for batch in rounds(moves_M5):
            sent = received = None
            for move in batch:
                source, source_slot, destination, _, expert = moves[move]
                if source == rank:
                    sent = _Leg(destination, expert, [weight[source_slot] for weight in job.weights])
                if destination == rank:
                    received = _Leg(source, expert, [buffer[row_of[move]] for buffer in staged])
            legs.append((sent, received))
        return legs

    def _exchange(
        self, lane: dist.ProcessGroup, outgoing: _Leg | None, incoming: _Leg | None, deadline: float
    ) -> None:
        """Send one tensor to a peer while receiving one from another, chunk by chunk."""
        chunk_bytes = self._limits.chunk_bytes
        sent = bytes_of(outgoing.parts[0]).split(chunk_bytes) if outgoing else ()
        received = bytes_of(incoming.parts[0]).split(chunk_bytes) if incoming else ()
        for index in range(max(len(sent), len(received))):
            works = []
            arriving = None
            if incoming is not None and index < len(received):
                on_host = received[index].device.type == "cpu"
                arriving = (
                    received[index] if on_host else torch.empty(received[index].shape, dtype=torch.uint8)
                )
                works.append(lane.recv([arriving], incoming.peer, 0))
            if outgoing is not None and index < len(sent):
                if not self._budget.draw(sent[index].nbytes, deadline - time.monotonic()):
                    raise TimeoutError("the model made no steps that the byte budget could be drawn from")
                works.append(lane.send([sent[index].cpu()], outgoing.peer, 0))
            for work in works:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"not done within {self._limits.timeout.total_seconds():g} s")
                work.wait(timedelta(seconds=left))
            if arriving is not None and arriving is not received[index]:
                received[index].copy_(arriving)

    def _verify(
        self, lane: dist.ProcessGroup, outgoing: _Leg | None, incoming: _Leg | None, deadline: float
    ) -> None:
        """Compare what was sent with what is staged; raises ``ValueError`` where an expert came out different."""
        told = torch.tensor([expert_checksum(outgoing.parts) if outgoing else 0], dtype=torch.int64)
        heard = torch.zeros(1, dtype=torch.int64)
        self._exchange(
            lane,
            outgoing and _Leg(outgoing.peer, outgoing.expert, [told]),
            incoming and _Leg(incoming.peer, incoming.expert, [heard]),
            deadline,
        )
        if incoming is not None and int(heard) != expert_checksum(incoming.parts):
            raise ValueError(
                f"expert {incoming.expert} from rank {incoming.peer} has the checksum "
                f"{expert_checksum(incoming.parts):#010x}, was sent as {int(heard):#010x}"
            )

    def _lane_group(self, lane: int) -> dist.ProcessGroup:
        if self._lane is None or self._lane[0] != lane:
            self._lane = None
            self._lane = (lane, self._group.process_group(f"lane/{lane}", self._limits.timeout))
        return self._lane[1]
