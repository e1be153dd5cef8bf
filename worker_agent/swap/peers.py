"""Questions and answers between the agents of a formation, authenticated with a secret that only its ranks know.

There is no server. Every rank keeps its own values and answers for itself, so two ranks never depend on a third.

Questions are sent as datagrams. If a peer does not answer, the question is also sent over its presence link, because a
network may drop one kind of traffic but not the other. A datagram without a valid HMAC is dropped unread, so a stranger
can neither ask nor answer questions, nor exhaust memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.presence import PresenceLinks

_log = logging.getLogger("eplb.agent")

Address: TypeAlias = tuple[str, int]
"""Host and port."""

_MAC_BYTES = 32
_NONCE_BYTES = 16
_MAX_DATAGRAM = 60_000
"""Maximum size of a datagram in bytes. To open their links, libraries exchange values of only a few hundred bytes."""
_MAX_VALUES = 4096
"""Maximum number of values in a store. A lane needs one or two values per pair of ranks."""
_MAX_HOSTS = 4096
_MAX_PORTS = 64
"""Maximum number of ports to try when looking for one that is free for both datagrams and links."""
_RETRY_SECONDS = 0.05
_COMPLAINT_SECONDS = 60.0
_GONE_SECONDS = 30.0
"""Minimum time for which a peer must seem gone to count as gone. Firewalls and proxies restart faster than that."""
_QUESTION, _ANSWER, _CLAIM = b"q", b"a", b"c"
"""Message kinds. The kind is part of the authenticated bytes."""


class PeerGoneError(ConnectionError):
    """Raised if a peer's process seems to have ended: its port, its presence link and the vote link are closed.

    A network fault can have the same effect. ``Inquiry`` therefore waits before it raises this error.
    """


class Peers:
    """Datagram socket and presence links of one rank. A separate thread answers the peers' questions.

    Parameters
    ----------
    host
        Address of the interface to bind to.
    runtime
        Clock, threads and sockets.

    Attributes
    ----------
    address : tuple of str and int
        Host and port of this rank, for both datagrams and links.
    rank : int
        This rank; set by ``open``.
    others : frozenset of int
        All other ranks; set by ``open``.
    hosts : set of str
        Source addresses of questions from members of the formation.
    vote_link_ended : callable
        Callable that returns True if the ranks' last vote link is closed. While it is open, no peer counts as gone.
    """

    rank: int
    others: frozenset[int]

    def __init__(self, host: str, runtime: Runtime = REAL) -> None:
        self.host = host
        self.runtime = runtime
        self.hosts: set[str] = set()
        self.vote_link_ended: Callable[[], bool] = lambda: True
        self._silent: set[int] = set()
        """Peers that did not answer the last datagram. The next question to them is also sent over their link."""
        self._link_answers: dict[bytes, bytes | None] = {}
        """Answers received over links, keyed by the question's nonce; ``None`` until an answer arrives."""
        self._last_error: tuple[float, str] | None = None
        self._closed = runtime.event()
        self._family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]
        self._socket, self._links = self._bind()
        self.address: Address = self._socket.getsockname()[:2]

    def _bind(self) -> tuple[socket.socket, PresenceLinks]:
        datagrams, listening = _bind_sockets(self._family, self.host)
        return datagrams, PresenceLinks(listening)

    @property
    def complaint(self) -> str | None:
        """The answering thread's last error, if it is recent; otherwise any problem with the links, or ``None``."""
        error = self._last_error
        if error is not None and self.runtime.now() - error[0] <= _COMPLAINT_SECONDS:
            return error[1]
        return self._links.complaint

    def open(
        self, secret: bytes, rank: int, addresses: Sequence[Address], answer: Callable[[bytes], bytes | None]
    ) -> None:
        """Start answering the formation's members and opening links to them.

        Parameters
        ----------
        secret
            Secret of the formation.
        rank
            This rank.
        addresses
            Addresses of all members, in rank order.
        answer
            Callable that returns the answer to a question, or ``None`` if there is none yet. It runs on this object's
            thread.
        """
        self.rank = rank
        self._secret = secret
        self._answer = answer
        self._addresses = {peer: address for peer, address in enumerate(addresses) if peer != rank}
        self.others = frozenset(self._addresses)
        self.runtime.spawn("eplb-peers", self._serve)
        self._links.open(rank, addresses, self.proof, self._on_link_message)

    def unlinked(self) -> list[int]:
        """Wait up to a minute for the links to all peers to open. Return the peers without a link."""
        return self._links.missing()

    def ask(self, ranks: Iterable[int], question: bytes, seconds: float) -> dict[int, bytes]:
        """Ask peers a question, retrying until all have answered or ``seconds`` have passed.

        Parameters
        ----------
        ranks
            Peers to ask.
        question
            The question.
        seconds
            Time limit.

        Returns
        -------
        dict of int to bytes
            Answers keyed by rank. Peers that have not answered are missing.

        Raises
        ------
        PeerGoneError
            If a peer has not answered and its process seems to have ended.
        """
        waiting = set(ranks)
        answers: dict[int, bytes] = {}
        sockets: dict[int, tuple[socket.socket, bytes]] = {}
        with contextlib.ExitStack() as open_sockets:
            open_sockets.callback(
                lambda: [self._link_answers.pop(nonce, None) for _, nonce in sockets.values()]
            )
            for rank in waiting:
                client = open_sockets.enter_context(self.runtime.datagrams(self._family))
                # A connected socket receives only this peer's datagrams, and reports an error if its port is closed.
                client.connect(self._addresses[rank])
                client.settimeout(_RETRY_SECONDS)
                # All attempts share one nonce, so an answer that arrives after a retry still counts.
                sockets[rank] = client, secrets.token_bytes(_NONCE_BYTES)
                self._link_answers[sockets[rank][1]] = None
            end = self.runtime.now() + seconds
            while waiting and (remaining := end - self.runtime.now()) > 0:
                for rank in sorted(waiting):
                    attempt_seconds = min(remaining, _RETRY_SECONDS)
                    answer = self._ask_once(rank, *sockets[rank], question, attempt_seconds)
                    if answer is not None:
                        answers[rank] = answer
                        waiting.discard(rank)
        return answers

    def announce(self, statement: bytes, seconds: float) -> None:
        """Send a statement to every peer repeatedly until the peer acknowledges it, its process ends, or time runs out.

        Parameters
        ----------
        statement
            Message that peers answer only with an acknowledgement.
        seconds
            Time limit.
        """
        waiting = set(self.others)
        end = self.runtime.now() + seconds
        while waiting:
            for rank in sorted(waiting):
                if self.runtime.now() >= end:
                    return
                try:
                    waiting -= self.ask([rank], statement, _RETRY_SECONDS).keys()
                except PeerGoneError:
                    waiting.discard(rank)

    def proof(self, claim: bytes) -> bytes:
        """Return the HMAC of a claim, which only members of the formation can compute."""
        return self._seal(_CLAIM, claim)[:_MAC_BYTES]

    def close(self) -> None:
        """Stop answering, and close the socket and all links."""
        self._closed.set()
        # This wakes the thread that is waiting on the socket, but raises an error because the socket is not connected.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._links.close()

    def _ask_once(
        self, rank: int, client: socket.socket, nonce: bytes, question: bytes, seconds: float
    ) -> bytes | None:
        """Send a question once and wait for the answer. If the peer was silent, also send the question over the link.

        Returns ``None`` if there is no answer within ``seconds``.
        """
        began = self.runtime.now()
        message = self._seal(_QUESTION, nonce + question)
        if rank in self._silent:
            self._links.send(rank, message)
        try:
            client.send(message)
            while (remaining := seconds - (self.runtime.now() - began)) > 0:
                client.settimeout(remaining)
                answer = self._unseal(_ANSWER, client.recv(_MAX_DATAGRAM))
                if answer is not None and answer.startswith(nonce):
                    self._silent.discard(rank)
                    return answer[_NONCE_BYTES:]
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and self._is_gone(rank):
                raise PeerGoneError(
                    f"rank {rank} has exited: nothing is listening on {client.getpeername()[:2]} any more"
                ) from error
            self.runtime.sleep(max(0.0, seconds - (self.runtime.now() - began)))
        self._silent.add(rank)
        return self._link_answers.get(nonce)

    def _is_gone(self, rank: int) -> bool:
        """Return True if the process of a peer that rejects datagrams seems to have ended.

        Firewalls also reject datagrams, and proxies also close presence links. The vote link must therefore be closed
        as well.
        """
        return self._links.ended(rank) and self.vote_link_ended()

    def _on_link_message(self, message: bytes) -> bytes | None:
        """Handle a message from a link: record an answer, or return the reply to a question."""
        body = self._unseal(_ANSWER, message)
        if body is not None:
            nonce = body[:_NONCE_BYTES]
            if nonce in self._link_answers:
                self._link_answers[nonce] = body[_NONCE_BYTES:]
            return None
        return self._answer_to(message)

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                self._serve_once()
            except Exception as error:
                # Keep answering, because a peer may need to know whether this rank has committed.
                complaint = f"failed to answer a peer: {type(error).__name__}: {error}"
                if not self._closed.is_set():
                    if complaint != self.complaint:
                        _log.exception("rank %d: failed to answer a peer", self.rank)
                    self._last_error = self.runtime.now(), complaint
                self._closed.wait(_RETRY_SECONDS)

    def _serve_once(self) -> None:
        datagram, sender = self._socket.recvfrom(_MAX_DATAGRAM)
        if self._unseal(_QUESTION, datagram) is not None and len(self.hosts) < _MAX_HOSTS:
            self.hosts.add(sender[0])
        answer = self._answer_to(datagram)
        if answer is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(answer, sender)

    def _answer_to(self, message: bytes) -> bytes | None:
        """Return the sealed answer to a member's question; ``None`` if none exists yet, or for any other message."""
        body = self._unseal(_QUESTION, message)
        if body is None or len(body) < _NONCE_BYTES:
            return None
        answer = self._answer(body[_NONCE_BYTES:])
        return None if answer is None else self._seal(_ANSWER, body[:_NONCE_BYTES] + answer)

    def _seal(self, kind: bytes, body: bytes) -> bytes:
        """Return a message body, prefixed with its HMAC."""
        return hmac.digest(self._secret, kind + body, hashlib.sha256) + body

    def _unseal(self, kind: bytes, message: bytes) -> bytes | None:
        """Return the body of a sealed message, or ``None`` if its HMAC is invalid or its kind differs."""
        body = message[_MAC_BYTES:]
        return body if hmac.compare_digest(message, self._seal(kind, body)) else None


