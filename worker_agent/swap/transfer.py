"""Moves experts between ranks in the background, from live slots into staging, with a limited share of the link."""

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
from typing import TypeAlias

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
"""Size of the largest message, except for tensors in blocks; the same on all ranks."""
_MAX_SLOWDOWN = 2.0
"""Multiple of the fastest exchange's time per byte for which an exchange counts as using the link, at most."""
_REST_SECONDS = 1.0
_WITNESS_SECONDS = 1.0
"""Longest time that a transfer waits for the checksums of replicas on other ranks."""
_LATE_SECONDS = 10.0
"""A busy host wakes a thread late, which is no reason to take it for hung."""


@dataclass(frozen=True)
class StagedLayer:
    """Staged rows of a layer and their slots. ``sums`` has the senders' checksums by slot, if they were sent."""

    layer: int
    staged: list[ExpertWeights]
    slots: list[int]
    seconds: float = 0.0
    sums: dict[int, int] = field(default_factory=dict)

    @property
    def bytes_received(self) -> int:
        """Size of all staged rows."""
        return sum(row.nbytes for buffer in self.staged for row in buffer)


@dataclass(frozen=True)
class TransferResult:
    """Layers that one transfer has staged, in the order of its request, or the error that ended it."""

    generation: int
    layers: tuple[StagedLayer, ...] = ()
    error: str | None = None


class ByteBudget:
    """Bytes that may leave, or arrive, per step: filled at each step boundary, drawn from by the transfer thread.

    If ``bytes_per_step`` is ``None``, bytes are not limited. Instead, transfers keep the link busy for at most a
    ``share`` of the time, according to the duration of each exchange. A piece larger than one step's bytes waits for
    several steps.
    """

    def __init__(self, bytes_per_step: int | None, runtime: Runtime = REAL, share: float = 1.0) -> None:
        self._bytes_per_step = bytes_per_step
        self._share = share
        self._fastest = math.inf
        """Seconds per byte of the fastest exchange so far."""
        self._left = 0
        self._opened = False
        self._changed = runtime.condition()

    def refill(self) -> None:
        """Admit one step's bytes more. What was not used is not saved up."""
        self._opened = False
        if self._bytes_per_step is None:
            return
        with self._changed:
            self._left = min(self._left, 0) + self._bytes_per_step
            self._changed.notify()

    def open(self) -> None:
        """Admit whatever is asked for until the next ``refill``: the model makes no steps that could be slowed."""
        with self._changed:
            self._left = sys.maxsize
            self._opened = True
            self._changed.notify()

    @property
    def batch_bytes(self) -> int:
        """Largest number of bytes to exchange at once."""
        return sys.maxsize if self._bytes_per_step is None else self._bytes_per_step

    def rest(self, taken: float, size: int, longest: float) -> None:
        """Leave the link idle for the model after an exchange, for at most ``longest`` seconds.

        The exchange of ``size`` bytes took ``taken`` seconds. Part of that time may be a wait for a peer that itself
        waits for a third rank's rest to end. If such waits counted, each rest would prolong the next ones. The link
        therefore counts as busy for at most twice the time that the fastest exchange so far would have needed.
        """
        if self._bytes_per_step is None and self._share < 1.0 and size > 0:
            self._fastest = min(self._fastest, taken / size)
            busy = min(taken, _MAX_SLOWDOWN * self._fastest * size)
            seconds = min(busy * (1.0 / self._share - 1.0), longest)
            with self._changed:
                self._changed.wait_for(lambda: self._opened, seconds)

    def draw(self, size: int, timeout: float) -> bool:
        """Wait until the budget admits ``size`` bytes; ``False`` past ``timeout`` seconds."""
        if self._bytes_per_step is None:
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, timeout):
                return False
            self._left -= size
            return True


@dataclass(frozen=True)
class _Check:
    """Order to compare what was installed with the senders' checksums, by slot."""

    layer: int
    sums: dict[int, int]


_Job: TypeAlias = "tuple[StartTransfer | _Check, Sequence[Sequence[ExpertWeights]], Mark]"
"""A task for the thread, the weights of each layer involved, and the point of the stream to wait for."""


