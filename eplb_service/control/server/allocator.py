"""Keeps short what gives memory back to the system: it holds whoever frees something at that moment.

What is large gets pages of its own, which go back by themselves when it is freed. Left alone, glibc takes what is as
large as anything freed so far, up to 32 MB, out of the heaps that all share: a decision leaves holes of that size.

With every 10,000th piece of memory of messages that protobuf frees it has glibc give back all that is free in the
process (``malloc_trim``), and messages are freed on the event loop: at a thousand ranks every 20 seconds or so, for 10
to 70 ms of CPU while a plan is made. So the same is done every second beside the loop, and leaves little of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

_SECONDS = 1.0
_LARGE_BYTES = 256 << 10
_M_MMAP_THRESHOLD = -3
"""Of ``malloc.h``."""
_BY_HAND = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_large_pieces_apart() -> bool:
    """Have glibc give pages of their own to pieces of 256 KiB and more; whether it does.

    Nothing changes where there is another C library, or where the environment sets glibc's allocator.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _BY_HAND):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except (OSError, AttributeError):
        return False


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
