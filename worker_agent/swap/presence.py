"""TCP links between a formation's agents. They show which peers are alive, and carry messages whose datagrams get lost.

The loss of a link does not prove that the peer's process has ended, because proxies and service meshes close idle links
between living processes. Both ends therefore send heartbeats, and a lost link is reported and reopened. ``Peers``
combines the states of this link and of the vote link to decide whether a peer is gone.

To open a link, the higher-numbered rank calls the lower-numbered one. Both prove that they know the formation's secret:

1. the caller sends its rank and a nonce;
2. the lower rank sends a nonce, and its proof for the caller's nonce;
3. the caller sends its proof for that nonce;
4. the lower rank sends a welcome.
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
_INITIAL_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 5.0
_HEARTBEAT_SECONDS = 10.0
"""Interval between heartbeats, well below the idle timeouts of common proxies, which start at 50 s."""
_LOST_MILLISECONDS = 60_000
"""Time after which the kernel drops a link whose data is not acknowledged."""
_PROBE_SECONDS = 0.2
_COMPLAINT_SECONDS = 60.0
_MAX_HANDSHAKES = 64
"""Maximum number of unfinished handshakes. If there are more, the oldest are dropped."""
_MAX_OUTBOX_BYTES = 256 * 1024
_MAX_FRAME = 64 * 1024
_READ_BYTES = 64 * 1024
_SIZE = struct.Struct("!I")
"""Message header: the size. A message of size 0 is a heartbeat."""


class _Stage(enum.Enum):
    """Stage of a link. Its value is the number of received bytes that complete the stage."""

    CONNECTING = 0
    """The call has not been accepted yet."""
    CALL = _RANK_BYTES + _NONCE_BYTES
    """The lower rank waits for the caller's rank and nonce."""
    REPLY = _NONCE_BYTES + _PROOF_BYTES
    """The caller waits for the lower rank's nonce and proof."""
    PROOF = _PROOF_BYTES
    """The lower rank waits for the caller's proof."""
    WELCOME = len(_WELCOME)
    """The caller waits for the welcome."""
    OPEN = -1
    """The handshake is complete."""


class _Link:
    """One TCP link, open or in its handshake.

    Parameters
    ----------
    link
        The socket.
    stage
        Stage in which the link begins.
    peer
        Rank at the other end; -1 if unknown. It is authenticated once the stage is ``OPEN``.
    now
        Current time, used to limit the duration of the handshake.
    """

    def __init__(self, link: socket.socket, stage: _Stage, peer: int, now: float) -> None:
        link.setblocking(False)
        self.socket = link
        self.stage = stage
        self.peer = peer
        self.began = now
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.inbox = bytearray()
        self.outbox = bytearray()

    def pop(self, size: int) -> bytes:
        """Remove the first ``size`` bytes from the inbox and return them."""
        data = bytes(self.inbox[:size])
        del self.inbox[:size]
        return data


