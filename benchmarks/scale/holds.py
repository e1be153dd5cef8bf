"""How long single callbacks hold an event loop: what everything else on it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONG_SECONDS = 0.02
"""Nothing should hold the loop for longer."""
_NAMED = 8
_NAMED_SECONDS = 0.001
"""Shorter ones have no name: finding it costs more than most callbacks."""


@dataclass
class Holds:
    """What callbacks have cost since the last ``clear``.

    Parameters
    ----------
    cpu, wall
        Longest of them, in seconds of this thread's CPU and of the clock, which counts others' work on a busy machine.
    long
        How many took more than ``LONG_SECONDS`` of CPU.
    named
        The longest of those that took a millisecond or more, by what was called.
    """

    cpu: float = 0.0
    wall: float = 0.0
    long: int = 0
    named: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        self.cpu, self.wall, self.long = 0.0, 0.0, 0
        self.named.clear()

    def took(self, what: asyncio.Handle, cpu: float, wall: float) -> None:
        self.wall = max(self.wall, wall)
        self.cpu = max(self.cpu, cpu)
        self.long += cpu > LONG_SECONDS
        if cpu > _NAMED_SECONDS and (len(self.named) < _NAMED or cpu > min(self.named.values())):
            name = _name(what)
            self.named[name] = max(cpu, self.named.get(name, 0.0))
            for shortest in sorted(self.named, key=self.named.__getitem__)[:-_NAMED]:
                del self.named[shortest]


@contextmanager
def watched() -> Iterator[Holds]:
    """Within it every callback of this process's event loops is timed."""
    holds, run = Holds(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        run(handle)
        holds.took(handle, time.thread_time() - cpu, time.perf_counter() - wall)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield holds
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    named = coroutine if coroutine is not None else callback
    return str(getattr(named, "__qualname__", named))
