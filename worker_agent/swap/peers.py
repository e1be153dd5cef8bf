"""Questions between the agents of one formation, keyed by a secret that only its ranks hold.

They travel as datagrams. A peer that does not answer these is asked over the link to it as well: a network may carry
the one and not the other.

There is no server. Every rank keeps what it has to say and answers for itself, so what one rank needs to know hangs on
no third one. A datagram without the right HMAC is dropped unread: who is no member can neither ask, nor answer, nor
fill memory.
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

_MAC_BYTES = 32
_NONCE_BYTES = 16
_MAX_DATAGRAM = 60_000
"""Bytes of a datagram; what libraries exchange to open their links is a few hundred."""
_MAX_VALUES = 4096
"""Values kept in a store; a lane needs one or two per pair of ranks."""
_MAX_HOSTS = 4096
_MAX_PORTS = 64
"""Ports tried for one that is free for datagrams and for links."""
_RETRY_SECONDS = 0.05
_COMPLAINT_SECONDS = 60.0
_ASKED, _ANSWERED, _CLAIMED = b"q", b"a", b"c"


class PeerGoneError(ConnectionError):
    """The peer's process has ended: nothing listens at its address, and its links and the votes' have ended."""


class Peers:
    """Socket of one rank: answers what the others ask, on a thread of its own, and asks them.

    Bound to an address of the interface ``host`` when made, for datagrams and for links. Once opened, ``others`` are
    all ranks but this one, and ``hosts`` the addresses from which members of the formation have asked.
    ``vote_link_ended`` says whether the link that the ranks last voted over has ended: without that no peer is gone.
    """

    rank: int
    others: frozenset[int]

    def __init__(self, host: str, runtime: Runtime = REAL) -> None:
        self.host = host
        self.runtime = runtime
        self.hosts: set[str] = set()
        self.vote_link_ended: Callable[[], bool] = lambda: True
        self._mute: set[int] = set()
        self._awaited: dict[bytes, bytes | None] = {}
        self._failed: tuple[float, str] | None = None
        self._closed = runtime.event()
        self._family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]
        self._socket, self._links = self._bind()
        self.address: Address = self._socket.getsockname()[:2]

    def _bind(self) -> tuple[socket.socket, PresenceLinks]:
        datagrams, listening = _bound(self._family, self.host)
        return datagrams, PresenceLinks(listening)

    @property
    def complaint(self) -> str | None:
        """Last error of the thread that answers, or a link that has ended; ``None`` once it is a minute old."""
        failed = self._failed
        if failed is not None and self.runtime.now() - failed[0] <= _COMPLAINT_SECONDS:
            return failed[1]
        return self._links.complaint

    def open(
        self, secret: bytes, rank: int, addresses: Sequence[Address], answer: Callable[[bytes], bytes | None]
    ) -> None:
        """Begin to answer the members of a formation, whose addresses are in order of rank.

        ``answer`` gives the answer to a question, or ``None`` for none yet; it is called on this object's thread.
        """
        self.rank = rank
        self._secret, self._answer = secret, answer
        self._addresses = {other: address for other, address in enumerate(addresses) if other != rank}
        self.others = frozenset(self._addresses)
        self.runtime.spawn("eplb-peers", self._serve)
        self._links.open(rank, addresses, self.proof, self._hear)

    def unlinked(self) -> list[int]:
        """Wait until the links to all peers are open, for minutes at most; return the peers that have none."""
        return self._links.missing()

    def ask(self, ranks: Iterable[int], question: bytes, seconds: float) -> dict[int, bytes]:
        """Ask each of ``ranks`` until it has answered, or for so long; return the answers there are.

        Raises ``PeerGoneError`` where a rank has not answered and its process is known to have ended, or it has left.
        """
        waiting = set(ranks)
        answers: dict[int, bytes] = {}
        sockets: dict[int, tuple[socket.socket, bytes]] = {}
        with contextlib.ExitStack() as open_sockets:
            open_sockets.callback(lambda: [self._awaited.pop(nonce, None) for _, nonce in sockets.values()])
            for rank in waiting:
                asking = open_sockets.enter_context(self.runtime.datagrams(self._family))
                # Connected, it takes datagrams of this peer alone, and learns where nobody listens there.
                asking.connect(self._addresses[rank])
                asking.settimeout(_RETRY_SECONDS)
                # One for all attempts: an answer that takes longer than the next one is an answer.
                sockets[rank] = asking, secrets.token_bytes(_NONCE_BYTES)
                self._awaited[sockets[rank][1]] = None
            end = self.runtime.now() + seconds
            while waiting and (left := end - self.runtime.now()) > 0:
                for rank in sorted(waiting):
                    answer = self._ask_once(rank, *sockets[rank], question, min(left, _RETRY_SECONDS))
                    if answer is not None:
                        answers[rank] = answer
                        waiting.discard(rank)
        return answers

    def announce(self, statement: bytes, seconds: float) -> None:
        """Send to every rank that can hear it within so many seconds; those whose process has ended are left out."""
        waiting = set(self.others)
        end = self.runtime.now() + seconds
        while waiting and self.runtime.now() < end:
            for rank in sorted(waiting):
                try:
                    waiting -= self.ask([rank], statement, _RETRY_SECONDS).keys()
                except PeerGoneError:
                    waiting.discard(rank)

    def proof(self, claim: bytes) -> bytes:
        """Return what only a member of the formation can send along with a claim."""
        return self._sealed(_CLAIMED, claim)[:_MAC_BYTES]

    def close(self) -> None:
        """Answer no more."""
        self._closed.set()
        # Wakes the thread that waits here; that the socket is not connected is no news.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._links.close()

    def _ask_once(
        self, rank: int, asking: socket.socket, nonce: bytes, question: bytes, seconds: float
    ) -> bytes | None:
        began = self.runtime.now()
        sealed = self._sealed(_ASKED, nonce + question)
        if rank in self._mute:
            self._links.send(rank, sealed)
        try:
            asking.send(sealed)
            while (left := seconds - (self.runtime.now() - began)) > 0:
                asking.settimeout(left)
                answer = self._unsealed(_ANSWERED, asking.recv(_MAX_DATAGRAM))
                if answer is not None and answer.startswith(nonce):
                    self._mute.discard(rank)
                    return answer[_NONCE_BYTES:]
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and self._is_gone(rank):
                raise PeerGoneError(f"nothing listens at {asking.getpeername()[:2]} any more") from error
            self.runtime.sleep(max(0.0, seconds - (self.runtime.now() - began)))
        self._mute.add(rank)
        return self._awaited.get(nonce)

    def _is_gone(self, rank: int) -> bool:
        """Return whether a peer that rejects datagrams has ended: firewalls reject them too, and proxies end links."""
        return self._links.ended(rank) and self.vote_link_ended()

    def _hear(self, message: bytes) -> bytes | None:
        """Take a question or an answer that has come over the link to a peer; return this rank's answer."""
        answered = self._unsealed(_ANSWERED, message)
        if answered is not None:
            nonce = answered[:_NONCE_BYTES]
            if nonce in self._awaited:
                self._awaited[nonce] = answered[_NONCE_BYTES:]
            return None
        return self._answer_to(message)

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                self._serve_once()
            except Exception as error:
                # Who asks may have to know whether this rank has committed: it must go on answering.
                complaint = f"a peer's question was not answered: {type(error).__name__}: {error}"
                if not self._closed.is_set():
                    if complaint != self.complaint:
                        _log.exception("rank %d: a peer's question was not answered", self.rank)
                    self._failed = self.runtime.now(), complaint
                self._closed.wait(_RETRY_SECONDS)

    def _serve_once(self) -> None:
        datagram, sender = self._socket.recvfrom(_MAX_DATAGRAM)
        if self._unsealed(_ASKED, datagram) is not None and len(self.hosts) < _MAX_HOSTS:
            self.hosts.add(sender[0])
        answer = self._answer_to(datagram)
        if answer is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(answer, sender)

    def _answer_to(self, message: bytes) -> bytes | None:
        """Return the sealed answer to a member's question; ``None`` to anything else, and if there is none yet."""
        asked = self._unsealed(_ASKED, message)
        if asked is None or len(asked) < _NONCE_BYTES:
            return None
        answer = self._answer(asked[_NONCE_BYTES:])
        return None if answer is None else self._sealed(_ANSWERED, asked[:_NONCE_BYTES] + answer)

    def _sealed(self, kind: bytes, body: bytes) -> bytes:
        return hmac.digest(self._secret, kind + body, hashlib.sha256) + body

    def _unsealed(self, kind: bytes, datagram: bytes) -> bytes | None:
        body = datagram[_MAC_BYTES:]
        return body if hmac.compare_digest(datagram, self._sealed(kind, body)) else None