class PresenceLinks:
    """One link to each peer. A separate thread serves all of them.

    The higher-numbered rank calls the lower-numbered one, and calls again whenever their link is lost. The kernel
    admits only the formation's hosts to the listening socket.

    Parameters
    ----------
    listening
        Listening socket for calls from higher-numbered ranks.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._links: dict[int, _Link] = {}
        self._handshakes: list[_Link] = []
        self._closed_by_peer: set[int] = set()
        self._next_call: dict[int, tuple[float, float]] = {}
        """Time of the next call to each lower rank, and the delay before the call after that."""
        self._heartbeat_at = 0.0
        self._losses = 0
        """Number of open links that have been lost since the start."""
        self._last_loss: tuple[float, int] | None = None
        """Time of the last loss, and the peer whose link was lost."""
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        self._closing = False
        self._waker: socket.socket | None = None

    def open(
        self,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        proof: Callable[[bytes], bytes],
        on_message: Callable[[bytes], bytes | None] = lambda _: None,
    ) -> None:
        """Start opening the links.

        Parameters
        ----------
        rank
            This rank.
        addresses
            Addresses of all ranks, in rank order.
        proof
            Callable that returns the proof of a claim. Only members of the formation can compute it.
        on_message
            Called with each message from a peer. Returns the reply, or ``None``.
        """
        self._rank = rank
        self._addresses = addresses
        self._proof = proof
        self._on_message = on_message
        admit_only(self._listening, {host for host, _ in addresses})
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for endpoint in (self._listening, self._waker, self._woken):
            endpoint.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._next_call = dict.fromkeys(range(rank), (0.0, _INITIAL_RETRY_SECONDS))
        threading.Thread(target=self._run, name="eplb-presence", daemon=True).start()

    @property
    def complaint(self) -> str | None:
        """Message about lost links, or ``None``. It is kept for at least a minute after the last loss."""
        last = self._last_loss
        missing = self._unlinked()
        if last is None:
            return None
        if missing:
            return f"the links to ranks {missing} were lost and are being reopened"
        if time.monotonic() - last[0] > _COMPLAINT_SECONDS:
            return None
        return f"the link to rank {last[1]} was lost and has been reopened (links lost since the start: {self._losses})"

    def missing(self) -> list[int]:
        """Wait up to a minute for all links to open. Return the peers without a link."""
        with self._opened:
            self._opened.wait_for(lambda: not self._unlinked(), _OPEN_SECONDS)
            return self._unlinked()

    def ended(self, rank: int) -> bool:
        """Return True if a peer has closed its link and its port now rejects connections."""
        if rank not in self._closed_by_peer:
            return False
        try:
            socket.create_connection(self._addresses[rank], timeout=_PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return rank in self._closed_by_peer
        except OSError:
            return False
        return False

    def send(self, rank: int, message: bytes) -> None:
        """Enqueue a message to a peer. Drop it if there is no link or if too many bytes are already queued."""
        with self._lock:
            link = self._links.get(rank)
            if link is None or len(link.outbox) > _MAX_OUTBOX_BYTES:
                return
            link.outbox += _SIZE.pack(len(message)) + message
        self._wake()

    def close(self) -> None:
        """Close all links and the listening socket."""
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
                self._run_once()
            except Exception:
                if not self._closing:
                    _log.exception("rank %d: error on the links to the peers", self._rank)
                    time.sleep(_MAX_RETRY_SECONDS)
        with self._lock:
            waker = self._waker
            self._waker = None
            # While ``close`` was running, this thread may have opened or accepted further links.
            late = [link.socket for link in (*self._links.values(), *self._handshakes)]
            for resource in (*late, waker, self._woken, self._selector):
                if resource is not None:
                    resource.close()

    def _run_once(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._closing:
                return
            self._drop_late_handshakes(now)
            self._call_missing(now)
            self._send_heartbeats(now)
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
        """Call each lower rank that has no link and whose next call is due."""
        in_handshake = {link.peer for link in self._handshakes}
        for peer, (due, delay) in self._next_call.items():
            if peer in self._links or peer in in_handshake or now < due:
                continue
            self._next_call[peer] = now + delay, min(2 * delay, _MAX_RETRY_SECONDS)
            family = self._listening.family
            link = _Link(socket.socket(family, socket.SOCK_STREAM), _Stage.CONNECTING, peer, now)
            self._handshakes.append(link)
            self._selector.register(link.socket, selectors.EVENT_WRITE, link)
            link.socket.connect_ex(self._addresses[peer])

    def _send_heartbeats(self, now: float) -> None:
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + _HEARTBEAT_SECONDS
            for link in self._links.values():
                if not link.outbox:
                    link.outbox += _SIZE.pack(0)

    def _watch_outboxes(self) -> None:
        """Have the selector report a socket as writable only if it is connecting or has data to send."""
        for link in (*self._links.values(), *self._handshakes):
            if link.stage is _Stage.CONNECTING:
                events = selectors.EVENT_WRITE
            else:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
            if self._selector.get_key(link.socket).events != events:
                self._selector.modify(link.socket, events, link)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError:
            return
        with self._lock:
            link = _Link(accepted, _Stage.CALL, -1, time.monotonic())
            self._handshakes.append(link)
            self._selector.register(accepted, selectors.EVENT_READ, link)

    def _serve(self, link: _Link, events: int) -> None:
        """Receive data from a link and send data to it. Close the link on an error."""
        replies: list[bytes] = []
        try:
            if link.stage is _Stage.CONNECTING:
                self._begin_handshake(link)
            if events & selectors.EVENT_READ:
                self._read(link)
            while link.stage is not _Stage.OPEN and len(link.inbox) >= link.stage.value:
                self._advance_handshake(link)
            if link.stage is _Stage.OPEN:
                replies = self._process_messages(link)
            with self._lock:
                link.outbox += b"".join(_SIZE.pack(len(reply)) + reply for reply in replies)
                if link.outbox:
                    del link.outbox[: link.socket.send(link.outbox)]
        except BlockingIOError:
            return
        except OSError as error:
            with self._lock:
                self._end(link, by_peer=isinstance(error, (ConnectionResetError, _ClosedByPeerError)))

    def _read(self, link: _Link) -> None:
        received = link.socket.recv(_READ_BYTES)
        if not received:
            raise _ClosedByPeerError("the peer has closed the link")
        link.inbox += received

    def _process_messages(self, link: _Link) -> list[bytes]:
        """Remove all complete messages from the inbox and return the replies to them."""
        replies = []
        while len(link.inbox) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(link.inbox)
            if size > _MAX_FRAME:
                raise ConnectionError(f"a message of {size} bytes exceeds the maximum of {_MAX_FRAME}")
            if len(link.inbox) < _SIZE.size + size:
                break
            message = link.pop(_SIZE.size + size)[_SIZE.size :]
            reply = self._on_message(message) if message else None
            if reply is not None:
                replies.append(reply)
        return replies

    # Handshakes

    def _begin_handshake(self, link: _Link) -> None:
        error_number = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error_number:
            raise OSError(error_number, "cannot connect to the peer")
        link.stage = _Stage.REPLY
        link.outbox += struct.pack("!I", self._rank) + link.nonce

    def _advance_handshake(self, link: _Link) -> None:
        """Process the bytes that complete the current stage. The module docstring describes the handshake."""
        message = link.pop(link.stage.value)
        if link.stage is _Stage.CALL:
            (link.peer,) = struct.unpack("!I", message[:_RANK_BYTES])
            if not self._rank < link.peer < len(self._addresses):
                raise ConnectionError(
                    f"unexpected call from rank {link.peer}: only higher-numbered ranks call"
                )
            link.outbox += link.nonce + self._proof_for(self._rank, link.peer, message[_RANK_BYTES:])
            link.stage = _Stage.PROOF
        elif link.stage is _Stage.REPLY:
            self._check_proof(link, message[_NONCE_BYTES:])
            link.outbox += self._proof_for(self._rank, link.peer, message[:_NONCE_BYTES])
            # Without a welcome, the two ends could disagree on whether the link is open.
            link.stage = _Stage.WELCOME
        elif link.stage is _Stage.PROOF:
            self._check_proof(link, message)
            link.outbox += _WELCOME
            self._complete_handshake(link)
        else:
            self._complete_handshake(link)

    def _complete_handshake(self, link: _Link) -> None:
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS)
        with self._opened:
            link.stage = _Stage.OPEN
            self._handshakes.remove(link)
            previous = self._links.get(link.peer)
            self._links[link.peer] = link
            if previous is not None:
                self._close(previous)
            self._closed_by_peer.discard(link.peer)
            if link.peer in self._next_call:
                self._next_call[link.peer] = 0.0, _INITIAL_RETRY_SECONDS
            self._opened.notify_all()

    def _end(self, link: _Link, *, by_peer: bool = False) -> None:
        """Close a link. If it was open, count and report the loss; the higher rank reopens it."""
        if link in self._handshakes:
            self._handshakes.remove(link)
        elif self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._losses += 1
            self._last_loss = time.monotonic(), link.peer
            if by_peer:
                self._closed_by_peer.add(link.peer)
            # Log only losses 1, 2, 4, 8, ..., so that flapping links do not flood the engine's log.
            if self._losses & (self._losses - 1) == 0 and not self._closing:
                _log.warning("rank %d: lost the link to rank %d", self._rank, link.peer)
        self._close(link)

    def _close(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _check_proof(self, link: _Link, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof_for(link.peer, self._rank, link.nonce)):
            _log.warning(
                "rank %d: rejected a link, because its other end claims to be rank %d without knowing the secret",
                self._rank,
                link.peer,
            )
            raise ConnectionError(f"the other end claims to be rank {link.peer} without knowing the secret")

    def _proof_for(self, sender: int, receiver: int, nonce: bytes) -> bytes:
        return self._proof(b"presence of %d to %d " % (sender, receiver) + nonce)

    def _unlinked(self) -> list[int]:
        return [
            peer for peer in range(len(self._addresses)) if peer != self._rank and peer not in self._links
        ]

    def _wake(self) -> None:
        """Wake the thread, which may be waiting in the selector."""
        with self._lock, contextlib.suppress(OSError):
            if self._waker is not None:
                self._waker.send(b"!")


class _ClosedByPeerError(ConnectionError):
    """Raised if the peer has closed a link in an orderly manner."""
