"""Keeps the store off the event loop: one thread, writes in the order in which they were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from eplb_service.control.server.store.store import Store

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class StoreWriter:
    """Runs a store's methods on a thread of its own. Balancing goes on where the disk does not.

    ``failures`` counts writes that failed; ``failing`` says why the last one did, and is empty where it did not.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failures = 0
        self.failing = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-store")

    def post(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write some time soon; a failure is logged."""
        self._thread.submit(write, *arguments).add_done_callback(self._note)

    async def write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write, and wait until it is done; a failure is logged."""
        written = self._thread.submit(write, *arguments)
        written.add_done_callback(self._note)
        await asyncio.gather(asyncio.wrap_future(written), return_exceptions=True)

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Read or write, and wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        """Finish what was asked for, then close the store."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _note(self, written: Future[None]) -> None:
        error = written.exception()
        if error is not None:
            self.failures += 1
            if not self.failing:
                _log.error("store_write_failed", error=str(error))
        self.failing = str(error) if error is not None else ""
