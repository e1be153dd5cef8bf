"""Collections see young objects alone, and free memory goes back to the system beside the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import platform
import threading
import weakref
from collections.abc import Iterator

import pytest

from eplb_service.control.server import memory
from eplb_service.control.server.memory import short_pauses


class Knot:
    """What only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()


def is_looked_at(knot: Knot) -> bool:
    return any(one is knot for one in gc.get_objects())


def test_frozen_objects_are_gone_through_no_more() -> None:
    memory._freeze_all()
    kept = Knot()
    assert is_looked_at(kept)
    memory._freeze_young()
    assert not is_looked_at(kept)


def test_young_garbage_goes_at_once_and_frozen_garbage_with_the_next_full_collection() -> None:
    seen = weakref.ref(Knot())
    memory._freeze_young()
    assert seen() is None
    knot = Knot()
    seen = weakref.ref(knot)
    memory._freeze_young()
    del knot
    memory._freeze_young()
    assert seen() is not None
    memory._freeze_all()
    assert seen() is None


def test_a_full_collection_is_due_where_frozen_objects_have_grown_by_half() -> None:
    frozen = memory._freeze_all()
    assert not memory._full_collection_is_due(frozen)
    kept = [Knot() for _ in range(frozen)]
    memory._freeze_young()
    assert memory._full_collection_is_due(frozen)
    assert not memory._full_collection_is_due(frozen + 2 * len(kept))


async def test_within_short_pauses_objects_are_frozen_uncounted_and_memory_trimmed_on_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    threads: list[int] = []
    monkeypatch.setattr(memory, "_malloc_trim", lambda: lambda _: threads.append(threading.get_ident()))
    monkeypatch.setattr(memory, "_TRIM_SECONDS", 0.0)
    async with short_pauses() as frozen:
        assert frozen > 1000
        monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1))
        kept = Knot()
        while len(threads) < 3 or is_looked_at(kept):
            await asyncio.sleep(0.01)
    assert threading.get_ident() not in threads
    assert not counted
    done = len(threads)
    later = Knot()
    await asyncio.sleep(0.3)
    assert (len(threads), is_looked_at(later)) == (done, True)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory by rules of their own"
)
def test_glibc_gives_free_memory_back() -> None:
    trim = memory._malloc_trim()
    assert trim is not None
    assert trim(0) in (0, 1)


async def test_a_c_library_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    await asyncio.wait_for(memory._keep_trimming(), 60)
