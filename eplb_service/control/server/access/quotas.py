"""Limits on what one host, and all together, may take: calls, and turns at what takes memory."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from eplb_service.control.core.errors import ExhaustedError

_OF_A_HOST = 4
_TURN_SECONDS = 30.0
MAX_PROBES = 64
"""Health checks at a time, which anybody may ask for: beyond them the oldest make room."""
_PROBE_SECONDS = 60.0
_T = TypeVar("_T")


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer, such as ``ipv4:10.0.0.7:41234``: a host has many ports, but one quota."""
    return urllib.parse.unquote(peer).rpartition(":")[0] or peer


def makes_room(hosts: Sequence[str]) -> int:
    """Return the index of the one that makes room: of hosts in order of age, the oldest of the host with the most."""
    return hosts.index(Counter(hosts).most_common(1)[0][0])


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

    ``calls`` are the most calls and streams that all may have open, ``calls_per_host`` those of one host that prove no
    credential. There are turns to decode ``hellos``, which are here, and to read ``large_requests``, in parts.
    """

    def __init__(self, calls: int, calls_per_host: int) -> None:
        self._most_calls, self._most_calls_of_host = calls, calls_per_host
        self._calls: Counter[str] = Counter()
        self._probes: dict[asyncio.Future[Any], str] = {}
        self.hellos, self.large_requests = Turns(8), Turns(16)

    @contextlib.contextmanager
    def call(self, host: str, *, proven: bool) -> Iterator[None]:
        """Count an open call; raises ``ExhaustedError`` where there are too many, or the host has without a credential.

        Many ranks may be behind one address: what bounds those that are ``proven`` is the number of all.
        """
        host = "" if proven else host
        if self._calls.total() >= self._most_calls:
            raise ExhaustedError(f"{self._most_calls} calls are open, the most that max_streams allows")
        if host and self._calls[host] >= self._most_calls_of_host:
            raise ExhaustedError(
                f"{self._most_calls_of_host} calls are open from this host, the most that max_streams_per_peer allows"
            )
        self._calls[host] += 1
        try:
            yield
        finally:
            self._calls -= Counter([host])

    async def probe(self, host: str, answering: Awaitable[_T]) -> _T:
        """Answer a call that anybody may make; raises ``ExhaustedError`` where it lasts long, or made room for another.

        Callers that say nothing keep nobody out: the newest call is always answered.
        """
        if len(self._probes) >= MAX_PROBES:
            oldest = list(self._probes)[makes_room(list(self._probes.values()))]
            del self._probes[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(answering)
        # A cancelled call leaves its task with an error that nobody awaits.
        task.add_done_callback(_take_error)
        self._probes[task] = host
        try:
            return await asyncio.wait_for(task, _PROBE_SECONDS)
        except asyncio.TimeoutError:
            raise ExhaustedError(
                f"a health check lasts {_PROBE_SECONDS:g} seconds at most; call again"
            ) from None
        except asyncio.CancelledError:
            if task in self._probes:
                raise
            raise ExhaustedError(
                f"{MAX_PROBES} health checks are open: the oldest made room for another"
            ) from None
        finally:
            self._probes.pop(task, None)


def _take_error(task: asyncio.Future[Any]) -> None:
    """Mark the task's error as seen, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


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
