"""TCP links between the agents of one formation: they show that peers live, and carry questions if datagrams get lost.

The end of a link proves little by itself, because proxies and service meshes end idle links while both processes live.
So each end sends a heartbeat, and a link that has ended is reported and opened again. ``Peers`` decides when a peer is
gone, from this and from the votes' own link.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from worker_agent.swap.link_guard import admit_only

_log = logging.getLogger("eplb.agent")

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_RANK_BYTES = 4
_WELCOME = b"+"
_HANDSHAKE_SECONDS = 5.0
_OPEN_SECONDS = 60.0
_INITIAL_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.05, 5.0
_BEAT_SECONDS = 10.0
"""Well below the idle time-outs of common proxies, which begin at 50 s."""
_LOST_MILLISECONDS = 60_000
"""Time after which the kernel gives up a link whose heartbeats are not acknowledged."""
_PROBE_SECONDS = 0.2
_COMPLAINT_SECONDS = 60.0
_MAX_HANDSHAKES = 64
"""Callers that have not proven yet who they are; beyond these the oldest is dropped."""
_MAX_WAITING_BYTES = 256 * 1024
_MAX_FRAME = 64 * 1024
_READ_BYTES = 64 * 1024
_SIZE = struct.Struct("!I")


class _Stage(enum.Enum):
    """Stage of a link; its value is the number of bytes that the next step needs."""

    CONNECTED = 0
    CALLER = _RANK_BYTES + _NONCE_BYTES
    CALLED = _NONCE_BYTES + _PROOF_BYTES
    PROOF = _PROOF_BYTES
    WELCOME = len(_WELCOME)
    OPEN = -1


class _Link:
    """One TCP link, or the beginning of one; ``peer`` is proven once its stage is OPEN."""

    def __init__(self, link: socket.socket, stage: _Stage, peer: int, now: float) -> None:
        link.setblocking(False)
        self.socket, self.stage, self.peer = link, stage, peer
        self.began = now
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.inbox, self.outbox = bytearray(), bytearray()

    def taken(self, size: int) -> bytes:
        """Remove so many bytes from the inbox."""
        taken = bytes(self.inbox[:size])
        del self.inbox[:size]
        return taken


class PresenceLinks:
    """One link to each peer, on a thread of its own; the higher rank of two calls the lower, as often as needed.

    The kernel admits only the formation's hosts to ``listening``, and both ends prove with ``proof`` that they belong
    to the formation. ``hear`` takes each message of a peer, and returns what to send back, if anything.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._links: dict[int, _Link] = {}
        self._handshakes: list[_Link] = []
        self._ended: set[int] = set()
        self._next_call: dict[int, tuple[float, float]] = {}
        self._beat_at = 0.0
        self._ends = 0
        self._last_end: tuple[float, int] | None = None
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        self._closing = False
        self._waker: socket.socket | None = None

    def open(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        proof: Callable[[bytes], bytes],
        hear: Callable[[bytes], bytes | None] = lambda _: None,
    ) -> None:
        """Begin to open the links of ``rank``; the ``addresses`` are in order of rank."""
        self._rank, self._addresses, self._proof, self._hear = rank, addresses, proof, hear
        admit_only(self._listening, {host for host, _ in addresses})
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for own in (self._listening, self._waker, self._woken):
            own.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._next_call = dict.fromkeys(range(rank), (0.0, _INITIAL_RETRY_SECONDS))
        threading.Thread(target=self._run, name="eplb-presence", daemon=True).start()

    @property
    def complaint(self) -> str | None:
        """Links that have ended, or ``None``; kept for a minute after they were opened again."""
        last = self._last_end
        missing = self._unlinked()
        if last is None:
            return None
        if missing:
            return f"the links to ranks {missing} have ended; they are opened again"
        if time.monotonic() - last[0] > _COMPLAINT_SECONDS:
            return None
        return f"the link to rank {last[1]} has ended and was opened again ({self._ends} since the start)"

    def missing(self) -> list[int]:
        """Wait until the links are open, for a minute at most; return the peers without one."""
        with self._opened:
            self._opened.wait_for(lambda: not self._unlinked(), _OPEN_SECONDS)
            return self._unlinked()

    def ended(self, rank: int) -> bool:
        """Return whether the peer has ended its link, and nobody listens at its port."""
        if rank not in self._ended:
            return False
        try:
            socket.create_connection(self._addresses[rank], timeout=_PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return rank in self._ended
        except OSError:
            return False
        return False

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a peer, if there is a link to it; never waits."""
        with self._lock:
            link = self._links.get(rank)
            if link is None or len(link.outbox) > _MAX_WAITING_BYTES:
                return
            link.outbox += _SIZE.pack(len(message)) + message
        self._wake()

    def close(self) -> None:
        """End the links, and accept no others."""
        with self._lock:
            self._closing = True
            for link in (*self._links.values(), *self._handshakes):
                link.socket.close()
            self._listening.close()
        self._wake()

    # The thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                if not self._closing:
                    _log.exception("rank %d: the links to the other ranks", self._rank)
                    time.sleep(_MAX_RETRY_SECONDS)
        with self._lock:
            waker, self._waker = self._waker, None
            for own in (waker, self._woken, self._selector):
                if own is not None:
                    own.close()

    def _turn(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._closing:
                return
            self._drop_late_handshakes(now)
            self._call_missing(now)
            self._beat(now)
            self._watch_outboxes()
        for key, events in self._selector.select(_INITIAL_RETRY_SECONDS if self._unlinked() else 1.0):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(_READ_BYTES)
            elif key.fileobj is self._listening:
                self._accept()
            else:
                self._serve(key.data, events)

    def _drop_late_handshakes(self, now: float) -> None:
        for number, link in enumerate(self._handshakes[::-1]):
            if now - link.began > _HANDSHAKE_SECONDS or number >= _MAX_HANDSHAKES:
                self._end(link)

    def _call_missing(self, now: float) -> None:
        under_way = {link.peer for link in self._handshakes}
        for peer, (due, wait) in self._next_call.items():
            if peer in self._links or peer in under_way or now < due:
                continue
            self._next_call[peer] = now + wait, min(2 * wait, _MAX_RETRY_SECONDS)
            family = self._listening.family
            link = _Link(socket.socket(family, socket.SOCK_STREAM), _Stage.CONNECTED, peer, now)
            self._handshakes.append(link)
            self._selector.register(link.socket, selectors.EVENT_WRITE, link)
            link.socket.connect_ex(self._addresses[peer])

    def _beat(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_SECONDS
            for link in self._links.values():
                if not link.outbox:
                    link.outbox += _SIZE.pack(0)

    def _watch_outboxes(self) -> None:
        for link in (*self._links.values(), *self._handshakes):
            writes = bool(link.outbox) or link.stage is _Stage.CONNECTED
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
            if link.stage is _Stage.CONNECTED:
                events = selectors.EVENT_WRITE
            if self._selector.get_key(link.socket).events != events:
                self._selector.modify(link.socket, events, link)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError:
            return
        with self._lock:
            link = _Link(accepted, _Stage.CALLER, -1, time.monotonic())
            self._handshakes.append(link)
            self._selector.register(accepted, selectors.EVENT_READ, link)

    def _serve(self, link: _Link, events: int) -> None:
        replies: list[bytes] = []
        try:
            if link.stage is _Stage.CONNECTED:
                self._connected(link)
            if events & selectors.EVENT_READ:
                self._read(link)
            while link.stage is not _Stage.OPEN and len(link.inbox) >= link.stage.value:
                self._shake(link)
            if link.stage is _Stage.OPEN:
                replies = self._messages(link)
            with self._lock:
                link.outbox += b"".join(_SIZE.pack(len(reply)) + reply for reply in replies)
                if link.outbox:
                    del link.outbox[: link.socket.send(link.outbox)]
        except BlockingIOError:
            return
        except OSError as error:
            with self._lock:
                self._end(link, by_peer=isinstance(error, (ConnectionResetError, _EndError)))

    def _read(self, link: _Link) -> None:
        received = link.socket.recv(_READ_BYTES)
        if not received:
            raise _EndError("the peer has ended the link")
        link.inbox += received

    def _messages(self, link: _Link) -> list[bytes]:
        """Take the whole messages in the inbox; return what is to be sent back."""
        replies = []
        while len(link.inbox) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(link.inbox)
            if size > _MAX_FRAME:
                raise ConnectionError(f"a message of {size} bytes")
            if len(link.inbox) < _SIZE.size + size:
                break
            message = link.taken(_SIZE.size + size)[_SIZE.size :]
            reply = self._hear(message) if message else None
            if reply is not None:
                replies.append(reply)
        return replies

    # Handshakes

    def _connected(self, link: _Link) -> None:
        refused = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if refused:
            raise OSError(refused, "the peer cannot be called")
        link.stage = _Stage.CALLED
        link.outbox += struct.pack("!I", self._rank) + link.nonce

    def _shake(self, link: _Link) -> None:
        part = link.taken(link.stage.value)
        if link.stage is _Stage.CALLER:
            (link.peer,) = struct.unpack("!I", part[:_RANK_BYTES])
            if not self._rank < link.peer < len(self._addresses):
                raise ConnectionError(f"rank {link.peer} is not awaited")
            link.outbox += link.nonce + self._proven(self._rank, link.peer, part[_RANK_BYTES:])
            link.stage = _Stage.PROOF
        elif link.stage is _Stage.CALLED:
            self._check(link, part[_NONCE_BYTES:])
            link.outbox += self._proven(self._rank, link.peer, part[:_NONCE_BYTES])
            # Without it the two might differ on whether they are linked.
            link.stage = _Stage.WELCOME
        elif link.stage is _Stage.PROOF:
            self._check(link, part)
            link.outbox += _WELCOME
            self._keep(link)
        else:
            self._keep(link)

    def _keep(self, link: _Link) -> None:
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS)
        with self._opened:
            link.stage = _Stage.OPEN
            self._handshakes.remove(link)
            before, self._links[link.peer] = self._links.get(link.peer), link
            if before is not None:
                self._close(before)
            self._ended.discard(link.peer)
            if link.peer in self._next_call:
                self._next_call[link.peer] = 0.0, _INITIAL_RETRY_SECONDS
            self._opened.notify_all()

    def _end(self, link: _Link, *, by_peer: bool = False) -> None:
        """Close a link; one that was open is opened again by the higher rank of the two."""
        if link in self._handshakes:
            self._handshakes.remove(link)
        elif self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._ends += 1
            self._last_end = time.monotonic(), link.peer
            if by_peer:
                self._ended.add(link.peer)
            # Links that keep ending must not fill the log of the engine.
            if self._ends & (self._ends - 1) == 0 and not self._closing:
                _log.warning("rank %d: the link to rank %d has ended", self._rank, link.peer)
        self._close(link)

    def _close(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _check(self, link: _Link, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proven(link.peer, self._rank, link.nonce)):
            _log.warning("rank %d: what links itself as rank %d is none of its peers", self._rank, link.peer)
            raise ConnectionError("the link is none of the formation's")

    def _proven(self, sender: int, receiver: int, nonce: bytes) -> bytes:
        return self._proof(b"presence of %d to %d " % (sender, receiver) + nonce)

    def _unlinked(self) -> list[int]:
        return [
            other for other in range(len(self._addresses)) if other != self._rank and other not in self._links
        ]

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._waker is not None:
                self._waker.send(b"!")


class _EndError(ConnectionError):
    """The peer has ended a link in order."""
