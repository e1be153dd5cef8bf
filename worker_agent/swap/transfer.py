"""Transfers experts between ranks in the background, from live slots to staging, using a limited share of the link."""

from __future__ import annotations

import logging
import math
import queue
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import torch

from eplb_core.placement import Int32
from worker_agent.device import Mark, SideStream, bytes_of, in_blocks
from worker_agent.live_layer import ExpertWeights, LiveLayer
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings
from worker_agent.swap.checksum import checksum
from worker_agent.swap.lane import Deadline, Lane, Lanes, Parcel
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.replica_check import ReplicaCheck
from worker_agent.swap.staging import Staging

_log = logging.getLogger("eplb.agent")

_CHUNK_BYTES = 4 * 1024 * 1024
"""Maximum message size in bytes, the same on all ranks. Tensors in a blocked memory format (NZ) are sent whole."""
_MAX_SLOWDOWN = 2.0
"""Cap on the link time charged to an exchange, as a multiple of the fastest exchange's time per byte."""
_JOIN_SECONDS = 1.0
_WITNESS_SECONDS = 1.0
"""Maximum time for which a transfer waits for the checksums of replicas on other ranks."""
_LATE_SECONDS = 10.0
"""Grace period beyond the thread's own deadline, because a thread that wakes up late on a busy host has not hung."""


@dataclass(frozen=True)
class StagedLayer:
    """Layer whose received experts are in staging.

    Parameters
    ----------
    layer
        Index of the layer.
    staged
        Received experts, one buffer for each kind of weight.
    slots
        Target slot of each row of ``staged``.
    seconds
        Duration of the layer's transfer.
    sums
        The senders' checksums, keyed by slot; empty if they sent none.
    """

    layer: int
    staged: list[ExpertWeights]
    slots: list[int]
    seconds: float = 0.0
    sums: dict[int, int] = field(default_factory=dict)

    @property
    def bytes_received(self) -> int:
        """Total size of the staged rows in bytes."""
        return sum(row.nbytes for buffer in self.staged for row in buffer)


@dataclass(frozen=True)
class TransferResult:
    """Result of one transfer.

    Parameters
    ----------
    generation
        Transfer number, from the ``StartTransfer``.
    layers
        The staged layers, in the order of the ``StartTransfer``; empty after an error.
    error
        Error that ended the transfer, or ``None``.
    """

    generation: int
    layers: tuple[StagedLayer, ...] = ()
    error: str | None = None


class ByteBudget:
    """Byte budget for sending and for receiving. The model's thread refills it, and the transfer thread draws from it.

    A piece that is larger than one step's budget overdraws it, so the next piece waits for several steps.

    Parameters
    ----------
    bytes_per_step
        Budget per step. If ``None``, ``share`` limits transfers instead.
    runtime
        Clock and locks.
    share
        Maximum fraction of time for which transfers may keep the link busy if ``bytes_per_step`` is ``None``.

    Examples
    --------
    The second piece waits until the steps' budgets have covered the first.

    >>> budget = ByteBudget(100)
    >>> budget.refill()
    >>> budget.draw(150, timeout=0.0)
    True
    >>> budget.draw(10, timeout=0.0)
    False
    >>> budget.refill()
    >>> budget.draw(10, timeout=0.0)
    True
    """

    def __init__(self, bytes_per_step: int | None, runtime: Runtime = REAL, share: float = 1.0) -> None:
        self._bytes_per_step = bytes_per_step
        self._share = share
        self._fastest = math.inf
        """Seconds per byte of the fastest exchange so far."""
        self._available = 0
        self._unlimited = False
        self._changed = runtime.condition()

    def refill(self) -> None:
        """Add one step's budget. Unused budget does not carry over, but an overdraft does."""
        self._unlimited = False
        if self._bytes_per_step is None:
            return
        with self._changed:
            self._available = min(self._available, 0) + self._bytes_per_step
            self._changed.notify()

    def open(self) -> None:
        """Lift all limits until the next ``refill``, because no steps are running that a transfer could slow down."""
        with self._changed:
            self._available = sys.maxsize
            self._unlimited = True
            self._changed.notify()

    @property
    def batch_bytes(self) -> int:
        """Maximum number of bytes to exchange in one batch."""
        return sys.maxsize if self._bytes_per_step is None else self._bytes_per_step

    def rest(self, duration: float, size: int, longest: float) -> None:
        """Leave the link to the model after an exchange, for as long as ``share`` requires.

        An exchange may include a wait for a peer, which in turn waits for a third rank's rest to end. If such waits
        counted, each rest would prolong the following ones. The link therefore counts as busy for at most twice the
        time that the exchange would have taken at the fastest rate so far.

        Parameters
        ----------
        duration
            Duration of the exchange in seconds.
        size
            Number of bytes exchanged.
        longest
            Maximum rest in seconds.
        """
        if self._bytes_per_step is None and self._share < 1.0 and size > 0:
            self._fastest = min(self._fastest, duration / size)
            busy = min(duration, _MAX_SLOWDOWN * self._fastest * size)
            seconds = min(busy * (1.0 / self._share - 1.0), longest)
            with self._changed:
                self._changed.wait_for(lambda: self._unlimited, seconds)

    def draw(self, size: int, timeout: float) -> bool:
        """Wait until some budget is available, then draw ``size`` bytes from it.

        Returns False if there is still no budget after ``timeout`` seconds.
        """
        if self._bytes_per_step is None:
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._available > 0, timeout):
                return False
            self._available -= size
            return True