def _bound(family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket]:
    """A socket for datagrams and a listening one for links, at one port of the interface."""
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
    """Store that process groups open their links over: a rank keeps what it sets, and asks the others for the rest."""

    def __init__(self, peers: Peers, timeout: timedelta) -> None:
        super().__init__()
        self._peers = peers
        self._patience = timeout
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, Callable[[bytes], None]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watched(self, prefix: str, watch: Callable[[bytes], None]) -> Iterator[None]:
        """Within it, ``watch`` sees each value that this rank sets under ``prefix``, before any other rank can."""
        self._watches[prefix] = watch
        try:
            yield
        finally:
            del self._watches[prefix]

    def held(self, key: str) -> bytes | None:
        """Return the value that this rank has set."""
        with self._lock:
            return self._values.get(key)

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Keep a value for whoever asks; the oldest goes where there are too many."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        for prefix, watch in tuple(self._watches.items()):
            if key.startswith(prefix):
                watch(data)
        with self._lock:
            while len(self._values) >= _MAX_VALUES:
                self._values.pop(next(iter(self._values)))
            self._values[key] = data

    def get(self, key: str) -> bytes:
        """Wait for a value that some rank has set. Raises ``TimeoutError``."""
        return self._found(key, self._patience)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key has been set. Raises ``TimeoutError``."""
        for key in keys:
            self.set(key, self._found(key, timeout or self._patience))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key has been set."""
        return all(self._asked_once(key) is not None for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait no longer than this for a value."""
        self._patience = timeout

    def _found(self, key: str, timeout: timedelta) -> bytes:
        end = self._peers.runtime.now() + timeout.total_seconds()
        while (value := self._asked_once(key)) is None:
            if self._peers.runtime.now() > end:
                raise TimeoutError(f"no rank has set {key} within {timeout.total_seconds():g} s")
        return value

    def _asked_once(self, key: str) -> bytes | None:
        held = self.held(key)
        if held is not None:
            return held
        # The libraries name a value after the rank that sets it: it is asked first.
        owner = key.rpartition("/")[2]
        for rank in sorted(self._peers.others, key=lambda rank: (str(rank) != owner, rank)):
            answer = self._peers.ask([rank], b"v" + key.encode(), _RETRY_SECONDS).get(rank, b"")
            if answer[:1] == b"+":
                return answer[1:]
        self._peers.runtime.sleep(_RETRY_SECONDS / 10)
        return None
