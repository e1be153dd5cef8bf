"""Waits until this service leads, and notices when it no longer does."""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog

from eplb_service.control.server.lease.interface import Lease, LeaseError

_RENEWALS = 6
"""Attempts within the time for which a lease is held: some may fail."""
_WITHIN = 2 / 3
"""Share of that time after which a lease that could not be renewed counts as lost: before anybody else may take it."""
_OFTEN_SECONDS = 1.0
"""Longest between two attempts to take one that may become free at any moment."""

_log = structlog.get_logger(__name__)


class Leadership:
    """Of one process, by one lease.

    Parameters
    ----------
    lease
        What it holds while it leads.
    seconds
        For which it is held without being renewed.

    ``lost`` is set once it no longer leads; it never does again.
    """

    def __init__(self, lease: Lease, seconds: float) -> None:
        self.lost = asyncio.Event()
        self._lease = lease
        self._seconds = seconds
        self._renewed_at = 0.0
        self._taken = False
        self._turn = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def described(self) -> str:
        """The lease, for operators."""
        return self._lease.described

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
        """Highest leader term of any holder before; raises ``LeaseError``."""
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
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS)
            # A process that was stopped meanwhile must not lead on for the time that one more attempt takes.
            held = not self._is_overdue() and await self._attempt()
            if not held and (self._is_overdue() or self._taken):
                _log.error("lease_lost", lease=self.described)
                self.lost.set()
                return

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._renewed_at > _WITHIN * self._seconds

    async def _attempt(self) -> bool:
        """Whether it is held now; where that cannot be said, it was not renewed."""
        at, self._taken = time.monotonic(), False
        try:
            async with self._turn:
                held = await asyncio.to_thread(self._lease.attempt)
        except LeaseError as error:
            _log.warning("lease_unreachable", lease=self.described, reason=str(error))
            return False
        if held:
            self._renewed_at = at
        self._taken = not held
        return held
