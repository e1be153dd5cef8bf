"""What is free goes back to the system beside the event loop, so that protobuf finds little of it on the loop."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import threading
from pathlib import Path

import pytest

from eplb_service.control.server import allocator
from eplb_service.control.server.allocator import keep_trims_short, trimming

PIECES, SIZE = 512, 1 << 16
IS_GLIBC = platform.libc_ver()[0] == "glibc"


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not IS_GLIBC, reason="other C libraries keep memory by rules of their own")
def test_what_is_free_between_pieces_in_use_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    taken = [libc.malloc(SIZE) for _ in range(PIECES)]
    for piece in taken:
        ctypes.memset(piece, 1, SIZE)
    for piece in taken[::2]:
        libc.free(piece)
    before = resident_pages()
    trim = trimming()
    assert trim is not None
    trim(0)
    # Half of the pieces, 15 of 16 pages of each.
    assert before - resident_pages() > PIECES // 2 * 12
    for piece in taken[1::2]:
        libc.free(piece)


async def test_it_is_done_again_and_again_and_never_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def trim(_: int) -> int:
        threads.append(threading.get_ident())
        return 1

    monkeypatch.setattr(allocator, "trimming", lambda: trim)
    monkeypatch.setattr(allocator, "_SECONDS", 0.0)
    task = asyncio.create_task(keep_trims_short())
    while len(threads) < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threading.get_ident() not in threads


async def test_a_c_library_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert trimming() is None
    await asyncio.wait_for(keep_trims_short(), 60)
