"""Limits on what one host, and all together, may take: calls, first messages, memory for large requests."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from eplb_service.control.core.errors import ExhaustedError

_FIRST_MESSAGES = 8
_FIRST_MESSAGES_PER_HOST = 4
_TURN_SECONDS = 30.0
_SHARE_OF_A_HOST = 4
"""One host may have a fourth of the memory."""


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer, such as ``ipv4:10.0.0.7:41234``: a host has many ports, but one quota."""
    return urllib.parse.unquote(peer).rpartition(":")[0] or peer


class Quotas:
    """Counts what every host takes.

    Parameters
    ----------
    calls, calls_per_host
        Most calls and streams that all hosts, and one, may have open.
    in_flight_bytes
        Most memory of large requests that are under way.
    largest
        Bytes of the largest request; a host may have at least so much.

    ``held`` is the memory given out, in bytes.
    """

    def __init__(self, calls: int, calls_per_host: int, in_flight_bytes: int, largest: int) -> None:
        self.held = 0
        self._most_calls, self._most_calls_of_host = calls, calls_per_host
        self._calls: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(_FIRST_MESSAGES)
        self._beginning: Counter[str] = Counter()
        self._turns_of: dict[str, asyncio.Semaphore] = {}
        self._most_bytes = in_flight_bytes
        self._most_bytes_of_host = max(largest, in_flight_bytes // _SHARE_OF_A_HOST)
        self._held_by: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    @contextlib.contextmanager
    def call(self, host: str) -> Iterator[None]:
        """Count an open call; raises ``ExhaustedError`` where there are too many, or the host has."""
        if self._calls.total() >= self._most_calls:
            raise ExhaustedError(f"{self._most_calls} calls are open, the most that max_streams allows")
        if self._calls[host] >= self._most_calls_of_host:
            raise ExhaustedError(
                f"{self._most_calls_of_host} calls are open from this host, the most that max_streams_per_peer allows"
            )
        with _counted(self._calls, host):
            yield

    @contextlib.asynccontextmanager
    async def first_message(self, host: str) -> AsyncIterator[None]:
        """Wait to read a call's first message, at most 8 at a time, 4 from one host: nothing else bounds their memory.

        Raises ``ExhaustedError`` where the turn does not come within 30 seconds.
        """
        own = self._turns_of.setdefault(host, asyncio.Semaphore(_FIRST_MESSAGES_PER_HOST))
        try:
            with _counted(self._beginning, host):
                async with _turn(own), _turn(self._turns):
                    yield
        finally:
            if host not in self._beginning:
                self._turns_of.pop(host, None)

    @contextlib.asynccontextmanager
    async def memory(self, host: str, size: int) -> AsyncIterator[None]:
        """Wait for ``size`` bytes for a large request, and hold them as long as the context lasts.

        Raises ``ExhaustedError`` where there are none within 30 seconds.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = host, size
        try:
            self._give()
            await asyncio.wait([turn], timeout=_TURN_SECONDS)
            if not turn.done():
                raise ExhaustedError(
                    f"{self._held_by[host]} bytes are under way from this host and {self.held} in all, of the "
                    f"{self._most_bytes} that requests under way may take; try again"
                )
            yield
        finally:
            if turn.done():
                self._take(host, -size)
            self._waiting.pop(turn, None)
            self._give()

    def _give(self) -> None:
        """Serve requests in their order; but a host that has its share holds up no other."""
        for turn, (host, size) in list(self._waiting.items()):
            if self._held_by[host] + size > self._most_bytes_of_host:
                continue
            if self.held + size > self._most_bytes:
                return
            self._take(host, size)
            del self._waiting[turn]
            turn.set_result(None)

    def _take(self, host: str, size: int) -> None:
        self.held += size
        self._held_by[host] += size
        if not self._held_by[host]:
            del self._held_by[host]


@contextlib.asynccontextmanager
async def _turn(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        await asyncio.wait_for(turns.acquire(), _TURN_SECONDS)
    except asyncio.TimeoutError:
        raise ExhaustedError("too many calls are beginning; try again") from None
    try:
        yield
    finally:
        turns.release()


@contextlib.contextmanager
def _counted(counter: Counter[str], host: str) -> Iterator[None]:
    counter[host] += 1
    try:
        yield
    finally:
        counter[host] -= 1
        if not counter[host]:
            del counter[host]
