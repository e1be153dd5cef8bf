"""Has the C library keep memory that is freed: giving it back to the system holds whoever frees it.

Messages are received into memory of gRPC's thread, and freed on the event loop. With glibc's defaults that ends, each
time that a hundred kilobytes are free at the end of that thread's memory, in an ``madvise`` of all of it: 10 to 50 ms
at a thousand ranks, while the next message takes the same memory from the system again.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in glibc's ``malloc.h``."""
_KEPT_BYTES = 256 << 20
"""Free at the end of one thread's memory before it is given back."""
_MAPPED_BYTES = 32 << 20
"""From which on memory is taken from the system piece by piece, and given back at once: the most that glibc allows."""


def keep_freed_memory() -> bool:
    """Keep what is freed for what comes next, on Linux with glibc; whether that could be done."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))
    return False