@dataclass(frozen=True)
class _InstallCheck:
    """Job that compares installed experts with the senders' checksums. The checksums are keyed by slot."""

    layer: int
    sums: dict[int, int]


_Job: TypeAlias = "tuple[StartTransfer | _InstallCheck, Sequence[Sequence[ExpertWeights]], Mark]"
"""Order for the thread, the weights of each layer involved, and the point on the model's stream to wait for."""


class TransferWorker:
    """Thread that runs one transfer at a time and is the only user of its lanes.

    Read the results with ``poll``.

    Parameters
    ----------
    lanes
        Lanes to the peers.
    settings
        The agent's settings.
    budget
        Byte budget per step.
    runtime
        Clock, threads and queues.
    replicas
        Checker for live experts, run between transfers and before experts are sent; ``None`` to skip this check.

    Attributes
    ----------
    damaged : str or None
        Message about an installed expert that differs from the one sent, or ``None``.
    staging : Staging
        Buffers for received experts.
    """

    def __init__(
        self,
        lanes: Lanes,
        settings: AgentSettings,
        budget: ByteBudget,
        runtime: Runtime = REAL,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._lanes = lanes
        self._replicas = replicas
        self._runtime = runtime
        self._timeout = settings.transfer_timeout_seconds
        # No device library has been shown to transfer every weight format intact, so verify by default.
        self._verify = settings.verify_transfers is not False
        self.damaged: str | None = None
        self._queued_checks = 0
        self._finished_checks = 0
        self._budget = budget
        self._stream = SideStream(lanes.device)
        self.staging = Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = runtime.queue()
        self._results = queue.SimpleQueue[TransferResult]()
        self._overdue_at: float | None = None
        self._thread = runtime.spawn("eplb-transfer", self._run)

    def reserve(self, weights: Sequence[ExpertWeights], rows: int) -> None:
        """Allocate staging before the engine sizes its KV cache.

        Raises ``RuntimeError`` if the device has too little memory.

        Parameters
        ----------
        weights
            Weights of one layer, by kind.
        rows
            Number of experts for which to reserve memory.
        """
        try:
            with self._stream.current():
                self.staging.reserve([weights], [rows])
        except Exception as error:
            raise RuntimeError(
                f"cannot reserve staging for {rows} incoming experts: {error}; lower EPLB_AGENT_STAGING_MIB"
            ) from error

    @property
    def failing(self) -> str | None:
        """Reason why the thread will not finish its queued work; ``None`` if it may still finish, or has no work."""
        if self._overdue_at is None and self._finished_checks == self._queued_checks:
            return None
        if not self._thread.is_alive():
            return "the transfer thread has died"
        if self._overdue_at is not None and self._runtime.now() > self._overdue_at:
            return "the transfer thread has missed its deadline and does not respond"
        return None

    @property
    def running(self) -> bool:
        """True while a transfer or check may still read live slots or write to staging."""
        busy = self._overdue_at is not None or self._finished_checks < self._queued_checks
        return busy and self._thread.is_alive()

    def start(self, order: StartTransfer, layers: Sequence[LiveLayer]) -> None:
        """Start a transfer. Call this on the model's thread.

        The transfer waits for work that is already queued on the current stream. This includes the previous commit,
        which must finish reading staging before a transfer overwrites it.
        """
        weights = [layer.expert_weights() for layer in layers]
        self._overdue_at = self._runtime.now() + 2 * self._timeout + _LATE_SECONDS
        self._jobs.put((order, weights, Mark(weights[0][0][0].device)))

    def check(self, layer: int, live: LiveLayer, sums: dict[int, int]) -> None:
        """Compare a layer's newly installed experts with the senders' checksums, on the transfer thread.

        A difference is reported in ``damaged``.

        Parameters
        ----------
        layer
            Index of the layer.
        live
            The layer.
        sums
            Checksums keyed by slot. If empty, nothing is compared.
        """
        if sums:
            self._queued_checks += 1
            weights = live.expert_weights()
            self._jobs.put((_InstallCheck(layer, sums), [weights], Mark(weights[0][0].device)))

    def poll(self) -> TransferResult | None:
        """Return the result of a transfer that has ended since the last call, or ``None``. This never waits."""
        # This method runs at every step, and the test is cheaper than the exception that an empty queue raises.
        if self._results.empty():
            return None
        self._overdue_at = None
        return self._results.get_nowait()

    def close(self) -> None:
        """Have the thread finish its current job, retire its lane, and exit."""
        self._jobs.put(None)
        # An idle thread exits immediately. Wait for it, because a lane must not be closed while Python itself is
        # shutting down.
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            order, weights, ready = job
            if isinstance(order, StartTransfer):
                self._results.put(self._transfer(order, weights, ready))
                continue
            try:
                self._compare_installed(order, weights[0], ready)
            except Exception as failure:
                self.damaged = f"cannot compare the installed experts with the senders' checksums: {failure}"
            self._finished_checks += 1
        self._lanes.retire()

    def _next_job(self) -> _Job | None:
        """Return the next job. Check live experts while waiting for it."""
        while self._replicas is not None:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=self._replicas.seconds_left())
            try:
                self._replicas.turn(self._stream)
            except Exception:
                _log.exception("rank %d: could not check a live expert", self._lanes.rank)
        return self._jobs.get()

    def _compare_installed(self, order: _InstallCheck, weights: Sequence[ExpertWeights], ready: Mark) -> None:
        with self._stream.current():
            ready.hold_current_stream()
            for slot, sent in order.sums.items():
                installed = checksum([weight[slot] for weight in weights])
                if installed != sent:
                    self.damaged = (
                        f"layer {order.layer}: the expert in slot {slot} has the checksum {installed:#x}, but its "
                        f"sender computed {sent:#x}"
                    )

    def _transfer(
        self, order: StartTransfer, weights: Sequence[Sequence[ExpertWeights]], ready: Mark
    ) -> TransferResult:
        try:
            if any(len(layer.moves_M5) for layer in order.layers):
                return TransferResult(order.generation, self._transfer_layers(order, weights, ready))
        except Exception as failure:
            # Discard staging, because late bytes may still be written to it. Retire the lane, so that peers get an
            # error immediately instead of waiting for this rank.
            self._lanes.retire()
            self.staging.drop()
            numbers = ", ".join(str(layer.layer) for layer in order.layers)
            noun = "layer" if len(order.layers) == 1 else "layers"
            return TransferResult(order.generation, error=f"transfer of {noun} {numbers} failed: {failure}")
        # No experts move, so only the layers' tables change.
        staged = [
            StagedLayer(layer.layer, [weight[:0] for weight in layer_weights], [])
            for layer, layer_weights in zip(order.layers, weights, strict=True)
        ]
        return TransferResult(order.generation, tuple(staged))

    def _transfer_layers(
        self, order: StartTransfer, weights: Sequence[Sequence[ExpertWeights]], ready: Mark
    ) -> tuple[StagedLayer, ...]:
        """Send and receive this rank's experts, layer by layer, and return the staged layers."""
        began = self._runtime.now()
        deadline = Deadline(self._timeout, self._runtime)
        rank = self._lanes.rank
        slots = [layer.moves_M5[layer.moves_M5[:, 2] == rank, 3].tolist() for layer in order.layers]
        staged = []
        with self._stream.current():
            # All ranks must open a lane together, including those that neither send nor receive.
            exchanger = _ExpertExchanger(self._lanes.lane(order.lane), self._budget, deadline)
            ready.hold_current_stream()
            if self._replicas is not None:
                moves = {layer.layer: layer.moves_M5 for layer in order.layers}
                self._replicas.check_sources(moves, min(_WITNESS_SECONDS, self._timeout / 4))
            buffers = self.staging.reserve(weights, [len(targets) for targets in slots])
            for layer, targets, live, incoming in zip(order.layers, slots, weights, buffers, strict=True):
                sums = self._transfer_layer(exchanger, layer.moves_M5, live, incoming)
                by_slot = {targets[row]: value for row, value in sums.items()}
                now = self._runtime.now()
                staged.append(StagedLayer(layer.layer, incoming, targets, now - began, by_slot))
                began = now
        # A late transfer must also fail on a rank that had nothing to send or receive.
        deadline.remaining()
        return tuple(staged)

    def _transfer_layer(
        self,
        exchanger: _ExpertExchanger,
        moves_M5: Int32,
        live: Sequence[ExpertWeights],
        staged: Sequence[ExpertWeights],
    ) -> dict[int, int]:
        """Transfer one layer's experts, round by round. Return the senders' checksums, keyed by row of ``staged``."""
        sums: dict[int, int] = {}
        for outgoing, incoming, row in _parcels_by_round(moves_M5, self._lanes.rank, live, staged):
            if outgoing and incoming and outgoing[0].peer == self._lanes.rank:
                # The expert only moves to a different slot on this rank.
                for source, target in zip(outgoing, incoming, strict=True):
                    target.data.copy_(source.data)
                continue
            sent = exchanger.exchange(outgoing, incoming, verify=self._verify)
            if sent is not None:
                sums[row] = sent
        return sums


