"""What one peer, and all peers together, may take of a service: calls, and messages read before it knows from whom."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.server.access.in_flight import InFlight

_FIRST_MESSAGES = 8
_FIRST_MESSAGES_PER_PEER = 4
_TURN_SECONDS = 30.0


def host_of(peer: str) -> str:
    """The host in what gRPC calls a peer, such as ``ipv4:10.0.0.7:41234``: a host has many ports, but one quota."""
    return urllib.parse.unquote(peer).rpartition(":")[0] or peer


class Quotas:
    """Counts what every host takes.

    Parameters
    ----------
    calls, calls_per_peer
        Calls and streams that all hosts, and one, may have open.
    in_flight
        Has the memory of large requests.
    """

    def __init__(self, calls: int, calls_per_peer: int, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._most_calls = calls
        self._open = 0
        self._calls_per_peer = calls_per_peer
        self._calls: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(_FIRST_MESSAGES)
        self._waiting: Counter[str] = Counter()
        self._turns_of: dict[str, asyncio.Semaphore] = {}

    @contextlib.contextmanager
    def call(self, host: str) -> Iterator[None]:
        """A call is open; raises ``ExhaustedError`` where there are too many, or the host has."""
        if self._open >= self._most_calls:
            raise ExhaustedError(f"{self._most_calls} calls are open, the most that max_streams allows")
        if self._calls[host] >= self._calls_per_peer:
            raise ExhaustedError(
                f"{self._calls_per_peer} calls are open from this host, the most that max_streams_per_peer allows"
            )
        self._calls[host] += 1
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            _less(self._calls, host)

    @contextlib.asynccontextmanager
    async def first_message(self, host: str) -> AsyncIterator[None]:
        """A call's first message is read, at most 8 at a time, 4 from one host: nothing else bounds what they hold.

        Raises
        ------
        ExhaustedError
            Where the turn does not come within 30 seconds.
        """
        own = self._turns_of.setdefault(host, asyncio.Semaphore(_FIRST_MESSAGES_PER_PEER))
        self._waiting[host] += 1
        try:
            async with _turn(own), _turn(self._turns):
                yield
        finally:
            _less(self._waiting, host)
            if not self._waiting[host]:
                self._turns_of.pop(host, None)


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


def _less(counter: Counter[str], host: str) -> None:
    counter[host] -= 1
    if counter[host] <= 0:
        del counter[host]
