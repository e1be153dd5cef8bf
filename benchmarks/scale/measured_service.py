"""A service in a process of its own that says what it has cost, and for how long callbacks held its event loop."""

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

from eplb_service.control.server.service import RunningService, running_service
from eplb_service.control.server.settings import load_settings
from eplb_service.telemetry.logs import configure_logs

LONG_SECONDS = 0.1
"""Nothing should hold the loop for longer."""
_TICK_SECONDS = 0.008


@dataclass
class Holds:
    """Longest callback since the last ``clear``.

    Parameters
    ----------
    cpu
        Seconds of this thread's CPU.
    still
        Longest that the processor did not run within one of them, though the system counts it as the thread's CPU: on
        virtual machines only. It does not count in ``cpu``.
    name
        Name of what was called.
    """

    cpu: float = 0.0
    still: float = 0.0
    name: str = ""

    @classmethod
    def merged(cls, parts: Iterable[Holds]) -> Holds:
        """Return the longest of all parts of a run."""
        parts = list(parts)
        longest = max(parts, key=lambda part: part.cpu)
        return cls(longest.cpu, max(part.still for part in parts), longest.name)

    def clear(self) -> None:
        """Begin again."""
        self.cpu, self.still, self.name = 0.0, 0.0, ""

    def took(self, what: asyncio.Handle, cpu: float, still: float) -> None:
        """Count a callback."""
        self.still = max(self.still, still)
        if cpu - still > self.cpu:
            self.cpu, self.name = cpu - still, _name(what)


@contextmanager
def watched() -> Iterator[Holds]:
    """Within it every callback of this process's event loops is timed."""
    holds, run = Holds(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began, ticked = time.thread_time(), ticks.taken
        run(handle)
        cpu = time.thread_time() - began
        still = cpu - ticks.most_since(ticked) if cpu > LONG_SECONDS else 0.0
        holds.took(handle, cpu, max(still, 0.0))

    with _ticking() as ticks:
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield holds
        finally:
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


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    named = coroutine if coroutine is not None else callback
    return str(getattr(named, "__qualname__", named))


_START_SECONDS = 300.0
"""Kernels may have to be compiled, on a busy machine."""


@dataclass(frozen=True)
class Reading:
    """A service's work and cost.

    Parameters
    ----------
    at
        Seconds, by a clock that never jumps.
    cpu
        Seconds of CPU since its start.
    resident_bytes, peak_bytes
        Memory at present, and the most since its start.
    received, lost
        Steps since its start, over all deployments.
    holds
        Since the reading before.
    """

    at: float
    cpu: float
    resident_bytes: int
    peak_bytes: int
    received: int
    lost: int
    holds: Holds


class MeasuredService:
    """The service's process, seen from outside; ``address`` is where it listens."""

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe = pipe
        self.address = address

    def read(self) -> Reading:
        """Return what it has cost by now."""
        self._pipe.send("read")
        reading: Reading = self._pipe.recv()
        return reading


@contextmanager
def measured_service(folder: Path, **settings: Any) -> Iterator[MeasuredService]:
    """A service with these settings beside the defaults, for as long as the context lasts; its kernels are warm."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    store = f"{folder}/store.sqlite3"
    flags = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "store": store, **settings}
    process = spawn.Process(target=_serve, args=(theirs, flags), name="eplb-service")
    process.start()
    try:
        if not ours.poll(_START_SECONDS):
            raise TimeoutError(f"the service did not start within {_START_SECONDS:g} s")
        yield MeasuredService(ours, ours.recv())
        ours.send("stop")
        process.join(20)
    finally:
        process.terminate()
        process.join()


def asked_by(pipe: Connection) -> Any:
    """Return what the measuring process asks for; ``None`` where it is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _serve(pipe: Connection, flags: dict[str, Any]) -> None:
    configure_logs("error")
    with watched() as holds:
        asyncio.run(_run(pipe, flags, holds))


async def _run(pipe: Connection, flags: dict[str, Any], holds: Holds) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()
    async with running_service(load_settings(flags, environment={})) as service:
        await service.warm
        # As a service does it once it is warm: this holds the loop once, before there is a rank.
        gc.collect()
        gc.freeze()
        await asyncio.sleep(0)
        holds.clear()
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: asked.put_nowait(asked_by(pipe)))
        pipe.send(service.address)
        while await asked.get() == "read":
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
