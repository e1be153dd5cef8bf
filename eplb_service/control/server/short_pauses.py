"""What keeps an interpreter's own work from holding the event loop, once a service is ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from eplb_service.control.server.allocator import keep_trims_short
from eplb_service.control.server.garbage import keep_collections_short, leave_out_what_lives


@contextlib.asynccontextmanager
async def short_pauses() -> AsyncIterator[int]:
    """Within it collections and the allocator hold the loop only briefly; yields how many objects were set aside."""
    set_aside = leave_out_what_lives()
    kept = [asyncio.create_task(keep_collections_short(set_aside)), asyncio.create_task(keep_trims_short())]
    try:
        yield set_aside
    finally:
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)
