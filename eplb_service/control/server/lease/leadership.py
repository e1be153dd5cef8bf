"""One of several services leads: the one that holds a lease."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Protocol

import structlog

from eplb_core.wire.fields import MAX_VERSION

LEASE_SECONDS = 15.0
"""Time for which a lease is held without being renewed, as other Kubernetes controllers have it."""
_RENEWALS = 6
"""Attempts within the time for which a lease is held: some may fail."""
_WITHIN = 2 / 3
"""Share of that time after which a lease that could not be renewed counts as lost: before anybody else may take it."""
_OFTEN_SECONDS = 1.0
"""Longest between two attempts to take one that may become free at any moment."""
_MAX_RECORD = 64
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(rf"({_LABEL}/)?{_LABEL}")

_log = structlog.get_logger(__name__)


class LeaseError(Exception):
    """A lease that can be neither taken nor renewed at present; the message says which and why."""


class LeaseLostError(LeaseError):
    """The lease was held, and is another's to take now: a service that led must end."""


class Lease(Protocol):
    """Held by one service at a time. Calls may wait for disks or networks, and are made one at a time.

    ``described`` names it for operators.
    """

    described: str

    def attempt(self) -> bool:
        """Take it, or renew it; returns whether it is held now. Raises ``LeaseError`` where that cannot be said."""

    def highest_term(self) -> int:
        """Return the highest leader term of any holder so far, as it was when this one took it."""

    def announce(self, term: int) -> None:
        """Leave this holder's leader term for those after it, before any rank hears of it; raises ``LeaseError``."""

    def give_back(self) -> None:
        """Let the next one have it at once; never raises."""


def checked_lease(text: str) -> str:
    """Return ``text``, if it names a lease; raises ``ValueError``."""
    kind, _, name = text.partition(":")
    if (kind == "file" and name) or (kind == "kubernetes" and _KUBERNETES.fullmatch(name)):
        return text
    raise ValueError(
        "a lease is file:PATH, or kubernetes:NAME or kubernetes:NAMESPACE/NAME, named by small letters, digits and '-'"
    )


def named_lease(text: str, seconds: float) -> Lease:
    """Return the lease of that name, held for ``seconds`` at a time; raises ``LeaseError`` where there can be none."""
    kind, _, name = text.partition(":")
    if kind == "file":
        return _FileLease(Path(name))
    from eplb_service.control.server.lease.kubernetes_lease import KubernetesLease, client_of_pod

    holder = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    return KubernetesLease(client_of_pod(), name, holder, seconds, os.environ.get("POD_NAME"))


class _FileLease:
    """A locked file, for services of one host or of hosts that share a file system with locks.

    The kernel lets go of a dead holder's lock at once. The file holds the highest leader term so far, in decimal.
    """

    def __init__(self, path: Path) -> None:
        self.described = f"file {path}"
        self._path = path
        self._file: int | None = None

    def attempt(self) -> bool:
        """As ``Lease.attempt``; what is held needs no renewal, unless somebody has replaced the file."""
        if self._file is not None:
            try:
                return os.path.samestat(self._path.stat(), os.fstat(self._file))
            except OSError:
                return False
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LeaseError(f"cannot open {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return False
            raise LeaseError(f"cannot lock {self._path}: {error.strerror}") from error
        self._file = file
        return True

    def highest_term(self) -> int:
        """As ``Lease.highest_term``; raises ``LeaseError`` where the file is something else."""
        assert self._file is not None
        record = os.pread(self._file, _MAX_RECORD, 0).strip()
        if record and (not record.isdigit() or int(record) >= MAX_VERSION):
            raise LeaseError(f"{self._path} is no lease: it holds no leader term; name another file")
        return int(record or 0)

    def announce(self, term: int) -> None:
        """As ``Lease.announce``."""
        assert self._file is not None
        try:
            os.pwrite(self._file, f"{term:<{_MAX_RECORD - 1}}\n".encode(), 0)
            os.fsync(self._file)
        except OSError as error:
            raise LeaseError(f"cannot write {self._path}: {error.strerror}") from error

    def give_back(self) -> None:
        """As ``Lease.give_back``."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class Leadership:
    """Waits until this process leads by ``lease``, held ``seconds`` without renewal, and notices when it does not.

    ``lost`` is set once it no longer leads; it never does again.
    """

    def __init__(self, lease: Lease, seconds: float) -> None:
        self.lost = asyncio.Event()
        self.described = lease.described
        self._lease = lease
        self._seconds = seconds
        self._renewed_at = 0.0
        self._turn = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def won(self) -> None:
        """Wait until the lease is held, and hold it from then on."""
        every, waiting = min(self._seconds / _RENEWALS, _OFTEN_SECONDS), False
        while not await self._attempt():
            if not waiting:
                _log.info("standing_by", lease=self.described)
                waiting = True
            await asyncio.sleep(every)
        _log.info("lease_taken", lease=self.described)
        self._renewing = asyncio.create_task(self._renew())

    async def highest_term(self) -> int:
        """Return the highest leader term of any holder before; raises ``LeaseError``."""
        async with self._turn:
            return await asyncio.to_thread(self._lease.highest_term)

    async def announce(self, term: int) -> None:
        """Leave this leader's term for the next, before any rank hears of it; raises ``LeaseError``."""
        async with self._turn:
            await asyncio.to_thread(self._lease.announce, term)

    async def close(self) -> None:
        """Give the lease back, if it is held."""
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
        await asyncio.to_thread(self._lease.give_back)

    async def _renew(self) -> None:
        held: bool | None = True
        while not (self._is_overdue() or held is False):
            await asyncio.sleep(self._seconds / _RENEWALS)
            # A process that was stopped meanwhile must not lead on for the time that one more attempt takes.
            held = None if self._is_overdue() else await self._attempt()
        _log.error("lease_lost", lease=self.described)
        self.lost.set()

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._renewed_at > _WITHIN * self._seconds

    async def _attempt(self) -> bool | None:
        """Return whether the lease is held now; ``None``, not renewed, where that cannot be said."""
        at = time.monotonic()
        try:
            async with self._turn:
                held = await asyncio.to_thread(self._lease.attempt)
        except LeaseError as error:
            _log.warning("lease_unreachable", lease=self.described, reason=str(error))
            return None
        if held:
            self._renewed_at = at
        return held
