"""Keeps garbage collections and the allocator from holding the event loop, once a service is ready.

Ranks that stay for weeks and the compiler of the kernels are some 100,000 objects each; a full collection that goes
through them takes 0.1 s, and a plan for many ranks makes enough objects to start one. So ten times a second young
objects are collected and the survivors frozen: whatever collections Python starts see few objects. Cycles of frozen
objects wait for a full collection, which is made where their number has grown by half, looked at once a day.

With every 10,000th piece of memory of messages that protobuf frees it has glibc give back all that is free in the
process (``malloc_trim``), and messages are freed on the event loop: at a thousand ranks every 20 seconds or so, for 10
to 70 ms of CPU while a plan is made. So the same is done every second beside the loop, and leaves little of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import sys
from collections.abc import AsyncIterator, Callable

_FREEZE_SECONDS = 0.1
_TRIM_SECONDS = 1.0
_ROUNDS_PER_LOOK = 864_000
_MOST_GROWTH = 1.5
_MIDDLE_GENERATION = 1


@contextlib.asynccontextmanager
async def short_pauses() -> AsyncIterator[int]:
    """Freeze and trim until the context ends; yields the number of objects frozen at first."""
    frozen = _freeze_all()
    kept = [asyncio.create_task(_keep_freezing(frozen)), asyncio.create_task(_keep_trimming())]
    try:
        yield frozen
    finally:
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)


def _freeze_all() -> int:
    """Collect all garbage and freeze the survivors; returns their number."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def _freeze_young() -> None:
    """Collect the objects made since the last freeze and freeze the survivors."""
    gc.collect(_MIDDLE_GENERATION)
    gc.freeze()


def _full_collection_is_due(frozen: int) -> bool:
    return gc.get_freeze_count() > _MOST_GROWTH * frozen


async def _keep_freezing(frozen: int) -> None:
    """Freeze young objects for ever; counting frozen ones goes through all of them, so that is done seldom."""
    while True:
        for _ in range(_ROUNDS_PER_LOOK):
            await asyncio.sleep(_FREEZE_SECONDS)
            _freeze_young()
        if _full_collection_is_due(frozen):
            frozen = _freeze_all()


async def _keep_trimming() -> None:
    trim = _malloc_trim()
    while trim is not None:
        await asyncio.sleep(_TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, which other threads need not wait for; ``None`` where there is none."""
    if sys.platform != "linux":
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
