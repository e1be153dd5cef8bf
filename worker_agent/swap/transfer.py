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

from eplb_service.placement import Int32
from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.device import Mark, side_stream
from worker_agent.swap.budget import ByteBudget
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
class _Job:
    order: StartTransfer
    weights: list[torch.Tensor]
    ready: Mark


class TransferWorker:
    """One thread that carries out a transfer at a time; results are read with ``poll``.

    Parameters
    ----------
    group
        The agents' group; each lane of ``StartTransfer`` gets a process group of its own, built in the background.
    timeout
        Bound on one whole transfer, the building of its lane included.
    budget
        Bytes per step.
    chunk_bytes
        Largest single message.
    """

    def __init__(self, group: AgentGroup, timeout: timedelta, budget: ByteBudget, chunk_bytes: int) -> None:
        self._group = group
        self._timeout = timeout
        self._budget = budget
        self._chunk_bytes = chunk_bytes
        self._staging = Staging()
        self._lane: tuple[int, dist.ProcessGroup] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="eplb-transfer", daemon=True)
        self._thread.start()

    def start(self, order: StartTransfer, layer: LiveLayer) -> None:
        """Begin; called on the model's thread, so that what it has queued so far is waited for."""
        weights = layer.expert_weights()
        self._jobs.put(_Job(order, weights, Mark(weights[0].device)))

    def poll(self) -> TransferResult | None:
        """A transfer that has ended since the last call, or ``None``; never waits."""
        try:
            return self._results.get_nowait()
        except queue.Empty:
            return None

    def drop_staging(self) -> None:
        """Abandon what is staged; the next transfer takes new memory."""
        self._staging.drop()

    def close(self) -> None:
        """Let the thread end after its present job."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            moves_M5 = job.order.layer.moves_M5
            incoming = [move for move in moves_M5.tolist() if move[2] == self._group.rank]
            slots = [slot for _, _, _, slot, _ in incoming]
            staged: list[torch.Tensor] = []
            error = None
            try:
                staged = self._staging.reserve(job.weights, len(incoming))
                with side_stream(job.weights[0].device):
                    job.ready.hold_current_stream()
                    self._move(job, moves_M5, staged, began + self._timeout.total_seconds())
            except Exception as failure:
                error = f"transfer of layer {job.order.layer.layer} failed: {failure}"
            received = sum(buffer.nbytes for buffer in staged) if error is None else 0
            seconds = time.monotonic() - began
            self._results.put(TransferResult(job.order.generation, staged, slots, received, seconds, error))

    def _move(self, job: _Job, moves_M5: Int32, staged: Sequence[torch.Tensor], deadline: float) -> None:
        """Send and receive this rank's part of the layer, round by round."""
        if not len(moves_M5):
            return
        # Every rank joins the lane, also one that neither sends nor receives: its mesh is built by all.
        lane = self._lane_group(job.order.lane)
        rank = self._group.rank
        row_of = {
            move: row for row, move in enumerate(i for i, m in enumerate(moves_M5.tolist()) if m[2] == rank)
        }
        for batch in rounds(moves_M5):
            outgoing = next((move for move in batch if moves_M5[move, 0] == rank), None)
            incoming = next((move for move in batch if moves_M5[move, 2] == rank), None)
            for weight, buffer in zip(job.weights, staged, strict=True):
                source = None if outgoing is None else weight[int(moves_M5[outgoing, 1])]
                target = None if incoming is None else buffer[row_of[incoming]]
                peers = (
                    int(moves_M5[outgoing, 2]) if outgoing is not None else -1,
                    int(moves_M5[incoming, 0]) if incoming is not None else -1,
                )
                self._exchange(lane, source, target, peers, deadline)

    def _exchange(
        self,
        lane: dist.ProcessGroup,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        peers: tuple[int, int],
        deadline: float,
    ) -> None:
        """Send ``source`` to ``peers[0]`` while receiving ``target`` from ``peers[1]``, chunk by chunk."""
        outgoing = [] if source is None else _bytes_of(source).split(self._chunk_bytes)
        incoming = [] if target is None else _bytes_of(target).split(self._chunk_bytes)
        for index in range(max(len(outgoing), len(incoming))):
            arriving = None
            works = []
            if index < len(incoming):
                on_host = incoming[index].device.type == "cpu"
                arriving = (
                    incoming[index] if on_host else torch.empty(incoming[index].shape, dtype=torch.uint8)
                )
                works.append(lane.recv([arriving], peers[1], 0))
            if index < len(outgoing):
                if not self._budget.draw(outgoing[index].nbytes, deadline - time.monotonic()):
                    raise TimeoutError("the model made no steps that the byte budget could be drawn from")
                works.append(lane.send([outgoing[index].cpu()], peers[0], 0))
            for work in works:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"not done within {self._timeout.total_seconds():g} s")
                work.wait(timedelta(seconds=left))
            if arriving is not None and arriving is not incoming[index]:
                incoming[index].copy_(arriving)

    def _lane_group(self, lane: int) -> dist.ProcessGroup:
        if self._lane is None or self._lane[0] != lane:
            self._lane = (lane, self._group.process_group(f"lane/{lane}", self._timeout))
        return self._lane[1]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)
