"""Little that is free waits to be given back to the system at once; small pieces that are freed are used again."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from eplb_service.control.server.allocator import bound_trimming

_FREES = """
import ctypes, resource, sys
from eplb_service.control.server.allocator import bound_trimming
if sys.argv[1] == "bounds":
    assert bound_trimming()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def round(pieces, size):
    taken = [libc.malloc(size) for _ in range(pieces)]
    for piece in taken:
        ctypes.memset(piece, 1, size)
    for piece in reversed(taken):
        libc.free(piece)
def resident():
    return int(open("/proc/self/statm").read().split()[1])
round(4, 24 << 20)
before = resident()
round(4, 8 << 20)
left = resident() - before
round(128, 1 << 16)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
round(128, 1 << 16)
print(left, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def pages(how: str) -> tuple[int, int]:
    """Pages that are left free by 32 MB of large pieces, and that as many small ones as before take from the system."""
    ran = subprocess.run(
        [sys.executable, "-c", _FREES, how], check=True, capture_output=True, text=True, timeout=120
    )
    left, faults = map(int, ran.stdout.split())
    return left, faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
def test_large_pieces_leave_nothing_and_small_ones_are_used_again() -> None:
    left, faults = pages("bounds")
    assert left < 100
    assert faults < 200
    left, _ = pages("does not")
    assert left > 1000


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not bound_trimming()
