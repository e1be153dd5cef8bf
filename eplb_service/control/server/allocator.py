"""Keeps short what gives memory back to the system: it holds whoever frees something at that moment.

With every 10,000th piece of memory of messages that protobuf frees it has glibc give back all that is free in the
process (``malloc_trim``), and messages are freed on the event loop: at a thousand ranks every 20 seconds or so, for 10
to 70 ms of CPU while a plan is made. So the same is done every second beside the loop, and leaves little of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

_SECONDS = 1.0


def trimming() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``, which other threads need not wait for; ``None`` where there is none."""
    if sys.platform != "linux":
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


async def keep_trims_short() -> None:
    """Give back what is free every second, on a thread of its own, for as long as this runs."""
    trim = trimming()
    while trim is not None:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(trim, 0)
