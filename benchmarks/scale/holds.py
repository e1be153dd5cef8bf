"""How long single callbacks hold an event loop: what everything else on it waits for."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

LONG_SECONDS = 0.02
"""Nothing should hold the loop for longer."""
_NAMED = 8
_NAMED_SECONDS = 0.001
"""Shorter ones have no name: finding it costs more than most callbacks."""
_TICK_SECONDS = 0.008


@dataclass
class Holds:
    """What callbacks have cost since the last ``clear``.

    Parameters
    ----------
    cpu, wall
        Longest of them, in seconds of this thread's CPU and of the clock, which counts others' work on a busy machine.
    long
        How many took more than ``LONG_SECONDS`` of CPU.
    still
        Longest that the processor did not run within one of them, though the system counts it as the thread's CPU: on
        virtual machines only. It counts neither in ``cpu`` nor in ``long``.
    named
        The longest of those that took a millisecond or more, by what was called.
    """

    cpu: float = 0.0
    wall: float = 0.0
    long: int = 0
    still: float = 0.0
    named: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        self.cpu, self.wall, self.long, self.still = 0.0, 0.0, 0, 0.0
        self.named.clear()

    def took(
        self, what: asyncio.Handle, cpu: float, wall: float, still: float = 0.0, collecting: float = 0.0
    ) -> None:
        cpu -= still
        self.still = max(self.still, still)
        self.wall = max(self.wall, wall)
        self.cpu = max(self.cpu, cpu)
        self.long += cpu > LONG_SECONDS
        if cpu > _NAMED_SECONDS and (len(self.named) < _NAMED or cpu > min(self.named.values())):
            name = f"garbage, {_name(what)}" if collecting > cpu / 2 else _name(what)
            self.named[name] = max(cpu, self.named.get(name, 0.0))
            for shortest in sorted(self.named, key=self.named.__getitem__)[:-_NAMED]:
                del self.named[shortest]


@contextmanager
def watched() -> Iterator[Holds]:
    """Within it every callback of this process's event loops is timed."""
    holds, run = Holds(), asyncio.Handle._run
    collections = _Collections()

    def timed(handle: asyncio.Handle) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        collected, ticked = collections.seconds, ticks.taken
        run(handle)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        still = cpu - ticks.most_since(ticked) if cpu > LONG_SECONDS else 0.0
        holds.took(handle, cpu, wall, max(still, 0.0), collections.seconds - collected)

    with _ticking() as ticks:
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        gc.callbacks.append(collections.heard)
        try:
            yield holds
        finally:
            gc.callbacks.remove(collections.heard)
            asyncio.Handle._run = run  # type: ignore[method-assign]


class _Ticks:
    """Ticks of a timer that the main thread took, whatever it was doing.

    A processor that runs takes each of them, a virtual one that its host does not run takes all that are due as one.
    """

    def __init__(self, pipe: int) -> None:
        self.taken = 0
        self._pipe = pipe

    def take(self, *_: object) -> None:
        """Count those that are noted in the pipe."""
        with suppress(BlockingIOError):
            self.taken += len(os.read(self._pipe, 1 << 16))

    def most_since(self, taken: int) -> float:
        """Seconds that the processor can have run at most since so many had been taken."""
        self.take()
        return (self.taken - taken + 1) * _TICK_SECONDS


@contextmanager
def _ticking() -> Iterator[_Ticks]:
    """Within it a timer ticks, by signals that note themselves in a pipe even while no Python code can run."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    ticks = _Ticks(read)
    handler = signal.signal(signal.SIGALRM, ticks.take)
    noted = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield ticks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.set_wakeup_fd(noted)
        signal.signal(signal.SIGALRM, handler)
        os.close(read)
        os.close(write)


class _Collections:
    """Seconds of CPU that garbage collections took on the thread that this was made on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._began = 0.0

    def heard(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    named = coroutine if coroutine is not None else callback
    return str(getattr(named, "__qualname__", named))
