"""What is free goes back to the system beside the event loop, so that protobuf finds little of it on the loop."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import platform
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from eplb_service.control.server import allocator
from eplb_service.control.server.allocator import keep_large_pieces_apart, keep_trims_short, trimming

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


class Mallinfo2(ctypes.Structure):
    """glibc's; the fourth count is of the pieces that have pages of their own."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def large_piece_has_pages_of_its_own(apart: bool, pipe: Connection) -> None:
    """In a process of its own: whether it does once larger ones have been freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.malloc.argtypes, libc.mallinfo2.restype = [ctypes.c_size_t], Mallinfo2
    if apart and not keep_large_pieces_apart():
        raise OSError("glibc does not take the setting")
    for _ in range(3):
        libc.free(libc.malloc(8 << 20))
    before = libc.mallinfo2().counts[3]
    libc.malloc(1 << 20)
    pipe.send(libc.mallinfo2().counts[3] - before)


@pytest.mark.skipif(
    not (IS_GLIBC and hasattr(ctypes.CDLL(None), "mallinfo2")),
    reason="only glibc 2.33 and later count such pieces",
)
@pytest.mark.parametrize("apart", [False, True])
def test_large_pieces_keep_to_pages_of_their_own(apart: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=large_piece_has_pages_of_its_own, args=(apart, theirs))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert ours.recv() == int(apart)


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_sets_the_allocator_by_hand_is_not_overruled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=1")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the allocator was set"))
    assert not keep_large_pieces_apart()


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