def seconds_until_gone(patience: float) -> float:
    """Return how long a peer must seem gone before it counts as gone: 30 s, or half of the patience if that is less."""
    return min(_GONE_SECONDS, patience / 2)


class Inquiry:
    """Inquiry about one vote, which asks peers repeatedly.

    A firewall and a broken vote link can make a live peer seem gone. A peer therefore counts as gone only after it has
    seemed gone for ``seconds_until_gone(patience)`` without interruption.

    Parameters
    ----------
    peers
        The peers to ask.
    patience
        Maximum time to wait for a peer that does not answer, in seconds.
    """

    def __init__(self, peers: Peers, patience: float) -> None:
        self._peers = peers
        self._gone_seconds = seconds_until_gone(patience)
        self._gone_since: dict[int, float] = {}

    def ask(self, rank: int, question: bytes, seconds: float) -> bytes | None:
        """Ask a peer and return its answer, or ``None`` if it does not answer within ``seconds``.

        Raises ``PeerGoneError`` if the peer counts as gone.
        """
        try:
            answer = self._peers.ask([rank], question, seconds).get(rank)
        except PeerGoneError:
            now = self._peers.runtime.now()
            if now - self._gone_since.setdefault(rank, now) >= self._gone_seconds:
                raise
            self._peers.runtime.sleep(_RETRY_SECONDS)
            return None
        self._gone_since.pop(rank, None)
        return answer


