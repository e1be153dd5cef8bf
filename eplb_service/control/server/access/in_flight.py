"""Memory for large requests that are under way: bounded in all and for each host, given out in the order of asking."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from eplb_service.control.core.errors import ExhaustedError

_TURN_SECONDS = 30.0
_SHARE_OF_A_HOST = 4
"""One host may have the fourth part of all."""


@dataclass(eq=False)
class _Waiting:
    host: str
    size: int
    turn: asyncio.Future[None]


class InFlight:
    """Gives out memory, in bytes.

    Parameters
    ----------
    most_bytes
        Of all requests together.
    largest
        Of one request; a host may have at least so much.

    ``held`` is what has been given out.
    """

    def __init__(self, most_bytes: int, largest: int) -> None:
        self.held = 0
        self._most = most_bytes
        self._most_per_host = max(largest, most_bytes // _SHARE_OF_A_HOST)
        self._held_by: Counter[str] = Counter()
        self._waiting: dict[_Waiting, None] = {}

    @contextlib.asynccontextmanager
    async def room(self, host: str, size: int) -> AsyncIterator[None]:
        """``size`` bytes for a request from ``host``, for as long as the context lasts; waits for them.

        Raises
        ------
        ExhaustedError
            Where there are none within 30 seconds.
        """
        waiting = _Waiting(host, size, asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        try:
            self._serve()
            await asyncio.wait([waiting.turn], timeout=_TURN_SECONDS)
            if not waiting.turn.done():
                raise ExhaustedError(
                    f"{self._held_by[host]} bytes are under way from this host and {self.held} in all, of the "
                    f"{self._most} that max_in_flight_bytes allows; try again"
                )
            yield
        finally:
            if waiting.turn.done():
                self._take(waiting, -size)
            self._waiting.pop(waiting, None)
            self._serve()

    def _serve(self) -> None:
        """Give to those who wait, in their order; but a host that has its share holds up no other."""
        for waiting in list(self._waiting):
            if self._held_by[waiting.host] + waiting.size > self._most_per_host:
                continue
            if self.held + waiting.size > self._most:
                return
            self._take(waiting, waiting.size)
            del self._waiting[waiting]
            waiting.turn.set_result(None)

    def _take(self, waiting: _Waiting, size: int) -> None:
        self.held += size
        self._held_by[waiting.host] += size
        if not self._held_by[waiting.host]:
            del self._held_by[waiting.host]
