"""Bounds how long the C library holds whoever frees memory by giving it back to the system.

protobuf calls ``malloc_trim`` now and then as messages are freed, which is on the event loop: all pages that are free
in the memory of any thread go back to the system before the loop goes on, the planner's among them. With glibc's
defaults that was 10 to 70 ms of CPU at a thousand ranks. So pieces of a megabyte and more, such as the arrays of a
decision, are taken from the system and given back one by one, and what else is freed stays for what comes next until
then.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As in glibc's ``malloc.h``."""
_KEPT_BYTES = 16 << 20
"""Free at the end of one thread's memory before it is given back without being asked for."""
_MAPPED_BYTES = 1 << 20
"""From which on memory is taken from the system piece by piece; by default glibc raises that to 32 MB as it goes."""


def bound_trimming() -> bool:
    """Leave little that is free for ``malloc_trim`` to give back, on Linux with glibc; whether that could be done."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))
    return False
