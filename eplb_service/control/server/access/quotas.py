"""Quotas per host and for all hosts together: open calls, and turns for memory-intensive work."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from eplb_service.control.core.errors import ExhaustedError

_MAX_TURNS_PER_HOST = 4
_TURN_SECONDS = 30.0
MAX_PROBES = 64
"""Maximum number of open health checks, which need no credentials. Any further check evicts an old one."""
_PROBE_SECONDS = 60.0
_T = TypeVar("_T")


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer. All ports of a host share one quota.

    Examples
    --------
    >>> host_of("ipv4:10.0.0.7:41234")
    'ipv4:10.0.0.7'
    """
    return urllib.parse.unquote(peer).rpartition(":")[0] or peer


def index_to_evict(hosts: Sequence[str]) -> int:
    """Return the index of the entry to evict: the oldest entry of the host with the most entries.

    Parameters
    ----------
    hosts
        Host of each entry, oldest first.

    Examples
    --------
    >>> index_to_evict(["a", "b", "b", "c"])
    1
    """
    return hosts.index(Counter(hosts).most_common(1)[0][0])


class Turns:
    """Turns for memory-intensive work, with at most four per host. Further callers wait.

    Parameters
    ----------
    most
        Number of turns shared by all hosts.
    """

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._of_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Hold a turn until the context exits; raises ``ExhaustedError`` if none becomes free within 30 seconds."""
        turns_of_host = self._of_host.setdefault(host, asyncio.Semaphore(_MAX_TURNS_PER_HOST))
        async with _held(turns_of_host), _held(self._all):
            yield


class Quotas:
    """Quotas for open calls and streams, and turns for memory-intensive work.

    ``hellos`` provides turns for decoding a Hello, and ``large_requests`` for reading a request that arrives in parts.

    Parameters
    ----------
    calls
        Maximum number of open calls and streams of all hosts together.
    calls_per_host
        Maximum number of open calls and streams per host for callers without credentials.
    """

    def __init__(self, calls: int, calls_per_host: int) -> None:
        self._max_calls = calls
        self._max_calls_per_host = calls_per_host
        self._calls: Counter[str] = Counter()
        self._probes: dict[asyncio.Future[Any], str] = {}
        self.hellos = Turns(8)
        self.large_requests = Turns(16)

    @contextlib.contextmanager
    def call(self, host: str, *, proven: bool) -> Iterator[None]:
        """Count a call while the context is active; raises ``ExhaustedError`` if too many calls are open.

        The quota per host does not apply to callers with credentials, because many ranks may share one address.

        Parameters
        ----------
        host
            Host of the caller.
        proven
            True if the caller has authenticated with a credential.
        """
        host = "" if proven else host
        if self._calls.total() >= self._max_calls:
            raise ExhaustedError(
                f"{self._max_calls} calls are open, the limit set by max_streams; retry later"
            )
        if host and self._calls[host] >= self._max_calls_per_host:
            raise ExhaustedError(
                f"{self._max_calls_per_host} calls are open from this host, the limit set by max_streams_per_peer; "
                "close some of them"
            )
        self._calls[host] += 1
        try:
            yield
        finally:
            self._calls -= Counter([host])

    async def probe(self, host: str, answering: Awaitable[_T]) -> _T:
        """Serve a health check; raises ``ExhaustedError`` if it lasts too long or is evicted by a newer one.

        The newest check is always served, so silent callers cannot keep others out.
        """
        if len(self._probes) >= MAX_PROBES:
            oldest = list(self._probes)[index_to_evict(list(self._probes.values()))]
            del self._probes[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(answering)
        # If this call is cancelled, nothing retrieves the task's error.
        task.add_done_callback(_mark_error_retrieved)
        self._probes[task] = host
        try:
            return await asyncio.wait_for(task, _PROBE_SECONDS)
        except asyncio.TimeoutError:
            raise ExhaustedError(
                f"a health check may last at most {_PROBE_SECONDS:g} seconds; retry"
            ) from None
        except asyncio.CancelledError:
            if task in self._probes:
                raise
            raise ExhaustedError(
                f"{MAX_PROBES} health checks are open, the maximum, and a newer one evicted this one; retry"
            ) from None
        finally:
            self._probes.pop(task, None)


def _mark_error_retrieved(task: asyncio.Future[Any]) -> None:
    """Mark the task's error as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


@contextlib.asynccontextmanager
async def _held(turns: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        await asyncio.wait_for(turns.acquire(), _TURN_SECONDS)
    except asyncio.TimeoutError:
        raise ExhaustedError("too many large requests are already being read; retry") from None
    try:
        yield
    finally:
        turns.release()