class TransferWorker:
    """One thread that carries out a transfer at a time; results are read with ``poll``. It alone uses the lanes.

    ``damaged`` is set where an installed expert is not what was sent.
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
        # No device's library has been shown to transfer every weight format intact, so verify by default.
        self._verify = settings.verify_transfers is not False
        self.damaged: str | None = None
        self._checks = self._checked = 0
        self._budget = budget
        self._stream = SideStream(lanes.device)
        self.staging = Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = runtime.queue()
        self._results = queue.SimpleQueue[TransferResult]()
        self._overdue_at: float | None = None
        self._thread = runtime.spawn("eplb-transfer", self._run)

    def reserve(self, weights: Sequence[ExpertWeights], rows: int) -> None:
        """Allocate staging for ``rows`` experts of a layer with these weights, before the engine sizes its KV cache.

        Raises ``RuntimeError`` if the device has too little memory.
        """
        try:
            with self._stream.current():
                self.staging.reserve([weights], [rows])
        except Exception as error:
            raise RuntimeError(
                f"staging for {rows} incoming experts cannot be reserved: {error}; lower EPLB_AGENT_STAGING_MIB"
            ) from error

    @property
    def failing(self) -> str | None:
        """Reason to hope for no answer to what it is to do, or ``None``: the thread is dead or late by its deadline."""
        if self._overdue_at is None and self._checked == self._checks:
            return None
        if not self._thread.is_alive():
            return "the transfer thread has died"
        if self._overdue_at is not None and self._runtime.now() > self._overdue_at:
            return "the transfer thread has missed its deadline and does not answer"
        return None

    @property
    def running(self) -> bool:
        """True while a transfer, or a check, still reads live slots or writes into staging."""
        busy = self._overdue_at is not None or self._checked < self._checks
        return busy and self._thread.is_alive()

    def start(self, order: StartTransfer, layers: Sequence[LiveLayer]) -> None:
        """Begin a transfer. Call this on the model's thread: the transfer waits for the work that it has queued.

        Above all, this is the previous commit, which must have read the staging before anything new is written there.
        """
        weights = [layer.expert_weights() for layer in layers]
        self._overdue_at = self._runtime.now() + 2 * self._timeout + _LATE_SECONDS
        self._jobs.put((order, weights, Mark(weights[0][0][0].device)))

    def check(self, layer: int, live: LiveLayer, sums: dict[int, int]) -> None:
        """Compare, in the background, what was just installed with the senders' checksums; ``damaged`` shows it."""
        if sums:
            self._checks += 1
            weights = live.expert_weights()
            self._jobs.put((_Check(layer, sums), [weights], Mark(weights[0][0].device)))

    def poll(self) -> TransferResult | None:
        """Return a transfer that has ended since the last call, or ``None``; never waits."""
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
        while (job := self._next_job()) is not None:
            order, weights, ready = job
            if isinstance(order, StartTransfer):
                self._results.put(self._transferred(order, weights, ready))
                continue
            try:
                self._compare(order, weights[0], ready)
            except Exception as failure:
                self.damaged = f"what was installed could not be compared with what was sent: {failure}"
            self._checked += 1
        self._lanes.retire()

    def _next_job(self) -> _Job | None:
        """Wait for something to do, and look after live experts meanwhile."""
        while self._replicas is not None:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=self._replicas.seconds_left())
            try:
                self._replicas.turn(self._stream)
            except Exception:
                _log.exception("rank %d: a live expert could not be compared", self._lanes.rank)
        return self._jobs.get()

    def _compare(self, order: _Check, weights: Sequence[ExpertWeights], ready: Mark) -> None:
        with self._stream.current():
            ready.hold_current_stream()
            for slot, sent in order.sums.items():
                installed = checksum([weight[slot] for weight in weights])
                if installed != sent:
                    self.damaged = (
                        f"layer {order.layer}: slot {slot} has the checksum {installed:#x}, its expert was sent as "
                        f"{sent:#x}"
                    )

    def _transferred(
        self, order: StartTransfer, weights: Sequence[Sequence[ExpertWeights]], ready: Mark
    ) -> TransferResult:
        try:
            if any(len(layer.moves_M5) for layer in order.layers):
                return TransferResult(order.generation, self._move(order, weights, ready))
        except Exception as failure:
            # Late bytes may still be written into what was staged, and the other ranks must not wait for this one:
            # without the lane's links they know at once.
            self._lanes.retire()
            self.staging.drop()
            names = ", ".join(str(layer.layer) for layer in order.layers)
            some = "layer" if len(order.layers) == 1 else "layers"
            return TransferResult(order.generation, error=f"transfer of {some} {names} failed: {failure}")
        # These layers change only their tables.
        staged = [
            StagedLayer(layer.layer, [weight[:0] for weight in layer_weights], [])
            for layer, layer_weights in zip(order.layers, weights, strict=True)
        ]
        return TransferResult(order.generation, tuple(staged))

    def _move(
        self, order: StartTransfer, weights: Sequence[Sequence[ExpertWeights]], ready: Mark
    ) -> tuple[StagedLayer, ...]:
        """Send and receive this rank's experts, layer by layer."""
        began = self._runtime.now()
        deadline = Deadline(self._timeout, self._runtime)
        rank = self._lanes.rank
        slots = [layer.moves_M5[layer.moves_M5[:, 2] == rank, 3].tolist() for layer in order.layers]
        staged = []
        with self._stream.current():
            # Every rank joins the lane, also one that neither sends nor receives: its mesh is built by all.
            carrier = _Carrier(self._lanes.lane(order.lane), self._budget, deadline)
            ready.hold_current_stream()
            if self._replicas is not None:
                moves = {layer.layer: layer.moves_M5 for layer in order.layers}
                self._replicas.check_sources(moves, min(_WITNESS_SECONDS, self._timeout / 4))
            buffers = self.staging.reserve(weights, [len(own) for own in slots])
            for layer, own, live, incoming in zip(order.layers, slots, weights, buffers, strict=True):
                sums = self._carry(carrier, layer.moves_M5, live, incoming)
                by_slot = {own[row]: value for row, value in sums.items()}
                now = self._runtime.now()
                staged.append(StagedLayer(layer.layer, incoming, own, now - began, by_slot))
                began = now
        # A transfer is late even if this rank had nothing to send or receive.
        deadline.left()
        return tuple(staged)

    def _carry(
        self,
        carrier: _Carrier,
        moves_M5: Int32,
        live: Sequence[ExpertWeights],
        staged: Sequence[ExpertWeights],
    ) -> dict[int, int]:
        """Transfer one layer's experts, round by round; return the senders' checksums by row of ``staged``."""
        sums: dict[int, int] = {}
        for outgoing, incoming, row in _parcels(moves_M5, self._lanes.rank, live, staged):
            if outgoing and incoming and outgoing[0].peer == self._lanes.rank:
                # The expert only moves to another slot of this rank.
                for source, target in zip(outgoing, incoming, strict=True):
                    target.data.copy_(source.data)
                continue
            sent = carrier.carry(outgoing, incoming, verify=self._verify)
            if sent is not None:
                sums[row] = sent
        return sums


