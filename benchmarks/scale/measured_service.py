"""A service in a process of its own that says what it has cost so far."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.scale.asking import asked_by
from benchmarks.scale.holds import Holds, watched
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.control.server.settings_sources import load_settings
from eplb_service.control.server.short_pauses import short_pauses
from eplb_service.telemetry.logs import configure_logs

_START_SECONDS = 300.0
"""Kernels may have to be compiled, on a busy machine."""


@dataclass(frozen=True)
class Reading:
    """What a service has done and cost.

    Parameters
    ----------
    at
        Seconds, by a clock that never jumps.
    cpu, loop_cpu
        Seconds of CPU since its start: the process's, and its event loop's thread's.
    resident_bytes
        Memory at present.
    received, lost
        Steps since its start, over all deployments.
    hold, hold_wall, long_holds, still, named
        As in ``Holds``, since the reading before.
    """

    at: float
    cpu: float
    loop_cpu: float
    resident_bytes: int
    received: int
    lost: int
    hold: float
    hold_wall: float
    long_holds: int
    still: float
    named: dict[str, float]


class MeasuredService:
    """The service's process, seen from outside; ``address`` is where it listens."""

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe = pipe
        self.address = address

    def read(self) -> Reading:
        """What it has cost by now."""
        self._pipe.send("read")
        reading: Reading = self._pipe.recv()
        return reading


@contextmanager
def measured_service(folder: Path, **settings: Any) -> Iterator[MeasuredService]:
    """A service with these settings beside the defaults, for as long as the context lasts; its kernels are warm."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    flags = {
        "listen": "127.0.0.1:0",
        "metrics": "127.0.0.1:0",
        "store": f"{folder}/store.sqlite3",
        **settings,
    }
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


def _serve(pipe: Connection, flags: dict[str, Any]) -> None:
    configure_logs("json", "error")
    with watched() as holds:
        asyncio.run(_run(pipe, flags, holds))


async def _run(pipe: Connection, flags: dict[str, Any], holds: Holds) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()
    async with running_service(load_settings(flags, environment={})) as service:
        await service.warm
        async with short_pauses():
            # Beginning it holds the loop once, before there is a rank.
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
    totals = [deployment.totals for deployment in service.plane.deployments.values()]
    return Reading(
        at=time.monotonic(),
        cpu=used.ru_utime + used.ru_stime,
        loop_cpu=time.thread_time(),
        resident_bytes=_resident_bytes(),
        received=sum(total.steps_received for total in totals),
        lost=sum(total.steps_lost for total in totals),
        hold=holds.cpu,
        hold_wall=holds.wall,
        long_holds=holds.long,
        still=holds.still,
        named=dict(holds.named),
    )


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return 1024 * int(line.split()[1])
