"""Datagrams and links between simulated processes, with their faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tests.simulation.scheduler import Event, Process, Scheduler
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.machine import Progress
from worker_agent.swap.peers import Peers
from worker_agent.swap.vote_link import Kind

_LATENCY = (0.0001, 0.002)
_BYTES_PER_SECOND = 1e9
_PROGRESS = 4
"""Index of the slowest rank's progress in a reduced ballot. It follows the header."""


class Network:
    """The network between all hosts.

    The rates are the fractions of datagrams that each kind of fault affects while the fault lasts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sockets: dict[tuple[str, int], Socket] = {}
        self.links: dict[tuple[str, int], SimulatedLinks] = {}
        self._links_end: dict[frozenset[str], float] = {}
        self.meshes: dict[str, Mesh] = {}
        self.lost = self.late = self.doubled = self.replayed = self.rejected = self.flipped = 0.0
        self.breaches: list[str] = []
        self.aimed: deque[Callable[[], None]] = deque()
        self.aimed_at_ballots: deque[Callable[[], None]] = deque()
        self.aimed_at_first: deque[Callable[[str], None]] = deque()
        """Called with the name of the first rank that waits for its peers at a commit."""
        self._cut: dict[frozenset[str], float] = {}
        self._silent: dict[frozenset[str], float] = {}
        """Time of the first lost datagram since the last delivered one, for each pair of processes."""
        self._longest_silence: dict[frozenset[str], float] = {}
        self._port = 1000

    def socket(self, process: Process) -> Socket:
        self._port += 1
        return Socket(self, process, ("127.0.0.1", self._port))

    def latency(self) -> float:
        return self.scheduler.random.uniform(*_LATENCY)

    def cut(self, name: str, other_name: str, seconds: float) -> None:
        """Block all traffic between two processes for ``seconds``. Links between them break."""
        self._cut[frozenset((name, other_name))] = self.scheduler.now + seconds
        for mesh in self.meshes.values():
            mesh.cut(name, other_name)

    def is_cut(self, name: str, other_name: str) -> bool:
        return self._cut.get(frozenset((name, other_name)), 0.0) > self.scheduler.now

    def was_silent(self, name: str, seconds: float) -> bool:
        """Return True if all datagrams between this process and some other process were once lost for ``seconds``."""
        for pair in self._silent:
            self._record_silence(pair)
        return any(name in pair and silence >= seconds for pair, silence in self._longest_silence.items())

    def _record_silence(self, pair: frozenset[str]) -> None:
        silence = self.scheduler.now - self._silent[pair]
        self._longest_silence[pair] = max(silence, self._longest_silence.get(pair, 0.0))

    def end_links(self, name: str, other_name: str, seconds: float) -> None:
        """Close the presence links between two processes and reject new ones for ``seconds``.

        Other traffic is unaffected.
        """
        self._links_end[frozenset((name, other_name))] = self.scheduler.now + seconds

    def links_ended(self, address: tuple[str, int], other_address: tuple[str, int]) -> bool:
        """Return True if the presence link between two addresses has closed and has not been reopened."""
        pair = frozenset(
            self.sockets[each].process.name for each in (address, other_address) if each in self.sockets
        )
        return self._links_end.get(pair, 0.0) > self.scheduler.now

    def links_carry(self, address: tuple[str, int], other_address: tuple[str, int]) -> bool:
        """Return True if two processes can exchange messages now: both run, and the path is not cut."""
        ends = [self.sockets[each].process for each in (address, other_address) if each in self.sockets]
        if (
            len(ends) < 2
            or self.links_ended(address, other_address)
            or self.is_cut(*(end.name for end in ends))
        ):
            return False
        return all(end.alive and end.frozen_until <= self.scheduler.now for end in ends)

    def heal(self) -> None:
        self._cut.clear()
        self._links_end.clear()
        self.aimed.clear()
        self.aimed_at_ballots.clear()
        self.aimed_at_first.clear()
        self.lost = self.late = self.doubled = self.replayed = self.rejected = self.flipped = 0.0

    def send(self, sender: Socket, target: tuple[str, int], data: bytes) -> None:
        scheduler = self.scheduler
        receiver = self.sockets.get(target)
        draw = scheduler.random.random
        rejected = receiver is None or (self.rejected and draw() < self.rejected)
        if rejected:
            scheduler.at(scheduler.now + self.latency(), sender.refuse)
        if receiver is None:
            return
        pair = frozenset((sender.process.name, receiver.process.name))
        if rejected or self.is_cut(*pair) or (self.lost and draw() < self.lost):
            self._silent.setdefault(pair, scheduler.now)
            return
        if pair in self._silent:
            self._record_silence(pair)
            del self._silent[pair]
        copies = 2 if self.doubled and draw() < self.doubled else 1
        for _ in range(copies):
            delay = self.latency()
            if self.late and draw() < self.late:
                delay += scheduler.random.expovariate(1.0)
            scheduler.at(scheduler.now + delay, lambda: receiver.deliver(data, sender.address))
        if self.replayed and draw() < self.replayed:
            again = scheduler.now + scheduler.random.uniform(3.0, 20.0)
            scheduler.at(again, lambda: receiver.deliver(data, sender.address))


class Socket:
    """A datagram socket with the operations that agents use."""

    def __init__(self, network: Network, process: Process, address: tuple[str, int]) -> None:
        self.process = process
        self.address = address
        self._network = network
        self._peer: Any = None
        self._timeout: float | None = None
        self._arrived: deque[tuple[bytes, tuple[str, int]]] = deque()
        self._changed = process.condition()
        self._refused = self._closed = False
        network.sockets[address] = self
        process.on_end.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def getpeername(self) -> Any:
        return self._peer

    def connect(self, peer: tuple[str, int]) -> None:
        self._peer = tuple(peer)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def send(self, data: bytes) -> None:
        self._raise_refusal()
        self._network.send(self, self._peer, data)

    def sendto(self, data: bytes, target: tuple[str, int]) -> None:
        self._network.send(self, target, data)

    def recv(self, size: int) -> bytes:
        return self.recvfrom(size)[0]

    def recvfrom(self, _: int) -> tuple[bytes, tuple[str, int]]:
        is_readable = lambda: bool(self._arrived) or self._refused or self._closed  # noqa: E731
        if not self._changed.wait_for(is_readable, self._timeout):
            raise TimeoutError("timed out")
        if self._closed:
            raise OSError("the socket is closed")
        self._raise_refusal()
        return self._arrived.popleft()

    def deliver(self, data: bytes, sender: tuple[str, int]) -> None:
        if self._peer is None or self._peer == sender:
            self._arrived.append((data, sender))
            self._changed.notify()

    def refuse(self) -> None:
        """Record that no socket listens at the peer's address. An unconnected socket receives no such error."""
        if self._peer is not None:
            self._refused = True
            self._changed.notify()

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.sockets.pop(self.address, None)
            if self.process.alive:
                self.process.on_end.remove(self.close)
                self._changed.notify_all()

    def _raise_refusal(self) -> None:
        if self._refused:
            self._refused = False
            raise ConnectionRefusedError("connection refused")

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mesh:
    """Mesh of links between all ranks of one process group. The links close when the first handle is released."""

    def __init__(self, network: Network, name: str, size: int) -> None:
        self.network = network
        self.name = name
        self.size = size
        self.handles: dict[int, tuple[Process, Event]] = {}
        self.broken_at: dict[int, float] = {}
        self._reduced: dict[int, dict[int, tuple[Work, list[int]]]] = {}
        self._parcels: dict[tuple[int, int], deque[tuple[Work, torch.Tensor]]] = {}
        self._wanted: dict[tuple[int, int], deque[tuple[Work, torch.Tensor]]] = {}
        self._pending: dict[int, set[Work]] = {rank: set() for rank in range(size)}

    def join(self, rank: int, process: Process, seconds: float) -> Handle:
        """Wait until all ranks have joined. Raises ``RuntimeError`` if they do not join in time."""
        if rank in self.handles or self.broken_at:
            raise RuntimeError(f"{self.name}: the links are broken")
        opened = Event(process)
        self.handles[rank] = (process, opened)
        handle = Handle(self, rank, process)
        if len(self.handles) == self.size and not self._apart():
            for _, waiting in self.handles.values():
                waiting.set()
        opened.wait(seconds)
        if not opened.is_set() or self.broken_at:
            raise RuntimeError(f"{self.name}: not all ranks joined within {seconds:g} s")
        return handle

    def leave(self, rank: int) -> None:
        if rank in self.handles:
            self._break({rank})
            self.network.meshes.pop(self.name, None) if len(self.broken_at) == self.size else None

    def cut(self, name: str, other_name: str) -> None:
        names = {process.name for process, _ in self.handles.values()}
        if name in names and other_name in names and len(self.handles) == self.size:
            self._break(
                {rank for rank, (process, _) in self.handles.items() if process.name in (name, other_name)}
            )

    def reduce(self, work: Work, number: int, values: list[int]) -> None:
        """Record one rank's contribution to an all-reduce.

        Once all ranks have contributed, each receives the result after its own latency.
        """
        parts = self._reduced.setdefault(number, {})
        parts[work.rank] = (work, values)
        self._begin(work)
        if len(parts) == 1 and values[0] == Kind.BOUNDARY and self.network.aimed_at_first:
            self.network.aimed_at_first.popleft()(self.handles[work.rank][0].name)
        if len(parts) < self.size:
            return
        del self._reduced[number]
        if len({len(values) for _, values in parts.values()}) > 1:
            self.network.breaches.append(
                f"{self.name}: ranks are in collectives of different lengths, so gloo would terminate the process"
            )
        lowest = [min(column) for column in zip(*(values for _, values in parts.values()), strict=False)]
        scheduler = self.network.scheduler
        if self.network.aimed_at_ballots and (lowest[0], lowest[_PROGRESS]) == (Kind.BALLOT, Progress.READY):
            self.network.aimed_at_ballots.popleft()()
        if self.network.aimed and lowest[0] == Kind.BOUNDARY:
            # A layer is being committed. At this point some ranks know the outcome and others do not.
            scheduler.at(scheduler.now + self.network.latency(), self.network.aimed.popleft())
        for each, _ in parts.values():
            due = scheduler.now + self.network.latency()
            scheduler.at(due, lambda each=each: each.reduced(lowest))

    def pass_on(self, work: Work, pair: tuple[int, int], tensor: torch.Tensor, *, sent: bool) -> Work:
        """Match a rank's sends to its peer's receives, in order."""
        self._begin(work)
        own_side, peer_side = (self._parcels, self._wanted) if sent else (self._wanted, self._parcels)
        peer_queue = peer_side.setdefault(pair, deque())
        if not peer_queue:
            own_side.setdefault(pair, deque()).append((work, tensor))
            return work
        peer_work, matched = peer_queue.popleft()
        data, target = (tensor, matched) if sent else (matched, tensor)
        if data.numel() != target.numel():
            self.network.breaches.append(
                f"{self.name}: the sender's and the receiver's sizes of a parcel differ, so gloo would terminate the "
                "process"
            )
            return work
        scheduler = self.network.scheduler
        due = scheduler.now + self.network.latency() + data.numel() / _BYTES_PER_SECOND

        def arrive() -> None:
            if not work.is_completed() and not peer_work.is_completed():
                target.copy_(data)
                if self.network.flipped and scheduler.random.random() < self.network.flipped:
                    target[scheduler.random.randrange(target.numel())] ^= 1
                    scheduler.note(self.name, "a bit flips")
            work.finish(None)
            peer_work.finish(None)

        scheduler.at(due, arrive)
        return work

    def _apart(self) -> bool:
        names = sorted(process.name for process, _ in self.handles.values())
        return any(
            self.network.is_cut(name, other_name)
            for name in names
            for other_name in names
            if name < other_name
        )

    def _begin(self, work: Work) -> None:
        if work.rank in self.broken_at:
            raise RuntimeError(f"{self.name}: connection closed by peer")
        self._pending[work.rank].add(work)

    def _break(self, ranks: set[int]) -> None:
        scheduler = self.network.scheduler
        for rank in range(self.size):
            if rank in ranks:
                self._fail(rank)
            elif rank not in self.broken_at:
                # When a process learns of the break, it closes its own links to the remaining ranks.
                scheduler.at(scheduler.now + self.network.latency(), lambda rank=rank: self._fail(rank))

    def _fail(self, rank: int) -> None:
        self.broken_at.setdefault(rank, self.network.scheduler.now)
        for work in list(self._pending[rank]):
            work.finish(f"{self.name}: connection closed by peer")
        if rank in self.handles:
            self.handles[rank][1].set()


