"""Counts forward passes to number step boundaries, and measures the time between boundaries.

Boundaries are numbered by the model's forward passes rather than by calls to the agent. A host may miss a call after a
pass, or call twice. If calls were counted, its rank would then switch layers one pass before or after its peers, and
tokens would be routed to slots that hold the wrong experts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch

from worker_agent.device import Mark, empty_on_host, host_view
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime

_MAX_COPIES = 8
"""Maximum number of pending copies of the counter. If the device is further behind, the count is updated later."""
_POLL_SECONDS = 0.001
_STILL_CALLS = 64
"""Number of calls without a new pass after which the clock complains. Late counts and repeated calls resolve sooner."""


class ForwardClock:
    """Clock that numbers each step boundary by the last forward pass before it.

    The number is the same on every rank of a healthy group. On a CPU, the layers' counter is read directly. On a
    device, it is copied in the background, so ``called`` accounts for a missed call only a few calls later. Only
    ``exact``, which waits for the device, is always correct.

    Parameters
    ----------
    layers
        The live layers. All ranks create their clocks at the same pass, before any of them serves.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    trouble
        Problem to report if the host's count has gone backwards; reset to ``None`` once the ranks ``agree`` on a new
        number.
    """

    def __init__(self, layers: list[LiveLayer], runtime: Runtime = REAL) -> None:
        # If a pass fails halfway, the last layer has not run, so its counter covers only complete passes.
        self._counter = layers[-1].load_counter
        self._device = self._counter.device
        self._host_counter = host_view(self._counter)
        self._first = int(self._counter)
        self._runtime = runtime
        self._calls = 0
        self._missed_calls = 0
        self._copies: deque[tuple[int, torch.Tensor, Mark]] = deque()
        self._idle: deque[tuple[torch.Tensor, Mark]] = deque()
        if self._host_counter is None:
            copies = empty_on_host((_MAX_COPIES,), torch.int64, self._device)
            self._idle.extend((copy, Mark(self._device)) for copy in copies.unbind())
        self._offset = 0
        self._highest = 0
        self._last_count = 0
        self.trouble: str | None = None
        self._moved_at = 0

    @property
    def calls(self) -> int:
        """Number of calls that the host has made."""
        return self._calls

    @property
    def complaint(self) -> str | None:
        """Problem with the host's pass count, or ``None``."""
        still = self._calls - self._moved_at
        if still < _STILL_CALLS:
            return None
        if self.now < self._highest:
            return (
                f"the layers' load_counter has decreased from {self._highest} to {self.now}; "
                f"the ranks cannot switch layers until it exceeds {self._highest}"
            )
        return f"the layers' load_counter has not grown in {still} calls; the ranks cannot switch layers"

    @property
    def now(self) -> int:
        """Number of the last forward pass, estimated without waiting for the device."""
        return self._offset + self._count

    @property
    def base(self) -> int:
        """Value of the layers' counter before pass 1, in the current numbering."""
        return self._first - self._offset

    @property
    def reached(self) -> int:
        """Highest forward pass number so far. It never goes backwards, even if the host's count does."""
        return self._highest

    def called(self) -> int:
        """Count a call by the host, and return the number of the forward pass that preceded it."""
        self._calls += 1
        if self._host_counter is None:
            self._follow_counter()
        count = self._count
        # A count that does not wait for the device may be off by a few passes.
        tolerance = _MAX_COPIES if self._host_counter is None else 0
        if count < self._last_count - tolerance:
            self.trouble = f"the host's count of forward passes decreased from {self._last_count} to {count}"
        self._last_count = count
        now = self._offset + count
        if now > self._highest:
            self._highest = now
            self._moved_at = self._calls
        return now

    def exact(self) -> int:
        """Wait for the device, and return the number of the last queued forward pass."""
        return self._offset + self._device_count()

    def at_rest(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the device to complete all queued work, and return True if it does."""
        queued = Mark(self._device)
        end = self._runtime.now() + seconds
        while not queued.passed() and self._runtime.now() < end:
            self._runtime.sleep(_POLL_SECONDS)
        return queued.passed()

    def agree(self, number: int) -> None:
        """Set the last forward pass's number to the one that all ranks agreed on. The device's queue must be empty."""
        self._offset += number - self.exact()
        self.trouble = None

    @property
    def _count(self) -> int:
        """Number of passes since the clock was created, estimated without waiting for the device."""
        return self._calls + self._missed_calls if self._host_counter is None else self._device_count()

    def _device_count(self) -> int:
        counter = self._counter if self._host_counter is None else self._host_counter[0]
        return int(counter) - self._first

    def _follow_counter(self) -> None:
        """Update the number of missed calls from the copies that have arrived, and start a new copy."""
        while self._copies and self._copies[0][2].passed():
            call, copy, mark = self._copies.popleft()
            self._missed_calls = int(copy) - self._first - call
            self._idle.append((copy, mark))
        if self._idle:
            copy, mark = self._idle.popleft()
            copy.copy_(self._counter, non_blocking=True)
            mark.move()
            self._copies.append((self._calls, copy, mark))


class StepTimer:
    """Step timer based on the host's clock, in microseconds. It never waits for a device.

    A step's time is the time between two calls to the agent. It includes the forward pass as seen by the host, the
    host's work between two passes, and the agent's own call. If the host queues passes ahead of the device, time may be
    attributed to the wrong step, but the sum over all steps is correct. It is wall time, so it includes any time that
    the host spends waiting for requests.

    Parameters
    ----------
    clock
        Callable that returns monotonic time in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began: int | None = None

    def lap(self, passes: int = 1) -> int:
        """Return the time since the last boundary, and start the next lap.

        Parameters
        ----------
        passes
            Number of forward passes since the last boundary.

        Returns
        -------
        int
            Microseconds since the last boundary, at least 1. 0 if there was no previous boundary, or if ``passes`` is
            not 1.
        """
        now = self._clock()
        began = self._began
        self._began = now
        if began is None or passes != 1:
            return 0
        return max(1, (now - began) // 1000)

    def pause(self) -> None:
        """Exclude the time until the next boundary, because the model is paused."""
        self._began = None


class Stopwatch:
    """Context manager that adds up the time spent in its block, even if the block raises. Any thread may read the sum.

    Parameters
    ----------
    clock
        Callable that returns monotonic time in nanoseconds.

    Examples
    --------
    >>> times_ns = iter([0, 5_000, 20_000, 22_000])
    >>> watch = Stopwatch(clock=lambda: next(times_ns))
    >>> for _ in range(2):
    ...     with watch:
    ...         pass
    >>> watch.micros
    7
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began = 0
        self._nanoseconds = 0

    @property
    def micros(self) -> int:
        """Total time so far, in microseconds."""
        return self._nanoseconds // 1000

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nanoseconds += self._clock() - self._began