class _ExpertExchanger:
    """Exchanges whole experts over a lane, within the byte budget. It can verify the received experts."""

    def __init__(self, lane: Lane, budget: ByteBudget, deadline: Deadline) -> None:
        self._lane = lane
        self._budget = budget
        self._deadline = deadline

    def exchange(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, verify: bool) -> int | None:
        """Send one expert while receiving another.

        Parameters
        ----------
        outgoing
            The expert to send, one parcel per tensor. May be empty.
        incoming
            Memory for the expert to receive, one parcel per tensor. May be empty.
        verify
            True to send a checksum with each expert and compare it on arrival. Must be the same on all ranks.

        Returns
        -------
        int or None
            The sender's checksum of the received expert; ``None`` if ``verify`` is false or ``incoming`` is empty.

        Raises
        ------
        TimeoutError
            If the deadline passes.
        ValueError
            If the received expert's checksum differs from the sender's.
        """
        sent = list(outgoing)
        received = list(incoming)
        if verify and outgoing:
            sent.append(_checksum_parcel(outgoing))
        if verify and incoming:
            blank = torch.zeros(1, dtype=torch.int64, device=incoming[0].data.device)
            received.append(Parcel(incoming[0].peer, blank, incoming[0].expert))
        for leaving, arriving in self._batches(_pieces(sent), _pieces(received)):
            size = max(sum(parcel.data.nbytes for parcel in parcels) for parcels in (leaving, arriving))
            # The receiver also draws from its budget, so that its device does not wait for a sender that has no budget
            # left.
            if not self._budget.draw(size, self._deadline.remaining()):
                raise TimeoutError(
                    "the transfer deadline passed before the byte budget sufficed: the model completed too few steps"
                )
            duration = self._lane.exchange(leaving, arriving, self._deadline)
            self._budget.rest(duration, size, self._deadline.remaining() / 2)
        return _verify(incoming, received[-1]) if verify and incoming else None

    def _batches(
        self, leaving: Sequence[Parcel], arriving: Sequence[Parcel]
    ) -> Iterator[tuple[list[Parcel], list[Parcel]]]:
        """Split pieces into batches within the budget.

        A layer's experts have equal sizes, so both ends split them into the same batches.
        """
        batch: tuple[list[Parcel], list[Parcel]] = ([], [])
        batch_size = 0
        for pair in zip_longest(leaving, arriving):
            size = max(parcel.data.nbytes for parcel in pair if parcel is not None)
            if batch_size and batch_size + size > self._budget.batch_bytes:
                yield batch
                batch = ([], [])
                batch_size = 0
            batch_size += size
            for parcels, parcel in zip(batch, pair, strict=True):
                if parcel is not None:
                    parcels.append(parcel)
        if batch_size:
            yield batch