class Handle:
    """One rank's end of a mesh, with a gloo group's interface. Its links close when its last reference is dropped."""

    def __init__(self, mesh: Mesh, rank: int, process: Process) -> None:
        self._mesh = mesh
        self._rank = rank
        self._process = process
        self._number = 0
        self._leave: Callable[[], None] = lambda: mesh.leave(rank)
        process.on_end.append(self._leave)

    def __del__(self) -> None:
        if self._process.alive:
            self._process.on_end.remove(self._leave)
            self._leave()

    def allreduce(self, tensors: list[torch.Tensor], _: Any = None) -> Work:
        (tensor,) = tensors
        work = Work(self._mesh, self._rank, self._process, tensor)
        self._number += 1
        self._mesh.reduce(work, self._number, tensor.tolist())
        return work

    def send(self, tensors: list[torch.Tensor], peer: int, _: int = 0) -> Work:
        return self._mesh.pass_on(
            Work(self._mesh, self._rank, self._process), (self._rank, peer), tensors[0].clone(), sent=True
        )

    def recv(self, tensors: list[torch.Tensor], peer: int, _: int = 0) -> Work:
        return self._mesh.pass_on(
            Work(self._mesh, self._rank, self._process), (peer, self._rank), tensors[0], sent=False
        )


class Work:
    """A pending operation on a mesh, like gloo's. A wait that times out does not end the operation."""

    def __init__(self, mesh: Mesh, rank: int, process: Process, tensor: torch.Tensor | None = None) -> None:
        self.rank = rank
        self._mesh = mesh
        self._tensor = tensor
        self._ended = Event(process)
        self._error: str | None = None

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("timed out waiting for the operation to complete")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def reduced(self, values: list[int]) -> None:
        if not self.is_completed() and self._tensor is not None:
            self._tensor.numpy()[:] = values[: self._tensor.numel()]
            self.finish(None)

    def finish(self, error: str | None) -> None:
        if not self.is_completed():
            self._error = error
            self._ended.set()
            self._mesh._pending[self.rank].discard(self)


