"""A service on a thread of this process, for as long as a context lasts."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from eplb_service.control.server.service import RunningService, running_service
from eplb_service.control.server.settings import ServiceSettings


@contextmanager
def service_thread(settings: ServiceSettings) -> Iterator[RunningService]:
    """A service with ``settings``, its solver compiled; whatever keeps it from starting is raised here."""
    started: queue.SimpleQueue[RunningService | BaseException] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running_service(settings) as service:
            await service.warm
            started.put(service)
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            started.put(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="eplb-demo-service", daemon=True)
    thread.start()
    outcome = started.get()
    if isinstance(outcome, BaseException):
        thread.join()
        raise outcome
    try:
        yield outcome
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
