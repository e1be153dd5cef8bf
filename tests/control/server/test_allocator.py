"""Memory that is freed stays with the process, so that whoever frees it goes on at once."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from eplb_service.control.server.allocator import keep_freed_memory

_FREES = """
import ctypes, resource, sys
from eplb_service.control.server.allocator import keep_freed_memory
if sys.argv[1] == "keeps":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def round():
    pieces = [libc.malloc(1 << 16) for _ in range(512)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 16)
    for piece in reversed(pieces):
        libc.free(piece)
round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that a second round of as much memory has to take from the system again."""
    ran = subprocess.run(
        [sys.executable, "-c", _FREES, how], check=True, capture_output=True, text=True, timeout=120
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
def test_what_was_freed_is_used_again() -> None:
    assert faults("keeps") < 1000 < 6000 < faults("gives back")


def test_a_c_library_without_such_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory()
