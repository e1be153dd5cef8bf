"""Numbers step boundaries by the model's own forward passes, not by how often the agent was called, and times them.

A host that misses a call after a forward pass, or makes two, would otherwise have its rank switch layers one pass away
from the others, and tokens routed to weights that are not there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch

from worker_agent.device import Mark, host_empty, host_view
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime

_COPIES_UNDER_WAY = 8
"""More copies of the counter than this are not begun; a device that far behind gives the same answer later."""
_POLL_SECONDS = 0.001
_STILL_CALLS = 64
"""A pass that counts late, or calls beyond one in a pass, are no reason to complain."""


class ForwardClock:
    """Number of the forward pass that a step boundary comes after, equal on all ranks of a healthy group.

    The layers' counter is read at once on a CPU; on a device it is copied in the background, so that ``called`` follows
    a missed call some calls later, and only ``exact``, which waits for the device, is always right.

    Parameters
    ----------
    layers
        The live layers; made at one moment on all ranks, before any serves.

    ``trouble`` is set where the host's count has gone back, until the ranks ``agree`` on another.
    """

    def __init__(self, layers: list[LiveLayer], runtime: Runtime = REAL) -> None:
        # A pass that fails half-way has not run the last layer.
        self._counter = layers[-1].load_counter
        self._device = self._counter.device
        self._known = host_view(self._counter)
        self._first = int(self._counter)
        self._runtime = runtime
        self._calls = 0
        self._missed_calls = 0
        self._copies: deque[tuple[int, torch.Tensor, Mark]] = deque()
        self._idle: deque[tuple[torch.Tensor, Mark]] = deque()
        if self._known is None:
            hosts = host_empty((_COPIES_UNDER_WAY,), torch.int64, self._device)
            self._idle.extend((counter, Mark(self._device)) for counter in hosts.unbind())
        self._offset = 0
        self._highest = self._raw = 0
        self.trouble: str | None = None
        self._moved_at = 0

    @property
    def calls(self) -> int:
        """Number of calls by the host."""
        return self._calls

    @property
    def complaint(self) -> str | None:
        """Problem with the count, or ``None``."""
        still = self._calls - self._moved_at
        if still < _STILL_CALLS:
            return None
        if self.now < self._highest:
            change = f"has gone back from {self._highest} to {self.now}; until it is past that"
        else:
            change = f"has not grown in {still} calls;"
        return f"the layers' load_counter {change} the ranks cannot switch layers"

    @property
    def now(self) -> int:
        """Number of the last forward pass, as far as is known without waiting."""
        return self._offset + self._counted

    @property
    def base(self) -> int:
        """Count of the layers before pass 1, as passes are numbered now."""
        return self._first - self._offset

    @property
    def reached(self) -> int:
        """Number of the highest forward pass so far, also where the host has begun to count from a lower one."""
        return self._highest

    def called(self) -> int:
        """Count a call of the host; return the pass it comes after."""
        self._calls += 1
        if self._known is None:
            self._follow_counter()
        counted = self._counted
        # What is not known without waiting may be a few passes off.
        unknown = _COPIES_UNDER_WAY if self._known is None else 0
        if counted < self._raw - unknown:
            self.trouble = f"the host's count of forward passes went back from {self._raw} to {counted}"
        self._raw = counted
        now = self._offset + counted
        if now > self._highest:
            self._highest, self._moved_at = now, self._calls
        return now

    def exact(self) -> int:
        """Number of the last forward pass of all that are queued; waits for the device."""
        return self._offset + self._device_count()

    def at_rest(self, seconds: float) -> bool:
        """Return whether all that the host has queued so far is done on the device within so many seconds."""
        queued, end = Mark(self._device), self._runtime.now() + seconds
        while not queued.passed() and self._runtime.now() < end:
            self._runtime.sleep(_POLL_SECONDS)
        return queued.passed()

    def agree(self, number: int) -> None:
        """Give the pass that this boundary comes after the ``number`` that all ranks have agreed on, at rest."""
        self._offset += number - self.exact()
        self.trouble = None

    @property
    def _counted(self) -> int:
        """Number of the last forward pass by the host's count, as far as is known without waiting."""
        return self._calls + self._missed_calls if self._known is None else self._device_count()

    def _device_count(self) -> int:
        return int(self._counter if self._known is None else self._known[0]) - self._first

    def _follow_counter(self) -> None:
        while self._copies and self._copies[0][2].passed():
            call, counter, mark = self._copies.popleft()
            self._missed_calls = int(counter) - self._first - call
            self._idle.append((counter, mark))
        if self._idle:
            counter, mark = self._idle.popleft()
            counter.copy_(self._counter, non_blocking=True)
            mark.move()
            self._copies.append((self._calls, counter, mark))


class StepTimer:
    """Microseconds from one step boundary to the next, by this host's clock; never waits for a device.

    A step's time is that from one call of the agent to the next: the forward pass as the host sees it, what the host
    does between two passes, and the agent's own call. Where the host queues passes ahead of the device a single step's
    time may be another's, but not their sum. It is wall time: a host that waits for requests waits in it.

    Parameters
    ----------
    clock
        Nanoseconds that never go back.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began: int | None = None

    def lap(self, passes: int = 1) -> int:
        """Microseconds since the boundary before, at least 1; 0 where there was none, or other than one pass since."""
        now, began = self._clock(), self._began
        self._began = now
        if began is None or passes != 1:
            return 0
        return max(1, (now - began) // 1000)

    def pause(self) -> None:
        """Leave out the time until the next boundary: the model rests."""
        self._began = None


class Stopwatch:
    """Sums the time spent within its context, also where that ends badly; another thread may read it.

    Parameters
    ----------
    clock
        Nanoseconds that never go back.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began = self._nanoseconds = 0

    @property
    def micros(self) -> int:
        """Microseconds so far."""
        return self._nanoseconds // 1000

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nanoseconds += self._clock() - self._began
