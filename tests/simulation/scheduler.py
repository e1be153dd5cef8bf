"""One thread that runs all processes of a simulation in turn, in a seeded order and on a simulated clock.

Threads are greenlets. Each runs until it waits, and every wait is an entry in the scheduler's heap, so a run depends
only on its seed.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

_WAKE_SECONDS = 1e-4
"""Longest time from an event until a thread that waits for it gets its turn, in seconds."""


class Scheduler:
    """A run's clock, heap and log."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.log: list[tuple[float, str, str]] = []
        self.digest = 0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._hub = getcurrent()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Schedule a call at ``moment``.

        If several calls are due at the same moment, they are made in the order of scheduling.
        """
        self._number += 1
        heapq.heappush(self._heap, (moment, self._number, call))

    def run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call = heapq.heappop(heap)
            self.events += 1
            call()
        self.now = until

    def note(self, who: str, what: str) -> None:
        line = (round(self.now, 6), who, what)
        self.digest = zlib.crc32(repr(line).encode(), self.digest)
        self.log.append(line)

    def fingerprint(self) -> tuple[int, int, int]:
        """Return a fingerprint of the run that covers its log, its events, and all random draws."""
        return self.digest, self.events, zlib.crc32(repr(self.random.getstate()).encode())

    def soon(self) -> float:
        """Return the moment at which a thread that is woken now gets its turn."""
        return self.now + self.random.random() * _WAKE_SECONDS


class Thread:
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, target: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self._target = target
        self.waits = 0
        self._greenlet = greenlet(self._run, process.scheduler._hub)
        self._greenlet.thread = self
        self.ended = Event(process)
        process.threads.append(self)
        self.wake(0)

    def is_alive(self) -> bool:
        return not self._greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)

    def wake(self, wait: int, woken: bool = True) -> None:
        """End the thread's wait number ``wait``, so that the thread continues when its turn comes."""
        scheduler = self.process.scheduler
        scheduler.at(scheduler.soon(), lambda: self._turn(wait, woken))

    def wait(self, timeout: float | None) -> bool:
        """Yield to other threads until woken or until the timeout expires. Return True if the thread was woken."""
        process = self.process
        if not process.alive:
            raise GreenletExit
        self.waits += 1
        number = self.waits
        if timeout is not None:
            # A timeout below the clock's resolution would not advance the clock, so the thread would wait in an endless
            # loop.
            due = process.scheduler.now + max(1e-6, timeout) * process.drift
            process.scheduler.at(due, lambda: self._turn(number, False))
        woken: bool = process.scheduler._hub.switch()
        return woken

    def end(self) -> None:
        """Unwind the thread because its process has exited. The thread can no longer wait."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _turn(self, wait: int, woken: bool) -> None:
        if wait != self.waits or self._greenlet.dead or not self.process.alive:
            return
        frozen = max(self.process.frozen_until, self.process.held.get(self.name, 0.0))
        if self.process.scheduler.now < frozen:
            self.process.scheduler.at(frozen, lambda: self._turn(wait, woken))
            return
        self.waits += 1
        self._greenlet.switch(woken)

    def _run(self, _: bool) -> None:
        try:
            self._target()
        except GreenletExit:
            pass
        except Exception as error:
            self.process.scheduler.note(
                self.process.name, f"{self.name} died: {type(error).__name__}: {error}"
            )
        finally:
            self._target = lambda: None
            if self.process.alive:
                self.ended.set()
                self.process.threads.remove(self)


class Process:
    """A simulated process: threads that end together, and a clock that may drift.

    It also serves as its agent's runtime.
    """

    def __init__(self, scheduler: Scheduler, name: str, drift: float = 1.0, network: Any = None) -> None:
        self.scheduler = scheduler
        self.name = name
        self.drift = drift
        self.network = network
        self.alive = True
        self.frozen_until = 0.0
        self.held: dict[str, float] = {}
        self.failing: dict[str, tuple[int, type[BaseException]]] = {}
        self.failing_line = 0
        self.threads: list[Thread] = []
        self.on_end: list[Callable[[], None]] = []
        self._began = scheduler.now
        self.event = partial(Event, self)
        self.condition = partial(Condition, self)
        self.queue = partial(Queue, self)
        self.later = partial(Timer, self)
        self.datagrams = lambda family: self.network.socket(self)

    def freeze(self, seconds: float, thread: str | None = None) -> None:
        """Freeze the process, or one of its threads, for ``seconds``."""
        until = self.scheduler.now + seconds
        if thread is not None:
            self.held[thread] = max(self.held.get(thread, 0.0), until)
        else:
            self.frozen_until = max(self.frozen_until, until)

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        for thread in self.threads:
            thread.end()
        self.threads.clear()
        for call in self.on_end:
            call()

    # Runtime interface for the agent

    def now(self) -> float:
        self._fail() if self.failing else None
        return self._began + (self.scheduler.now - self._began) / self.drift

    def _fail(self) -> None:
        """Raise this thread's scheduled error once the thread has read the clock the scheduled number of times."""
        thread: Thread | None = getattr(getcurrent(), "thread", None)
        if thread is None or thread.process is not self or thread.name not in self.failing:
            return
        looks, error = self.failing.pop(thread.name)
        if looks > 1:
            self.failing[thread.name] = looks - 1, error
            return
        self.scheduler.note(self.name, f"{error.__name__} in {thread.name}")
        raise error("simulated")

    def sleep(self, seconds: float) -> None:
        self.current().wait(seconds)

    def spawn(self, name: str, target: Callable[[], object], *, daemon: bool = True) -> Thread:
        return Thread(self, name, target)

    def current(self) -> Thread:
        if not self.alive:
            raise GreenletExit
        thread: Thread = getcurrent().thread
        return thread


class Event:
    """Like ``threading.Event``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._set = False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        while self._waiting:
            thread, number = self._waiting.pop(0)
            thread.wake(number)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            thread = self._process.current()
            self._waiting.append((thread, thread.waits + 1))
            thread.wait(timeout)
        return self._set


class Condition:
    """Like ``threading.Condition``. Only one thread runs at a time, so there is nothing to lock."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: deque[tuple[Thread, int]] = deque()

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return None

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            thread, number = self._waiting.popleft()
            thread.wake(number)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._process.current()
        entry = (thread, thread.waits + 1)
        self._waiting.append(entry)
        woken = thread.wait(timeout)
        if not woken and entry in self._waiting:
            self._waiting.remove(entry)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._process.now() + timeout
        while not (result := predicate()) and (end is None or self._process.now() < end):
            self.wait(None if end is None else end - self._process.now())
        return result


class Queue:
    """Like ``queue.SimpleQueue``."""

    def __init__(self, process: Process) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(process)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.notify()

    def get(self, timeout: float | None = None) -> Any:
        if not self._changed.wait_for(lambda: bool(self._items), timeout):
            raise Empty
        return self._items.popleft()


class Timer:
    """Like ``threading.Timer``, but already started."""

    def __init__(self, process: Process, seconds: float, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._process = process
        process.scheduler.at(process.scheduler.now + seconds * process.drift, self._due)

    def cancel(self) -> None:
        self._call = None

    def _due(self) -> None:
        if self._call is not None and self._process.alive:
            Thread(self._process, "timer", self._call)