class _Carrier:
    """Carries experts over a lane, each a parcel per tensor, and verifies what arrived."""

    def __init__(self, lane: Lane, budget: ByteBudget, deadline: Deadline) -> None:
        self._lane = lane
        self._budget = budget
        self._deadline = deadline

    def carry(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, verify: bool) -> int | None:
        """Send one expert while receiving another; either may be empty.

        Returns the sender's checksum of the received expert, or ``None`` without ``verify``. Raises ``ValueError`` if
        the received expert has another checksum.
        """
        sent = list(outgoing)
        reported = list(incoming)
        if verify and outgoing:
            sent.append(_checksum_of(outgoing))
        if verify and incoming:
            blank = torch.zeros(1, dtype=torch.int64, device=incoming[0].data.device)
            reported.append(Parcel(incoming[0].peer, blank, incoming[0].expert))
        for leaving, arriving in self._batches(_pieces(sent), _pieces(reported)):
            size = max(sum(parcel.data.nbytes for parcel in parcels) for parcels in (leaving, arriving))
            # The receiver draws too, so that its device does not wait for a sender that waits for its own budget.
            if not self._budget.draw(size, self._deadline.left()):
                raise TimeoutError(
                    "the transfer deadline passed before the byte budget sufficed: the model completed too few steps"
                )
            taken = self._lane.exchange(leaving, arriving, self._deadline)
            self._budget.rest(taken, size, self._deadline.left() / 2)
        return _compare(incoming, reported[-1]) if verify and incoming else None

    def _batches(
        self, leaving: Sequence[Parcel], arriving: Sequence[Parcel]
    ) -> Iterator[tuple[list[Parcel], list[Parcel]]]:
        """Split both into batches within the budget, alike on both ends: a layer's experts have equal sizes."""
        parts: tuple[list[Parcel], list[Parcel]] = ([], [])
        held = 0
        for pair in zip_longest(leaving, arriving):
            size = max(parcel.data.nbytes for parcel in pair if parcel is not None)
            if held and held + size > self._budget.batch_bytes:
                yield parts
                parts = ([], [])
                held = 0
            held += size
            for part, parcel in zip(parts, pair, strict=True):
                if parcel is not None:
                    part.append(parcel)
        if held:
            yield parts


