"""Numbers step boundaries by the model's own forward passes, not by how often the agent was called.

A host that misses a call after a forward pass, or makes two, would otherwise have its rank switch layers one pass away
from the others, and tokens routed to weights that are not there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from worker_agent.adapters.live_layer import LiveLayer
from worker_agent.device import Mark, host_empty

_COPIES_UNDER_WAY = 8
"""More copies of the counter than this are not begun; a device that far behind gives the same answer later."""


_STILL_CALLS = 64
"""A pass that counts late, or calls beyond one in a pass, are no reason to complain."""


@dataclass(frozen=True)
class _CounterCopy:
    """The counter on its way from the device, begun at call number ``call``."""

    call: int
    counter: torch.Tensor
    arrived: Mark


class ForwardClock:
    """Which forward pass a step boundary comes after, equal on all ranks of a healthy group.

    Where the host numbers its steps, that number counts. Else the layers' counter does: read at once on a CPU; on a
    device copied in the background, so that ``boundary`` follows a missed call some calls later, and only ``exact``,
    which waits for the device, is always right.

    Parameters
    ----------
    layers
        The live layers; made at one moment on all ranks, before any serves.
    """

    def __init__(self, layers: list[LiveLayer]) -> None:
        # A pass that fails half-way has not run the last layer.
        self._counter = layers[-1].load_counter
        self._device = self._counter.device
        self._first = int(self._counter)
        self._calls = 0
        self._missed_calls = 0
        self._copies: deque[_CounterCopy] = deque()
        self._host_step: int | None = None
        self._highest = 0
        self._moved_at = 0

    @property
    def calls(self) -> int:
        """How often the host has called."""
        return self._calls

    @property
    def complaint(self) -> str | None:
        """What is wrong with the host's count, or ``None``."""
        still = self._calls - self._moved_at
        if still < _STILL_CALLS:
            return None
        whose = "the layers' load_counter" if self._host_step is None else "the host's number of the step"
        return f"{whose} has not grown in {still} calls; the ranks cannot switch layers"

    @property
    def now(self) -> int:
        """Number of the last forward pass, as far as is known without waiting."""
        if self._host_step is not None:
            return self._host_step
        if self._device.type == "cpu":
            return int(self._counter) - self._first
        return self._calls + self._missed_calls

    def called(self, host_step: int | None) -> int:
        """The host has called once more, with its own number of the step where it has one; the pass it comes after."""
        self._calls += 1
        self._host_step = host_step
        if self._device.type != "cpu" and host_step is None:
            self._follow_counter()
        now = self.now
        if now > self._highest:
            self._highest, self._moved_at = now, self._calls
        return now

    def exact(self) -> int:
        """Number of the last forward pass; waits for the device where the host does not number its steps."""
        return self._host_step if self._host_step is not None else int(self._counter) - self._first

    def _follow_counter(self) -> None:
        while self._copies and self._copies[0].arrived.passed():
            done = self._copies.popleft()
            self._missed_calls = int(done.counter) - self._first - done.call
        if len(self._copies) < _COPIES_UNDER_WAY:
            counter = host_empty((), torch.int64, self._device)
            counter.copy_(self._counter, non_blocking=True)
            self._copies.append(_CounterCopy(self._calls, counter, Mark(self._device)))