def _bind_sockets(family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket]:
    """Return a datagram socket and a listening socket that are bound to the same free port on an interface."""
    for attempt in range(_MAX_PORTS):
        listening = socket.create_server((host, 0), family=family, backlog=_MAX_HOSTS)
        datagrams = socket.socket(family, socket.SOCK_DGRAM)
        try:
            datagrams.bind((host, listening.getsockname()[1]))
            return datagrams, listening
        except OSError as error:
            datagrams.close()
            listening.close()
            if error.errno != errno.EADDRINUSE or attempt == _MAX_PORTS - 1:
                raise
    raise AssertionError("unreachable")


class PeerStore(dist.Store):
    """Store that process groups use to open their links.

    Each rank keeps the values that it sets, and asks its peers for all other values.

    Parameters
    ----------
    peers
        The peers to ask.
    timeout
        Default time limit for ``get`` and ``wait``.
    """

    def __init__(self, peers: Peers, timeout: timedelta) -> None:
        super().__init__()
        self._peers = peers
        self._timeout = timeout
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, Callable[[bytes], None]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watched(self, prefix: str, watch: Callable[[bytes], None]) -> Iterator[None]:
        """Return a context manager that passes to ``watch`` the values that this rank sets for keys with ``prefix``.

        Parameters
        ----------
        prefix
            Prefix of the keys to watch.
        watch
            Called with each value that this rank sets for such a key, before any other rank can read it.
        """
        self._watches[prefix] = watch
        try:
            yield
        finally:
            del self._watches[prefix]

    def held(self, key: str) -> bytes | None:
        """Return the value that this rank holds for a key, or ``None``."""
        with self._lock:
            return self._values.get(key)

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Store a value for all ranks to read. Evict the oldest values if there are too many."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        for prefix, watch in tuple(self._watches.items()):
            if key.startswith(prefix):
                watch(data)
        with self._lock:
            while len(self._values) >= _MAX_VALUES:
                self._values.pop(next(iter(self._values)))
            self._values[key] = data

    def get(self, key: str) -> bytes:
        """Wait until a rank has set a key, and return its value. Raises ``TimeoutError`` after the time limit."""
        return self._wait_for(key, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have been set, and copy their values. Raises ``TimeoutError`` after the time limit."""
        for key in keys:
            self.set(key, self._wait_for(key, timeout or self._timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys have been set."""
        return all(self._look_up(key) is not None for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time limit for ``get`` and ``wait``."""
        self._timeout = timeout

    def _wait_for(self, key: str, timeout: timedelta) -> bytes:
        end = self._peers.runtime.now() + timeout.total_seconds()
        while (value := self._look_up(key)) is None:
            if self._peers.runtime.now() > end:
                raise TimeoutError(f"no rank set {key!r} within {timeout.total_seconds():g} s")
        return value

    def _look_up(self, key: str) -> bytes | None:
        """Return a key's value. If this rank does not hold it, ask each peer once."""
        value = self.held(key)
        if value is not None:
            return value
        # Libraries end a key with the number of the rank that sets it, so ask that rank first.
        owner = key.rpartition("/")[2]
        for rank in sorted(self._peers.others, key=lambda rank: (str(rank) != owner, rank)):
            answer = self._peers.ask([rank], b"v" + key.encode(), _RETRY_SECONDS).get(rank, b"")
            if answer[:1] == b"+":
                return answer[1:]
        self._peers.runtime.sleep(_RETRY_SECONDS / 10)
        return None