def _pieces(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Split parcels into messages; memory in blocks can only be sent whole."""
    found = []
    for parcel in parcels:
        whole = in_blocks(parcel.data)
        parts = [parcel.data] if whole else bytes_of(parcel.data).split(_CHUNK_BYTES)
        found += [Parcel(parcel.peer, part, parcel.expert) for part in parts]
    return found


def _checksum_of(parcels: Sequence[Parcel]) -> Parcel:
    """Parcel of the checksum over an expert's tensors, in their order."""
    first = parcels[0]
    value = checksum([parcel.data for parcel in parcels])
    return Parcel(first.peer, torch.tensor([value], device=first.data.device), first.expert)


def _compare(staged: Sequence[Parcel], reported: Parcel) -> int:
    """Return the sender's checksum. Raises ``ValueError`` if the staged expert has another one."""
    sent = int(reported.data)
    found = checksum([parcel.data for parcel in staged])
    if found != sent:
        raise ValueError(
            f"expert {reported.expert} from rank {reported.peer} has the checksum {found:#010x}, "
            f"but the sender computed {sent:#010x}"
        )
    return sent


def _rounds(moves_M5: Int32) -> list[list[int]]:
    """Conflict-free rounds of indices into the moves: in each, a rank sends and receives at most one expert.

    An edge colouring of the bipartite graph of senders and receivers, greedy on the busiest ranks first, so the number
    of rounds is at most one short of twice the best. Deterministic: all ranks find the same rounds.
    """
    pairs = [(source, destination) for source, _, destination, _, _ in moves_M5.tolist()]
    sends, receives = Counter(source for source, _ in pairs), Counter(destination for _, destination in pairs)
    waiting = sorted(range(len(pairs)), key=lambda move: -(sends[pairs[move][0]] + receives[pairs[move][1]]))
    ordered = []
    while waiting:
        senders, receivers, chosen = set[int](), set[int](), list[int]()
        for move in waiting:
            source, destination = pairs[move]
            if source not in senders and destination not in receivers:
                senders.add(source)
                receivers.add(destination)
                chosen.append(move)
        ordered.append(chosen)
        carried = set(chosen)
        waiting = [move for move in waiting if move not in carried]
    return ordered


def _parcels(
    moves_M5: Int32, rank: int, weights: Sequence[ExpertWeights], staged: Sequence[ExpertWeights]
) -> list[tuple[list[Parcel], list[Parcel], int]]:
    """Parcels that ``rank`` sends and receives in each round, one per tensor, and the staged row of the latter.

    Staged rows are in order of the moves; -1 where none is received.
    """
    moves = moves_M5.tolist()
    incoming = [move for move, (_, _, destination, _, _) in enumerate(moves) if destination == rank]
    row_of = {move: row for row, move in enumerate(incoming)}
    found = []
    for batch in _rounds(moves_M5):
        sent: list[Parcel] = []
        received: list[Parcel] = []
        row = -1
        for move in batch:
            source, source_slot, destination, _, expert = moves[move]
            if source == rank:
                sent = [Parcel(destination, weight[source_slot], expert) for weight in weights]
            if destination == rank:
                row = row_of[move]
                received = [Parcel(source, buffer[row], expert) for buffer in staged]
        found.append((sent, received, row))
    return found