def _pieces(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Split parcels into messages. A tensor in a blocked format is not split, because it can only be sent whole."""
    pieces = []
    for parcel in parcels:
        whole = in_blocks(parcel.data)
        chunks = [parcel.data] if whole else bytes_of(parcel.data).split(_CHUNK_BYTES)
        pieces += [Parcel(parcel.peer, chunk, parcel.expert) for chunk in chunks]
    return pieces


def _checksum_parcel(parcels: Sequence[Parcel]) -> Parcel:
    """Return a parcel that holds the checksum of an expert's tensors."""
    first = parcels[0]
    value = checksum([parcel.data for parcel in parcels])
    return Parcel(first.peer, torch.tensor([value], device=first.data.device), first.expert)


def _verify(staged: Sequence[Parcel], report: Parcel) -> int:
    """Return the sender's checksum. Raises ``ValueError`` if the staged expert's checksum differs.

    Parameters
    ----------
    staged
        Tensors of the received expert.
    report
        The sender's checksum, as received.
    """
    sent = int(report.data)
    received = checksum([parcel.data for parcel in staged])
    if received != sent:
        raise ValueError(
            f"expert {report.expert} from rank {report.peer} has the checksum {received:#010x}, "
            f"but the sender computed {sent:#010x}"
        )
    return sent


def _rounds(moves_M5: Int32) -> list[list[int]]:
    """Split moves into rounds. In each round, a rank sends at most one expert and receives at most one.

    This is a greedy edge colouring of the bipartite graph of senders and receivers, with the busiest ranks first. The
    number of rounds is less than twice the minimum. The result is deterministic, so all ranks compute the same rounds.

    Parameters
    ----------
    moves_M5
        Source rank and slot, destination rank and slot, expert: int32 ``[M, 5]``.

    Returns
    -------
    list of list of int
        Indices into the moves for each round.

    Examples
    --------
    Rank 0 sends two experts and rank 2 receives two, so two rounds are needed.

    >>> import numpy as np
    >>> _rounds(np.array([[0, 0, 1, 0, 5], [1, 0, 2, 0, 6], [2, 0, 0, 0, 7], [0, 1, 2, 1, 8]], dtype=np.int32))
    [[3, 2], [0, 1]]
    """
    pairs = [(source, destination) for source, _, destination, _, _ in moves_M5.tolist()]
    sends = Counter(source for source, _ in pairs)
    receives = Counter(destination for _, destination in pairs)
    pending = sorted(range(len(pairs)), key=lambda move: -(sends[pairs[move][0]] + receives[pairs[move][1]]))
    rounds = []
    while pending:
        senders = set[int]()
        receivers = set[int]()
        chosen = list[int]()
        for move in pending:
            source, destination = pairs[move]
            if source not in senders and destination not in receivers:
                senders.add(source)
                receivers.add(destination)
                chosen.append(move)
        rounds.append(chosen)
        done = set(chosen)
        pending = [move for move in pending if move not in done]
    return rounds


class _Round(NamedTuple):
    """One round of a layer's transfer on one rank.

    Parameters
    ----------
    outgoing
        The expert to send, one parcel per tensor; empty if there is none.
    incoming
        Memory for the expert to receive, one parcel per tensor; empty if there is none.
    row
        Staging row for the expert to receive; -1 if there is none.
    """

    outgoing: list[Parcel]
    incoming: list[Parcel]
    row: int


def _parcels_by_round(
    moves_M5: Int32, rank: int, weights: Sequence[ExpertWeights], staged: Sequence[ExpertWeights]
) -> list[_Round]:
    """Return the parcels that a rank sends and receives in each round of a layer's transfer.

    Parameters
    ----------
    moves_M5
        The layer's moves on all ranks, int32 ``[M, 5]``; see ``_rounds``.
    rank
        The rank.
    weights
        The rank's live weights of the layer, by kind.
    staged
        The rank's staging buffers, by kind of weight. Rows are in the order of the moves to this rank.
    """
    moves = moves_M5.tolist()
    moves_to_rank = [move for move, (_, _, destination, _, _) in enumerate(moves) if destination == rank]
    rows = {move: row for row, move in enumerate(moves_to_rank)}
    rounds = []
    for batch in _rounds(moves_M5):
        outgoing: list[Parcel] = []
        incoming: list[Parcel] = []
        row = -1
        for move in batch:
            source, source_slot, destination, _, expert = moves[move]
            if source == rank:
                outgoing = [Parcel(destination, weight[source_slot], expert) for weight in weights]
            if destination == rank:
                row = rows[move]
                incoming = [Parcel(source, buffer[row], expert) for buffer in staged]
        rounds.append(_Round(outgoing, incoming, row))
    return rounds
