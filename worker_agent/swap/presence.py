"""Links between the agents of one formation that carry nothing: the end of one is the end of its peer's process.

A refused datagram proves nothing, as firewalls refuse too, for moments or for good, while the model's own links go on.
A TCP link that was idle from its beginning is ended by its peer's kernel when the process ends, and by nothing else on
the way: what answers packets with a reset has none to answer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from worker_agent.swap.link_guard import admit_only

_log = logging.getLogger("eplb.agent")

_NONCE_BYTES = 16
_PROOF_BYTES = 32
_WELCOME = b"+"
_HANDSHAKE_SECONDS = 5.0
_OPEN_SECONDS = 60.0
_RETRY_SECONDS = 0.05


class PresenceLinks:
    """One link to each peer, opened in the background; the higher rank of two calls the lower.

    ``listening`` is closed as soon as all have called; until then the kernel admits the formation's hosts alone, and
    both ends prove with ``proof`` that they belong to it.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._links: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, rank: int, addresses: Sequence[tuple[str, int]], proof: Callable[[bytes], bytes]) -> None:
        """Begin to open the links of ``rank``; the ``addresses`` are in order of rank."""
        self._rank, self._addresses, self._proof = rank, addresses, proof
        admit_only(self._listening, {host for host, _ in addresses})
        for task in (self._accept, self._call):
            self._threads.append(threading.Thread(target=task, name="eplb-presence", daemon=True))
            self._threads[-1].start()

    def missing(self) -> list[int]:
        """Wait until the links are open or their time is over; return the peers without one."""
        for thread in self._threads:
            thread.join(2 * _OPEN_SECONDS)
        return [other for other in range(len(self._addresses)) if other not in {self._rank, *self._links}]

    def ended(self, rank: int) -> bool:
        """Return whether the peer's end of the link was closed, in order: a link that was broken proves nothing."""
        link = self._links.get(rank)
        try:
            return link is not None and link.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return False

    def close(self) -> None:
        """End the links: the peers learn that this rank answers no more."""
        self._closing.set()
        for link in (self._listening, *self._links.values()):
            link.close()

    def _accept(self) -> None:
        end = time.monotonic() + _OPEN_SECONDS
        waiting = set(range(self._rank + 1, len(self._addresses)))
        with self._listening as listening:
            while waiting and not self._closing.is_set() and (left := end - time.monotonic()) > 0:
                try:
                    listening.settimeout(left)
                    link, _ = listening.accept()
                except OSError:
                    continue
                with contextlib.ExitStack() as unless_kept:
                    unless_kept.enter_context(link)
                    with contextlib.suppress(OSError):
                        caller = self._answered(link, waiting)
                        waiting.discard(caller)
                        self._keep(caller, link)
                        unless_kept.pop_all()

    def _call(self) -> None:
        end = time.monotonic() + _OPEN_SECONDS
        waiting = list(range(self._rank))
        while waiting and not self._closing.is_set() and time.monotonic() < end:
            try:
                self._keep(waiting[-1], self._called(waiting[-1]))
                waiting.pop()
            except OSError:
                self._closing.wait(_RETRY_SECONDS)

    def _keep(self, peer: int, link: socket.socket) -> None:
        link.setblocking(False)
        self._links[peer] = link

    def _answered(self, link: socket.socket, waiting: set[int]) -> int:
        """Rank that has called; raises ``OSError`` where it cannot prove that it is one of those ``waiting``."""
        link.settimeout(_HANDSHAKE_SECONDS)
        caller = struct.unpack("!I", _read(link, 4))[0]
        theirs, ours = _read(link, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        if caller not in waiting:
            raise ConnectionError(f"rank {caller} is not awaited")
        link.sendall(ours + self._proven(self._rank, caller, theirs))
        self._check(link, caller, self._rank, ours)
        link.sendall(_WELCOME)
        return int(caller)

    def _called(self, peer: int) -> socket.socket:
        """A link to ``peer``; raises ``OSError`` where there is none, or what answers cannot prove to be it."""
        with contextlib.ExitStack() as unless_kept:
            link = unless_kept.enter_context(
                socket.create_connection(self._addresses[peer], timeout=_HANDSHAKE_SECONDS)
            )
            ours = secrets.token_bytes(_NONCE_BYTES)
            link.sendall(struct.pack("!I", self._rank) + ours)
            theirs = _read(link, _NONCE_BYTES)
            self._check(link, peer, self._rank, ours)
            link.sendall(self._proven(self._rank, peer, theirs))
            # Without it the two might differ on whether they are linked.
            link.settimeout(_OPEN_SECONDS)
            _read(link, len(_WELCOME))
            unless_kept.pop_all()
        return link

    def _check(self, link: socket.socket, sender: int, receiver: int, nonce: bytes) -> None:
        if not hmac.compare_digest(_read(link, _PROOF_BYTES), self._proven(sender, receiver, nonce)):
            _log.warning("rank %d: what links itself as rank %d is none of its peers", receiver, sender)
            raise ConnectionError("the link is none of the formation's")

    def _proven(self, sender: int, receiver: int, nonce: bytes) -> bytes:
        return self._proof(b"presence of %d to %d " % (sender, receiver) + nonce)


def _read(link: socket.socket, size: int) -> bytes:
    """So many bytes; raises ``ConnectionError`` where the link ends before."""
    read = b""
    while len(read) < size:
        part = link.recv(size - len(read))
        if not part:
            raise ConnectionError("the link ended within a handshake")
        read += part
    return read
