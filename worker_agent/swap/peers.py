"""Questions between the agents of one formation: datagrams keyed by a secret that only its ranks hold.

There is no server. Every rank keeps what it has to say and answers for itself, so what one rank needs to know hangs on
no third one. A datagram without the right HMAC is dropped unread: a stranger can neither ask, nor answer, nor fill
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

Address: TypeAlias = tuple[str, int]

_MAC_BYTES = 32
_NONCE_BYTES = 16
_LARGEST = 60_000
"""Bytes of a datagram; what libraries exchange to open their links is a few hundred."""
_MOST_VALUES = 4096
"""Values kept in a store; a lane needs one or two per pair of ranks."""
_MOST_HOSTS = 4096
_RETRY_SECONDS = 0.05
_ASKED, _ANSWERED, _CLAIMED = b"q", b"a", b"c"


class PeerGoneError(ConnectionError):
    """The peer's process does not exist any more: nothing listens at its address."""


class Peers:
    """One rank's socket: answers what the others ask, on a thread of its own, and asks them.

    Parameters
    ----------
    host
        Address of the interface to bind to.
    answer
        Gives the answer to a question, or ``None`` for none yet; called on this object's thread.

    ``others`` are all ranks but this one; ``hosts`` the addresses from which members of the formation have asked.
    """

    def __init__(self, host: str, answer: Callable[[bytes], bytes | None]) -> None:
        self._family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]
        self._socket = socket.socket(self._family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self.address: Address = self._socket.getsockname()[:2]
        self.rank = 0
        self._secret = b""
        self._answer = answer
        self._addresses: Mapping[int, Address] = {}
        self.others: frozenset[int] = frozenset()
        self.hosts: set[str] = set()

    def open(self, secret: bytes, rank: int, addresses: Sequence[Address]) -> None:
        """Begin to answer; ``secret`` and ``addresses``, in order of rank, are the formation's."""
        self._secret, self.rank = secret, rank
        self._addresses = {other: address for other, address in enumerate(addresses) if other != rank}
        self.others = frozenset(self._addresses)
        threading.Thread(target=self._serve, name="eplb-peers", daemon=True).start()

    def ask(self, ranks: Iterable[int], question: bytes, seconds: float) -> dict[int, bytes]:
        """Ask each of ``ranks`` until it has answered, or for so long; the answers there are.

        Raises
        ------
        PeerGoneError
            Where a rank has not answered and its process is known to have ended.
        """
        waiting = set(ranks)
        answers: dict[int, bytes] = {}
        with contextlib.ExitStack() as open_sockets:
            sockets = {}
            for rank in waiting:
                asking = open_sockets.enter_context(socket.socket(self._family, socket.SOCK_DGRAM))
                # Connected, it takes datagrams of this peer alone, and learns where nobody listens there.
                asking.connect(self._addresses[rank])
                asking.settimeout(_RETRY_SECONDS)
                sockets[rank] = asking
            end = time.monotonic() + seconds
            while waiting and (left := end - time.monotonic()) > 0:
                for rank in sorted(waiting):
                    answer = self._ask_once(sockets[rank], question, min(left, _RETRY_SECONDS))
                    if answer is not None:
                        answers[rank] = answer
                        waiting.discard(rank)
        return answers

    def announce(self, statement: bytes, seconds: float) -> None:
        """Have every rank hear this that can within so many seconds; those whose process has ended are left out."""
        waiting = set(self.others)
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for rank in sorted(waiting):
                try:
                    waiting -= self.ask([rank], statement, _RETRY_SECONDS).keys()
                except PeerGoneError:
                    waiting.discard(rank)

    def proof(self, claim: bytes) -> bytes:
        """What only a member of the formation can send along with a claim."""
        return self._sealed(_CLAIMED, claim)[:_MAC_BYTES]

    def close(self) -> None:
        """Answer no more."""
        # Wakes the thread that waits here; that the socket is not connected is no news.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ask_once(self, asking: socket.socket, question: bytes, seconds: float) -> bytes | None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        began = time.monotonic()
        try:
            asking.send(self._sealed(_ASKED, nonce + question))
            while (left := seconds - (time.monotonic() - began)) > 0:
                asking.settimeout(left)
                answer = self._unsealed(_ANSWERED, asking.recv(_LARGEST))
                if answer is not None and answer.startswith(nonce):
                    return answer[_NONCE_BYTES:]
        except ConnectionRefusedError as error:
            raise PeerGoneError(f"nothing listens at {asking.getpeername()[:2]} any more") from error
        except (TimeoutError, OSError):
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        return None

    def _serve(self) -> None:
        while True:
            try:
                datagram, sender = self._socket.recvfrom(_LARGEST)
            except OSError:
                return
            asked = self._unsealed(_ASKED, datagram)
            if asked is None or len(asked) < _NONCE_BYTES:
                continue
            if len(self.hosts) < _MOST_HOSTS:
                self.hosts.add(sender[0])
            answer = self._answer(asked[_NONCE_BYTES:])
            if answer is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._sealed(_ANSWERED, asked[:_NONCE_BYTES] + answer), sender)

    def _sealed(self, kind: bytes, body: bytes) -> bytes:
        return hmac.digest(self._secret, kind + body, hashlib.sha256) + body

    def _unsealed(self, kind: bytes, datagram: bytes) -> bytes | None:
        mac, body = datagram[:_MAC_BYTES], datagram[_MAC_BYTES:]
        return (
            body if hmac.compare_digest(mac, hmac.digest(self._secret, kind + body, hashlib.sha256)) else None
        )


