"""Leadership among several services: the service that holds the lease leads."""

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
from eplb_service.control.server.lease.errors import LeaseError

LEASE_SECONDS = 15.0
"""How long a lease stays valid without renewal. Other Kubernetes controllers use the same value."""
_RENEWALS = 6
"""Number of renewal attempts per lease duration. The lease is not lost if a few of them fail."""
_LOSS_FRACTION = 2 / 3
"""Fraction of the lease duration after which a lease counts as lost if it could not be renewed. The holder thus stops
before another service can acquire the lease."""
_MAX_RETRY_SECONDS = 1.0
"""Maximum interval between attempts to acquire a lease. It is short, because the lease may become free at any
moment."""
_MAX_RECORD = 64
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(rf"({_LABEL}/)?{_LABEL}")

_log = structlog.get_logger(__name__)


class Lease(Protocol):
    """A lease, held by one service at a time.

    Calls may block on a disk or the network. The caller must not make concurrent calls.

    Parameters
    ----------
    described
        Name of the lease, for operators.
    """

    described: str

    def attempt(self) -> bool:
        """Acquire or renew the lease and return True if this service now holds it.

        Raises ``LeaseError`` if the state of the lease cannot be determined.
        """

    def highest_term(self) -> int:
        """Return the highest leader term of all holders, as recorded when this service acquired the lease."""

    def announce(self, term: int) -> None:
        """Record this holder's leader term for its successors; raises ``LeaseError`` if that fails.

        The caller must announce the term before sending it to any rank.
        """

    def give_back(self) -> None:
        """Release the lease, so that another service can acquire it immediately; never raises."""


def checked_lease(text: str) -> str:
    """Return ``text`` if it names a lease; raises ``ValueError`` otherwise.

    Examples
    --------
    >>> checked_lease("kubernetes:serving/eplb")
    'kubernetes:serving/eplb'
    """
    kind, _, name = text.partition(":")
    if (kind == "file" and name) or (kind == "kubernetes" and _KUBERNETES.fullmatch(name)):
        return text
    raise ValueError(
        "expected file:PATH, kubernetes:NAME or kubernetes:NAMESPACE/NAME; "
        "names consist of lowercase letters, digits and '-'"
    )


def named_lease(text: str, seconds: float) -> Lease:
    """Return the lease that ``text`` names; raises ``LeaseError`` if this process cannot use it.

    Parameters
    ----------
    text
        Name of the lease, as accepted by ``checked_lease``.
    seconds
        How long a Kubernetes lease stays valid without renewal.
    """
    kind, _, name = text.partition(":")
    if kind == "file":
        return _FileLease(Path(name))
    from eplb_service.control.server.lease.kubernetes_lease import KubernetesLease, client_of_pod

    holder = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    return KubernetesLease(client_of_pod(), name, holder, seconds, os.environ.get("POD_NAME"))


class _FileLease:
    """Lease held by locking a file, for services on one host or on hosts that share a file system that supports locks.

    The kernel releases the lock as soon as its holder dies. The file contains the highest leader term, in decimal.
    """

    def __init__(self, path: Path) -> None:
        self.described = f"file {path}"
        self._path = path
        self._file: int | None = None

    def attempt(self) -> bool:
        """See ``Lease.attempt``. A lock needs no renewal, but it is lost if the file is replaced."""
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
        """See ``Lease.highest_term``; raises ``LeaseError`` if the file is not a lease."""
        assert self._file is not None
        record = os.pread(self._file, _MAX_RECORD, 0).strip()
        if record and (not record.isdigit() or int(record) >= MAX_VERSION):
            raise LeaseError(
                f"{self._path} is not a lease file (it contains no leader term); choose another path for --lease"
            )
        return int(record or 0)

    def announce(self, term: int) -> None:
        """See ``Lease.announce``."""
        assert self._file is not None
        try:
            os.pwrite(self._file, f"{term:<{_MAX_RECORD - 1}}\n".encode(), 0)
            os.fsync(self._file)
        except OSError as error:
            raise LeaseError(f"cannot write {self._path}: {error.strerror}") from error

    def give_back(self) -> None:
        """See ``Lease.give_back``."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class Leadership:
    """Acquires a lease, renews it, and detects its loss.

    The event ``lost`` is set once this process has lost the lease. The process then never leads again.

    Parameters
    ----------
    lease
        Lease whose holder leads.
    seconds
        How long the lease stays valid without renewal.
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
        """Wait until the lease is acquired and start renewing it."""
        interval = min(self._seconds / _RENEWALS, _MAX_RETRY_SECONDS)
        waiting = False
        while not await self._attempt():
            if not waiting:
                _log.info("standing_by", lease=self.described)
                waiting = True
            await asyncio.sleep(interval)
        _log.info("lease_taken", lease=self.described)
        self._renewing = asyncio.create_task(self._renew())

    async def highest_term(self) -> int:
        """Return the highest leader term of all previous holders; raises ``LeaseError`` if the lease is invalid."""
        async with self._turn:
            return await asyncio.to_thread(self._lease.highest_term)

    async def announce(self, term: int) -> None:
        """Record this leader's term for its successors; raises ``LeaseError`` if that fails.

        The caller must announce the term before sending it to any rank.
        """
        async with self._turn:
            await asyncio.to_thread(self._lease.announce, term)

    async def close(self) -> None:
        """Stop renewing the lease and release it if it is held."""
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
        await asyncio.to_thread(self._lease.give_back)

    async def _renew(self) -> None:
        held: bool | None = True
        while not (self._is_overdue() or held is False):
            await asyncio.sleep(self._seconds / _RENEWALS)
            # A process that was suspended during the sleep must not keep leading while it makes another attempt.
            held = None if self._is_overdue() else await self._attempt()
        _log.error("lease_lost", lease=self.described)
        self.lost.set()

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._renewed_at > _LOSS_FRACTION * self._seconds

    async def _attempt(self) -> bool | None:
        """Return True if the lease is now held, False if it is not, and ``None`` if its state is unknown."""
        began = time.monotonic()
        try:
            async with self._turn:
                held = await asyncio.to_thread(self._lease.attempt)
        except LeaseError as error:
            _log.warning("lease_unreachable", lease=self.described, reason=str(error))
            return None
        if held:
            self._renewed_at = began
        return held
