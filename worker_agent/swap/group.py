"""The agents' own group: its members, their shared secret, and the process groups for votes and transfers.

Once the agents have met, they no longer use the host engine's process groups, so they can neither reorder nor delay the
model's collectives.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from worker_agent.settings import bare_name_warning
from worker_agent.swap.commit_register import CommitRegister, FatalSwitchError
from worker_agent.swap.link_guard import LinkGuard
from worker_agent.swap.peers import Address, Inquiry, PeerGoneError, Peers, PeerStore

_log = logging.getLogger("eplb.agent")

_OPEN_TIMEOUT = timedelta(seconds=60)
_SECRET_BYTES = 32
_ANNOUNCE_SECONDS = 1.0
_POSITION_SECONDS = 0.5
_INSTALL_POLL_SECONDS = 0.005
_MAX_REASON = 500
"""Maximum length of a failure reason that is sent to peers, in characters."""


class RendezvousError(RuntimeError):
    """The ranks are incompatible or cannot reach each other. All ranks raise it before any of them serves a token."""


class AgentGroup:
    """Group of the agents of all R ranks, formed without a server.

    Parameters
    ----------
    peers
        This rank's connection to its peers.
    secret
        Secret shared by all members.
    rank
        Index of this rank.
    addresses
        Address of each rank, in order.
    patience
        Maximum time to wait for a rank that may have committed a layer, in seconds.

    Attributes
    ----------
    rank
        Index of this rank.
    size
        Number of ranks.
    peers
        Request/response channel between the ranks.
    store
        Store for values that ranks exchange to open process groups.
    register
        Register of this rank's latest vote results.
    failure
        Reason why a rank of the group, either this one or a peer, must no longer serve; ``None`` if all may serve.
    installed_vote
        Number of the last vote whose layers this rank has installed.
    formed_attempt
        Number of the attempt that opened the current vote link.
    peer_left
        True once a peer has attempted to open a newer vote link.
    position
        Callable that returns the number of calls and the number of forward passes that this rank has counted.
    checksum
        Callable that returns the checksum of a live expert, given the layer and expert indices; ``None`` if unknown.
    """

    def __init__(
        self, peers: Peers, secret: bytes, rank: int, addresses: Sequence[Address], patience: float
    ) -> None:
        self.rank = rank
        self.size = len(addresses)
        self.peers = peers
        self.store = PeerStore(peers, _OPEN_TIMEOUT)
        self.register = CommitRegister(peers, patience, peers.runtime)
        self.failure: str | None = None
        self.installed_vote = 0
        self.formed_attempt = 0
        self.peer_left = False
        self.position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.checksum: Callable[[int, int], int | None] = lambda _layer, _expert: None
        self._patience = patience
        peers.open(secret, rank, addresses, self._answer)

    @classmethod
    def join(
        cls, host_group: dist.ProcessGroup, node: str, address: str, facts: Any, patience: float = 60.0
    ) -> tuple[AgentGroup, list[Any]]:
        """Form the group from the ranks of the host's group. This is a collective.

        Parameters
        ----------
        host_group
            The host's gloo group. It is used only during this call, and must be trusted because the secret is sent over
            it.
        node
            Host of this rank. If all ranks are on one node, they use the loopback address.
        address
            Address at which the other ranks can reach this one.
        facts
            Value to send to all ranks.
        patience
            Maximum time to wait for a rank that may have committed a layer, in seconds.

        Returns
        -------
        tuple of AgentGroup and list
            The group, and the ``facts`` of all ranks in order.

        Raises
        ------
        RendezvousError
            On all ranks, if any rank cannot bind to its address or cannot reach another rank.
        """
        gathered = _all_gather(host_group, (node, secrets.token_bytes(_SECRET_BYTES), facts))
        one_node = len({rank_node for rank_node, _, _ in gathered}) == 1
        warning = None if one_node else bare_name_warning(address)
        if warning is not None:
            _log.warning("rank %d: %s", dist.get_rank(host_group), warning)
        complaint: str | None = None
        peers: Peers | None = None
        try:
            peers = Peers("127.0.0.1" if one_node else _reachable(address))
        except OSError as error:
            complaint = f"cannot bind the agents' socket to {address}: {error}"
        addresses = _all_gather(host_group, peers and peers.address)
        agree(host_group, complaint)
        assert peers is not None
        secret = hashlib.sha256(b"".join(share for _, share, _ in gathered)).digest()
        group = cls(peers, secret, dist.get_rank(host_group), addresses, patience)
        answers = peers.ask(peers.others, b"v", _OPEN_TIMEOUT.total_seconds())
        unreached = [addresses[peer] for peer in sorted(peers.others - answers.keys())]
        agree(host_group, f"cannot reach {unreached} over UDP" if unreached else None)
        unlinked = [addresses[peer] for peer in peers.unlinked()]
        agree(host_group, f"cannot reach {unlinked} over TCP" if unlinked else None)
        return group, [rank_facts for _, _, rank_facts in gathered]

    def process_group(self, name: str, timeout: timedelta = _OPEN_TIMEOUT) -> dist.ProcessGroup:
        """Open a new gloo group of all ranks. Every rank calls this with the same name, in any order.

        Parameters
        ----------
        name
            Name of the group.
        timeout
            Time limit for opening the group and, by default, for each operation on it.

        Raises
        ------
        RuntimeError
            If not all ranks join in time, or if a process that is not a member has connected to this rank.
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
        """Raise ``RuntimeError`` if any link leads to the wrong rank."""

        def proofs(claim: Callable[[int], str]) -> torch.Tensor:
            proof_of_rank = (self.peers.proof(claim(rank).encode()) for rank in range(self.size))
            return torch.frombuffer(bytearray(b"".join(proof_of_rank)), dtype=torch.uint8)

        sent = proofs(lambda rank: f"{name}: from {self.rank} to {rank}")
        expected = proofs(lambda rank: f"{name}: from {rank} to {self.rank}")
        received = torch.zeros_like(sent)
        # A rank's proof can only arrive over the link to that rank.
        backend.alltoall_base(received, sent, [], []).wait(timeout)
        wrong = (received != expected).view(self.size, -1).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(
                f"a process outside the group connected to rank {self.rank}, claiming to be rank {wrong[0]}"
            )

    def fail(self, reason: str) -> None:
        """Record that this rank must no longer serve, and notify the peers unless a failure is already known."""
        if self.failure is None:
            self.failure = reason[:_MAX_REASON]
            self.peers.announce(b"f" + self.failure.encode(), _ANNOUNCE_SECONDS)

    def wait_for_installs(self, vote: int) -> None:
        """Wait until all ranks have installed the part that a vote committed.

        This is used if the vote link broke, or timed out, before all ranks had confirmed the install. Without a peer's
        confirmation, this rank must not serve: the peer may still be alive and may have aborted the vote.

        Raises
        ------
        FatalSwitchError
            If a rank has failed, has aborted the vote, counts as gone, or has been silent for as long as the model
            would wait for it.
        """
        end = self.peers.runtime.now() + self._patience
        inquiry = Inquiry(self.peers, self._patience)
        waiting = set(self.peers.others)
        while waiting and self.failure is None:
            for peer in sorted(waiting):
                if self._has_installed(inquiry, peer, vote):
                    waiting.discard(peer)
            if waiting and self.peers.runtime.now() > end:
                raise FatalSwitchError(
                    f"vote {vote} committed layers that ranks {sorted(waiting)} did not install within "
                    f"{self._patience:g} s"
                )
            if waiting and self.failure is None:
                self.peers.runtime.sleep(_INSTALL_POLL_SECONDS)
        if self.failure is not None:
            raise FatalSwitchError(self.failure)

    def _has_installed(self, inquiry: Inquiry, peer: int, vote: int) -> bool:
        """Return True if a peer confirms its install of the part that a vote committed. Record any failure it reports.

        Raises ``FatalSwitchError`` if the peer has closed its agent without the install, or counts as gone.
        """
        if peer in self.register.departed:
            if self.register.departed[peer] >= vote:
                return True
            raise FatalSwitchError(
                f"rank {peer} closed its agent without installing the layers of vote {vote}"
            )
        try:
            answer = inquiry.ask(peer, b"i%d" % vote, _POSITION_SECONDS)
        except PeerGoneError as error:
            raise FatalSwitchError(
                f"rank {peer} has exited or cannot be reached, and did not confirm that it installed the layers of "
                f"vote {vote}"
            ) from error
        if answer is not None and answer[:1] == b"!":
            self.failure = self.failure or answer[1:].decode()
        return answer == b"+"

    def positions(self) -> dict[int, tuple[int, int]]:
        """Ask the peers for their positions, and return the call and forward-pass counts of each rank that answers."""
        try:
            answers = self.peers.ask(self.peers.others, b"p", _POSITION_SECONDS)
        except PeerGoneError:
            return {}
        numbers = {rank: answer.split() for rank, answer in answers.items()}
        return {rank: (int(calls), int(forward)) for rank, (calls, forward) in numbers.items()}

    def close(self) -> None:
        """Tell the peers which vote this rank installed last, and close the socket after ``patience`` seconds.

        Until then, peers may still ask about this rank's commits.
        """
        if self.failure is None:
            self.peers.announce(b"l%d %d" % (self.rank, self.installed_vote), _ANNOUNCE_SECONDS)
        self.peers.runtime.later(self._patience, self.peers.close)

    def _answer(self, question: bytes) -> bytes | None:
        """Return the answer to a peer's question, or ``None`` if there is none. The question's first byte is its kind.

        - ``d``: this rank's verdict on a vote
        - ``t``: this rank's attempt to open a vote link, given the peer's attempt
        - ``f``: the peer reports a failure, which this rank records
        - ``c``: checksum of a live expert
        - ``p``: this rank's position
        - ``i``: ``+`` if this rank has installed the part of a vote
        - ``l``: the peer closes its agent; this rank records the peer's rank and the last vote that it has installed
        - ``v``: a value in this rank's store

        A rank that knows of a failure answers ``t``, ``i`` and ``v`` with ``!`` followed by the reason.
        """
        kind = question[:1]
        subject = question[1:].decode()
        if kind == b"d":
            verdict = self.register.answer(int(subject))
            return None if verdict is None else verdict.value
        if kind == b"t":
            # A datagram may arrive late or twice, so ignore attempts up to the one that opened the current link.
            self.peer_left |= int(subject) > self.formed_attempt
            subject = f"attempt/{self.rank}"
        if kind == b"f":
            self.failure = self.failure or subject
            return b"+"
        if kind == b"l":
            peer, installed_vote = map(int, subject.split())
            self.register.departed[peer] = installed_vote
            return b"+"
        if kind == b"c":
            checksum = self.checksum(*map(int, subject.split()))
            return b"-" if checksum is None else b"+%d" % checksum
        if kind == b"p":
            return b"%d %d" % self.position()
        if kind == b"i" and self.register.aborted(int(subject)):
            self.failure = (
                self.failure or f"rank {self.rank} aborted vote {subject}, which another rank committed"
            )
        if self.failure is not None:
            return b"!" + self.failure.encode()
        if kind == b"i":
            return b"+" if self.installed_vote >= int(subject) else b"-"
        value = self.store.held(subject)
        return b"-" if value is None else b"+" + value


def _reachable(address: str) -> str:
    """Resolve a name to an IP address. Raises ``OSError`` if the address is not reachable from other hosts."""
    resolved = str(socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0])
    if ipaddress.ip_address(resolved).is_loopback:
        raise OSError(
            f"{address} resolves to the loopback address {resolved}; set data_host to an address that other hosts can "
            "reach"
        )
    return resolved


def agree(host_group: dist.ProcessGroup, complaint: str | None) -> None:
    """Raise ``RendezvousError`` on all ranks if any of them has a complaint. This is a collective."""
    for rank, rank_complaint in enumerate(_all_gather(host_group, complaint)):
        if rank_complaint is not None:
            raise RendezvousError(f"rank {rank}: {rank_complaint}")


def _all_gather(host_group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. This is a collective."""
    gathered: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(gathered, value, group=host_group)
    return gathered
