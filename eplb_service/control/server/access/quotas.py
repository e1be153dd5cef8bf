"""Limits on what one host, and all together, may take: calls, and turns at what takes memory."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from weakref import WeakValueDictionary

from eplb_service.control.core.errors import ExhaustedError

_OF_A_HOST = 4
_TURN_SECONDS = 30.0


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer, such as ``ipv4:10.0.0.7:41234``: a host has many ports, but one quota."""
    return urllib.parse.unquote(peer).rpartition(":")[0] or peer


class Turns:
    """At most ``most`` at a time may do what takes memory, four of them from one host; others wait."""

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._of_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn; raises ``ExhaustedError`` where it does not come within 30 seconds."""
        own = self._of_host.setdefault(host, asyncio.Semaphore(_OF_A_HOST))
        async with _held(own), _held(self._all):
            yield


class Quotas:
    """Counts what every host takes.

    ``calls`` and ``calls_per_host`` are the most calls and streams that all hosts, and one, may have open. There are
    turns to read ``first_messages`` of calls, whose memory nothing else bounds, and ``large_requests``, in parts.
    """

    def __init__(self, calls: int, calls_per_host: int) -> None:
        self._most_calls, self._most_calls_of_host = calls, calls_per_host
        self._calls: Counter[str] = Counter()
        self.first_messages, self.large_requests = Turns(8), Turns(16)

    @contextlib.contextmanager
    def call(self, host: str) -> Iterator[None]:
        """Count an open call; raises ``ExhaustedError`` where there are too many, or the host has."""
        if self._calls.total() >= self._most_calls:
            raise ExhaustedError(f"{self._most_calls} calls are open, the most that max_streams allows")
        if self._calls[host] >= self._most_calls_of_host:
            raise ExhaustedError(
                f"{self._most_calls_of_host} calls are open from this host, the most that max_streams_per_peer allows"
            )
        self._calls[host] += 1
        try:
            yield
        finally:
            self._calls -= Counter([host])


@contextlib.asynccontextmanager
async def _held(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        await asyncio.wait_for(turns.acquire(), _TURN_SECONDS)
    except asyncio.TimeoutError:
        raise ExhaustedError("too much is being read already; try again") from None
    try:
        yield
    finally:
        turns.release()
