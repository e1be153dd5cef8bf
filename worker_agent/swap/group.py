"""The agents' own formation: its members, their secret, and process groups for votes and transfers.

Nothing of the host engine's groups is used after the agents have met, so the agents can neither reorder nor delay the
model's collectives.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from worker_agent.swap.commit_register import CommitRegister, FatalSwitchError
from worker_agent.swap.link_guard import LinkGuard
from worker_agent.swap.peers import Address, PeerGoneError, Peers, PeerStore

_OPEN_TIMEOUT = timedelta(seconds=60)
_SECRET_BYTES = 32
_ANNOUNCE_SECONDS = 1.0
_POSITION_SECONDS = 0.5
_INSTALL_POLL_SECONDS = 0.005
_MAX_REASON = 500


class RendezvousError(RuntimeError):
    """The ranks do not fit together or cannot reach each other; raised on all, before any serves a token."""


class AgentGroup:
    """R agents of one EP group, joined without a server.

    ``failure`` is the reason for which a rank of the formation, this one or another, must not serve any more;
    ``installed`` the last vote whose layer is in place; ``formed`` the number of the attempt that formed the present
    votes; ``left`` is true once another rank makes a later attempt; ``position`` returns this rank's calls and forward
    passes for peers that ask; ``checksum`` returns the checksum of a live expert, given its layer and expert index.
    ``patience`` is the longest wait, in seconds, for a rank that may have committed a layer.
    """

    def __init__(
        self, peers: Peers, secret: bytes, rank: int, addresses: Sequence[Address], patience: float
    ) -> None:
        self.rank, self.size = rank, len(addresses)
        self.peers = peers
        self.store = PeerStore(peers, _OPEN_TIMEOUT)
        self.register = CommitRegister(peers, patience, peers.runtime)
        self.failure: str | None = None
        self.installed = 0
        self.formed = 0
        self.left = False
        self.position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.checksum: Callable[[int, int], int | None] = lambda _layer, _expert: None
        self._patience = patience
        peers.open(secret, rank, addresses, self._answer)

    @classmethod
    def join(
        cls, host_group: dist.ProcessGroup, node: str, address: str, facts: Any, patience: float = 60.0
    ) -> tuple[AgentGroup, list[Any]]:
        """Join the ranks of ``host_group``; return the group and all ranks' ``facts``. A collective.

        The host's group (gloo) is used only here. What it carries is trusted: the formation's secret is agreed over it.
        The other ranks reach this one at ``address``; where all are on one ``node`` they meet on the loopback address.
        Raises ``RendezvousError`` on all ranks alike, where one cannot bind to its address or reach another rank.
        ``patience`` is that of the group.
        """
        gathered = _gathered(host_group, (node, secrets.token_bytes(_SECRET_BYTES), facts))
        one_node = len({there for there, _, _ in gathered}) == 1
        complaint, peers = None, None
        try:
            peers = Peers("127.0.0.1" if one_node else _reachable(address))
        except OSError as error:
            complaint = f"cannot bind the agents' socket to {address}: {error}"
        addresses = _gathered(host_group, peers and peers.address)
        agree(host_group, complaint)
        assert peers is not None
        secret = hashlib.sha256(b"".join(part for _, part, _ in gathered)).digest()
        group = cls(peers, secret, dist.get_rank(host_group), addresses, patience)
        reached = peers.ask(peers.others, b"v", _OPEN_TIMEOUT.total_seconds())
        unreached = [addresses[other] for other in sorted(peers.others - reached.keys())]
        agree(host_group, f"cannot reach {unreached} (UDP)" if unreached else None)
        unlinked = [addresses[other] for other in peers.unlinked()]
        agree(host_group, f"cannot reach {unlinked} (TCP)" if unlinked else None)
        return group, [theirs for _, _, theirs in gathered]

    def process_group(self, name: str, timeout: timedelta = _OPEN_TIMEOUT) -> dist.ProcessGroup:
        """Open a new gloo group of these ranks; every rank asks for it by the same name, in its own time.

        ``timeout`` bounds its opening, and what is under way in it where nobody waits for it with another bound. Raises
        ``RuntimeError`` where not all ranks come, or what has linked itself to this rank is none.
        """
        # torch's stubs do not list the options.
        library: Any = dist.ProcessGroupGloo
        options = library._Options()
        options._timeout = timeout
        options._devices = [library.create_device(hostname=self.peers.host)]
        prefix = f"eplb/{name}"
        with LinkGuard(lambda: tuple(self.peers.hosts)) as guard, self.store.watched(prefix, guard.published):
            backend = library(dist.PrefixStore(prefix, self.store), self.rank, self.size, options)
            self._prove_links(backend, name, timeout)
        # A backend has a process group's methods; torch's type stubs do not list them.
        return cast("dist.ProcessGroup", backend)

    def _prove_links(self, backend: Any, name: str, timeout: timedelta) -> None:
        """Raise ``RuntimeError`` where at the other end of a link is not the rank that it is for."""

        def proofs(claim: Callable[[int], str]) -> torch.Tensor:
            proven = (self.peers.proof(claim(other).encode()) for other in range(self.size))
            return torch.frombuffer(bytearray(b"".join(proven)), dtype=torch.uint8)

        sent = proofs(lambda other: f"{name}: from {self.rank} to {other}")
        expected = proofs(lambda other: f"{name}: from {other} to {self.rank}")
        heard = torch.zeros_like(sent)
        # Each rank's part comes over the link to it, and over no other.
        backend.alltoall_base(heard, sent, [], []).wait(timeout)
        wrong = (heard != expected).view(self.size, -1).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(
                f"what has linked itself to rank {self.rank} as rank {wrong[0]} is none of its peers"
            )

    def fail(self, reason: str) -> None:
        """Serve no more: the others hear of it and end as well, unless it was they who reported it."""
        if self.failure is None:
            self.failure = reason[:_MAX_REASON]
            self.peers.announce(b"f" + self.failure.encode(), _ANNOUNCE_SECONDS)

    def wait_for_installs(self, vote: int) -> None:
        """Wait until every rank has in place what a vote committed, where links broke before all had confirmed it.

        A rank whose process has ended is not waited for: without it the model serves no other token. Raises
        ``FatalSwitchError`` where one has failed, or is silent for as long as the model would wait for it.
        """
        end = self.peers.runtime.now() + self._patience
        waiting = set(self.peers.others)
        while waiting and self.failure is None:
            for peer in sorted(waiting):
                try:
                    answer = self.peers.ask([peer], b"i%d" % vote, _POSITION_SECONDS).get(peer, b"-")
                except PeerGoneError:
                    answer = b"+"
                if answer[:1] == b"!":
                    self.failure = self.failure or answer[1:].decode()
                elif answer == b"+":
                    waiting.discard(peer)
            if waiting and self.peers.runtime.now() > end:
                raise FatalSwitchError(
                    f"vote {vote} committed a layer that ranks {sorted(waiting)} have not installed within "
                    f"{self._patience:g} s"
                )
            if waiting and self.failure is None:
                self.peers.runtime.sleep(_INSTALL_POLL_SECONDS)
        if self.failure is not None:
            raise FatalSwitchError(self.failure)

    def positions(self) -> dict[int, tuple[int, int]]:
        """Ask the others for their calls and forward passes; return those of the ones that answer."""
        try:
            answers = self.peers.ask(self.peers.others, b"p", _POSITION_SECONDS)
        except PeerGoneError:
            return {}
        split = {rank: answer.split() for rank, answer in answers.items()}
        return {rank: (int(calls), int(forward)) for rank, (calls, forward) in split.items()}

    def close(self) -> None:
        """Answer the others for as long as they may ask what this rank has committed, then no more."""
        self.peers.runtime.later(self._patience, self.peers.close)

    def _answer(self, question: bytes) -> bytes | None:
        kind, subject = question[:1], question[1:].decode()
        if kind == b"d":
            verdict = self.register.answer(int(subject))
            return None if verdict is None else verdict.value
        if kind == b"t":
            # A datagram may arrive late, or twice: an attempt that has formed the votes, or came before, is no news.
            self.left |= int(subject) > self.formed
            subject = f"attempt/{self.rank}"
        if kind == b"f":
            self.failure = self.failure or subject
            return b"+"
        if kind == b"c":
            checksum = self.checksum(*map(int, subject.split()))
            return b"-" if checksum is None else b"+%d" % checksum
        if kind == b"p":
            return b"%d %d" % self.position()
        if self.failure is not None:
            return b"!" + self.failure.encode()
        if kind == b"i":
            return b"+" if self.installed >= int(subject) else b"-"
        value = self.store.held(subject)
        return b"-" if value is None else b"+" + value


def _reachable(address: str) -> str:
    """Resolve a name to an interface's address; raises ``OSError`` where no other host could reach it."""
    found = str(socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0])
    if ipaddress.ip_address(found).is_loopback:
        raise OSError(
            f"it resolves to {found}; set data_host to an address at which other hosts reach this one"
        )
    return found


def agree(host_group: dist.ProcessGroup, complaint: str | None) -> None:
    """Raise ``RendezvousError`` on all ranks where any has a complaint. A collective."""
    for rank, theirs in enumerate(_gathered(host_group, complaint)):
        if theirs is not None:
            raise RendezvousError(f"rank {rank}: {theirs}")


def _gathered(host_group: dist.ProcessGroup, own: Any) -> list[Any]:
    """Objects of all ranks, in order."""
    every: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(every, own, group=host_group)
    return every