class SimulatedPeers(Peers):
    """One rank's socket in the simulation."""

    def _bind(self) -> Any:
        datagrams = self.runtime.datagrams(self._family)
        return datagrams, SimulatedLinks(self.runtime.network, datagrams.address)


class SimulatedLinks:
    """Presence links of one rank.

    A link may close while both processes are alive, and carries messages unless it is cut.
    """

    complaint = None

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        self._network = network
        self._address = address
        network.links[address] = self

    def open(self, rank: int, addresses: Any, proof: Any, hear: Callable[[bytes], bytes | None]) -> None:
        self._addresses = list(addresses)
        self.hear = hear

    def missing(self) -> list[int]:
        return []

    def send(self, rank: int, message: bytes) -> None:
        self._carry(self._addresses[rank], message, self.hear)

    def ended(self, rank: int) -> bool:
        """Return True if the link has closed and cannot be reopened.

        A link cannot be reopened if a firewall blocks it or the process is gone.
        """
        peer_address = self._addresses[rank]
        return peer_address not in self._network.sockets or self._network.links_ended(
            self._address, peer_address
        )

    def close(self) -> None:
        self._network.links.pop(self._address, None)

    def _carry(
        self, peer_address: tuple[str, int], message: bytes, hear_reply: Callable[[bytes], Any]
    ) -> None:
        network = self._network

        def arrive() -> None:
            peer_links = network.links.get(peer_address)
            if peer_links is None or not network.links_carry(self._address, peer_address):
                return
            reply = peer_links.hear(message)
            if reply is not None:
                network.scheduler.at(network.scheduler.now + network.latency(), lambda: hear_reply(reply))

        network.scheduler.at(network.scheduler.now + network.latency(), arrive)


class SimulatedGroup(AgentGroup):
    """An agent group that uses the simulated links."""

    network: Network
    formation: str

    def process_group(self, name: str, timeout: timedelta = timedelta(seconds=60)) -> Any:
        named = f"{self.formation}/{name}"
        mesh = self.network.meshes.get(named)
        if mesh is None:
            mesh = self.network.meshes[named] = Mesh(self.network, named, self.size)
        return mesh.join(self.rank, self.peers.runtime, timeout.total_seconds())
