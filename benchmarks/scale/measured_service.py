"""A service in a separate process that reports its CPU time, its memory and the longest block of its event loop."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.settings import load_settings
from eplb_service.telemetry.logs import configure_logs

LONG_SECONDS = 0.1
"""Maximum CPU time that one callback may block the event loop."""
_TICK_SECONDS = 0.008


@dataclass
class Holds:
    """Longest callback since the last ``clear``.

    Parameters
    ----------
    cpu
        CPU seconds of the thread in the longest callback.
    still
        Longest time within one callback in which the host did not run the virtual CPU, although the guest counts it as
        CPU time of the thread. It is not included in ``cpu``.
    name
        Name of the longest callback.
    """

    cpu: float = 0.0
    still: float = 0.0
    name: str = ""

    @classmethod
    def merged(cls, phases: Iterable[Holds]) -> Holds:
        """Return the maximum over several phases of a run."""
        phases = list(phases)
        longest = max(phases, key=lambda phase: phase.cpu)
        return cls(longest.cpu, max(phase.still for phase in phases), longest.name)

    def clear(self) -> None:
        """Reset all figures."""
        self.cpu = 0.0
        self.still = 0.0
        self.name = ""

    def record(self, handle: asyncio.Handle, cpu: float, still: float) -> None:
        """Record one callback."""
        self.still = max(self.still, still)
        if cpu - still > self.cpu:
            self.cpu = cpu - still
            self.name = _name(handle)


@contextmanager
def watched() -> Iterator[Holds]:
    """Time every callback in this process's event loops while the context is active."""
    holds = Holds()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        ticks_before = ticks.count
        run(handle)
        cpu = time.thread_time() - began
        still = cpu - ticks.max_seconds_since(ticks_before) if cpu > LONG_SECONDS else 0.0
        holds.record(handle, cpu, max(still, 0.0))

    with _ticking() as ticks:
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield holds
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


class _Ticks:
    """Number of timer signals that the main thread has received.

    A running CPU receives every tick. If the host does not run a virtual CPU for a while, all ticks that have come due
    are delivered as one. The count is therefore an upper bound on the actual CPU time.
    """

    def __init__(self, pipe: int) -> None:
        self.count = 0
        self._pipe = pipe

    def update(self, *_: object) -> None:
        """Add the ticks that the signal handler has written to the pipe."""
        with suppress(BlockingIOError):
            self.count += len(os.read(self._pipe, 1 << 16))

    def max_seconds_since(self, count: int) -> float:
        """Return an upper bound on the CPU seconds used since the count was ``count``."""
        self.update()
        return (self.count - count + 1) * _TICK_SECONDS


@contextmanager
def _ticking() -> Iterator[_Ticks]:
    """Run a timer whose signals are written to a pipe, even while the interpreter cannot run Python code."""
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    ticks = _Ticks(read)
    handler = signal.signal(signal.SIGALRM, ticks.update)
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield ticks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGALRM, handler)
        os.close(read)
        os.close(write)


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    target = coroutine if coroutine is not None else callback
    return str(getattr(target, "__qualname__", target))


_START_SECONDS = 300.0
"""Startup timeout in seconds. The kernels may have to be compiled on a busy machine."""


@dataclass(frozen=True)
class Reading:
    """A service's counters at one point in time.

    Parameters
    ----------
    at
        Time in seconds on the monotonic clock.
    cpu
        CPU seconds since the service started.
    resident_bytes
        Current memory.
    peak_bytes
        Maximum memory since the service started.
    received
        Number of steps received since the service started, summed over all deployments.
    lost
        Number of steps lost since the service started, summed over all deployments.
    holds
        Longest block of the event loop since the previous reading.
    """

    at: float
    cpu: float
    resident_bytes: int
    peak_bytes: int
    received: int
    lost: int
    holds: Holds


class MeasuredService:
    """Handle to the service process.

    Parameters
    ----------
    pipe
        Connection to the process.
    address
        Address on which the service listens.
    """

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe = pipe
        self.address = address

    def read(self) -> Reading:
        """Return the current counters."""
        self._pipe.send("read")
        reading: Reading = self._pipe.recv()
        return reading


@contextmanager
def measured_service(folder: Path, **settings: Any) -> Iterator[MeasuredService]:
    """Run a service with compiled kernels while the context is active. ``settings`` override the defaults."""
    spawn = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = spawn.Pipe()
    store = f"{folder}/store.sqlite3"
    flags = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "store": store, **settings}
    process = spawn.Process(target=_serve, args=(child_pipe, flags), name="eplb-service")
    process.start()
    try:
        if not parent_pipe.poll(_START_SECONDS):
            raise TimeoutError(f"the service did not start within {_START_SECONDS:g} s")
        yield MeasuredService(parent_pipe, parent_pipe.recv())
        parent_pipe.send("stop")
        process.join(20)
    finally:
        process.terminate()
        process.join()


def asked_by(pipe: Connection) -> Any:
    """Return the next request from the measuring process, or ``None`` if that process has exited."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _serve(pipe: Connection, flags: dict[str, Any]) -> None:
    configure_logs("error")
    with watched() as holds:
        asyncio.run(_run(pipe, flags, holds))


async def _run(pipe: Connection, flags: dict[str, Any], holds: Holds) -> None:
    requests: asyncio.Queue[str] = asyncio.Queue()
    async with run_service(load_settings(flags, environment={})) as service:
        await service.warm
        # A service also does this once it is warm. It blocks the loop once, before any rank has joined.
        gc.collect()
        gc.freeze()
        await asyncio.sleep(0)
        holds.clear()
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: requests.put_nowait(asked_by(pipe)))
        pipe.send(service.address)
        while await requests.get() == "read":
            pipe.send(_reading(service, holds))
            holds.clear()
        asyncio.get_running_loop().remove_reader(pipe.fileno())


def _reading(service: RunningService, holds: Holds) -> Reading:
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(line for line in status if line.startswith("VmRSS:"))
    totals = [deployment.totals for deployment in service.plane.deployments.values()]
    return Reading(
        at=time.monotonic(),
        cpu=used.ru_utime + used.ru_stime,
        resident_bytes=1024 * int(resident.split()[1]),
        peak_bytes=1024 * used.ru_maxrss,
        received=sum(total.steps_received for total in totals),
        lost=sum(total.steps_lost for total in totals),
        holds=copy.copy(holds),
    )