class PeerStore(dist.Store):
    """What process groups open their links over: each rank keeps what it sets, and asks the others for what it reads.

    Parameters
    ----------
    timeout
        Longest wait for a value, where the reader names none.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._peers: Peers | None = None
        self._patience = timeout
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, Callable[[bytes], None]] = {}
        self._lock = threading.Lock()

    def connect(self, peers: Peers) -> None:
        """Read what these hold."""
        self._peers = peers

    @contextlib.contextmanager
    def watched(self, prefix: str, watch: Callable[[bytes], None]) -> Iterator[None]:
        """Within it, ``watch`` sees each value that this rank sets under ``prefix``, before any other rank can."""
        self._watches[prefix] = watch
        try:
            yield
        finally:
            del self._watches[prefix]

    def held(self, key: str) -> bytes | None:
        """The value that this rank has set."""
        with self._lock:
            return self._values.get(key)

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Keep a value for whoever asks; the oldest goes where there are too many."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        for prefix, watch in tuple(self._watches.items()):
            if key.startswith(prefix):
                watch(data)
        with self._lock:
            while len(self._values) >= _MOST_VALUES:
                self._values.pop(next(iter(self._values)))
            self._values[key] = data

    def get(self, key: str) -> bytes:
        """The value that some rank has set, waiting for it. Raises ``TimeoutError``."""
        return self._found(key, self._patience)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until every key has been set. Raises ``TimeoutError``."""
        for key in keys:
            self.set(key, self._found(key, timeout or self._patience))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key has been set."""
        return all(self._asked_once(key) is not None for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait no longer than this for a value."""
        self._patience = timeout

    def _found(self, key: str, timeout: timedelta) -> bytes:
        end = time.monotonic() + timeout.total_seconds()
        while (value := self._asked_once(key)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no rank has set {key} within {timeout.total_seconds():g} s")
        return value

    def _asked_once(self, key: str) -> bytes | None:
        held = self.held(key)
        if held is not None or self._peers is None:
            return held
        # The libraries name a value after the rank that sets it: it is asked first.
        owner = key.rpartition("/")[2]
        for rank in sorted(self._peers.others, key=lambda rank: (str(rank) != owner, rank)):
            answer = self._peers.ask([rank], b"v" + key.encode(), _RETRY_SECONDS).get(rank, b"")
            if answer[:1] == b"+":
                return answer[1:]
        time.sleep(_RETRY_SECONDS / 10)
        return None
