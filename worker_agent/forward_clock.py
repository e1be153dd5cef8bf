"""Numbering and timing of step boundaries.

A boundary is numbered by the model's forward passes and not by the calls of the agent. A host may miss a call after a
pass, or call twice. If calls were counted, its rank would then switch layers one pass before or after its peers, and
tokens would go to slots that hold other experts.
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

_MAX_COPIES = 8
"""Limit on pending copies of the counter. If the device is further behind, the count is only updated later."""
_POLL_SECONDS = 0.001
_STILL_CALLS = 64
"""Calls without a new pass before the clock complains. Late counts and repeated calls are over sooner."""


class ForwardClock:
    """Number of the last forward pass before the current step boundary.

    It is the same on every rank of a healthy group. On a CPU, the layers' counter is read at once. On a device, it is
    copied in the background, so ``called`` accounts for a missed call only some calls later. Only ``exact``, which
    waits for the device, is always right.

    Parameters
    ----------
    layers
        The live layers. All ranks create their clock at the same moment, before any of them serves.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    trouble
        Problem if the host's count has gone back, until the ranks ``agree`` on another number; ``None`` otherwise.
    """

    def __init__(self, layers: list[LiveLayer], runtime: Runtime = REAL) -> None:
        # If a pass fails half-way, the last layer has not run.
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
            copies = host_empty((_MAX_COPIES,), torch.int64, self._device)
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
        """Problem with the host's count of passes, or ``None``."""
        still = self._calls - self._moved_at
        if still < _STILL_CALLS:
            return None
        if self.now < self._highest:
            return (
                f"the layers' load_counter has gone back from {self._highest} to {self.now}; "
                f"the ranks cannot switch layers until it exceeds {self._highest}"
            )
        return f"the layers' load_counter has not grown in {still} calls; the ranks cannot switch layers"

    @property
    def now(self) -> int:
        """Number of the last forward pass, estimated without waiting for the device."""
        return self._offset + self._count

    @property
    def base(self) -> int:
        """Value that the layers' counter had before pass 1, in the current numbering."""
        return self._first - self._offset

    @property
    def reached(self) -> int:
        """Highest number of a forward pass so far. It does not go back if the host's count does."""
        return self._highest

    def called(self) -> int:
        """Count a call of the host, and return the number of the forward pass before it."""
        self._calls += 1
        if self._host_counter is None:
            self._follow_counter()
        count = self._count
        # Without waiting for the device, the count may be a few passes off.
        tolerance = _MAX_COPIES if self._host_counter is None else 0
        if count < self._last_count - tolerance:
            self.trouble = f"the host's count of forward passes went back from {self._last_count} to {count}"
        self._last_count = count
        now = self._offset + count
        if now > self._highest:
            self._highest = now
            self._moved_at = self._calls
        return now

    def exact(self) -> int:
        """Return the number of the last queued forward pass. Waits for the device."""
        return self._offset + self._device_count()

    def at_rest(self, seconds: float) -> bool:
        """Return True if the device completes all queued work within ``seconds``. Waits until then."""
        queued = Mark(self._device)
        end = self._runtime.now() + seconds
        while not queued.passed() and self._runtime.now() < end:
            self._runtime.sleep(_POLL_SECONDS)
        return queued.passed()

    def agree(self, number: int) -> None:
        """Set the number of the last forward pass, as all ranks have agreed. The device must have no queued work."""
        self._offset += number - self.exact()
        self.trouble = None

    @property
    def _count(self) -> int:
        """Passes since the clock was created by the layers' counter, estimated without waiting for the device."""
        return self._calls + self._missed_calls if self._host_counter is None else self._device_count()

    def _device_count(self) -> int:
        counter = self._counter if self._host_counter is None else self._host_counter[0]
        return int(counter) - self._first

    def _follow_counter(self) -> None:
        """Update the number of missed calls from the copies that have arrived, and start another copy."""
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
    """Timer of steps by this host's clock, in microseconds. It never waits for a device.

    A step's time is the time between two calls of the agent. It includes the forward pass as the host sees it, the
    host's work between two passes, and the agent's own call. If the host queues passes ahead of the device, the time
    may belong to another step, but the sum over the steps is right. It is wall time, so it includes the time that the
    host waits for requests.

    Parameters
    ----------
    clock
        Returns the time of a monotonic clock in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._began: int | None = None

    def lap(self, passes: int = 1) -> int:
        """Return the microseconds since the last boundary, at least 1, and start the next lap.

        Parameters
        ----------
        passes
            Forward passes since the last boundary.

        Returns
        -------
        int
            0 if there was no last boundary, or if ``passes`` is not 1.
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
    """Context manager that sums the time spent in it, even if the block raises. Any thread may read the sum.

    Parameters
    ----------
    clock
        Returns the time of a monotonic clock in nanoseconds.

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
        """Sum so far, in microseconds."""
        return self._nanoseconds // 1000

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nanoseconds += self._clock() - self._began
