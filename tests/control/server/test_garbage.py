"""Collections see what was made in the last moment alone; garbage of it goes at once, the rest later."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from eplb_service.control.server.garbage import (
    full_collection_is_due,
    keep_collections_short,
    leave_out_what_is_young,
    leave_out_what_lives,
)


class Knot:
    """What only a collection can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def as_before():
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()


def test_what_lives_is_gone_through_no_more():
    leave_out_what_lives()
    kept = Knot()
    assert any(one is kept for one in gc.get_objects())
    leave_out_what_is_young()
    assert not any(one is kept for one in gc.get_objects())


def test_young_garbage_is_freed_before_what_lives_is_set_aside():
    seen = weakref.ref(Knot())
    leave_out_what_is_young()
    assert seen() is None


def test_what_becomes_garbage_later_waits_for_a_full_collection():
    knot = Knot()
    seen = weakref.ref(knot)
    leave_out_what_is_young()
    del knot
    leave_out_what_is_young()
    assert seen() is not None
    leave_out_what_lives()
    assert seen() is None


def test_a_full_collection_is_due_where_what_was_set_aside_has_grown_by_half():
    set_aside = leave_out_what_lives()
    assert not full_collection_is_due(set_aside)
    kept = [Knot() for _ in range(set_aside)]
    leave_out_what_is_young()
    assert full_collection_is_due(set_aside)
    assert not full_collection_is_due(set_aside + 2 * len(kept))


async def test_keeping_collections_short_never_counts_what_was_set_aside(monkeypatch):
    set_aside, counted = leave_out_what_lives(), []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1))
    kept = Knot()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(keep_collections_short(set_aside), 0.3)
    assert not any(one is kept for one in gc.get_objects())
    assert not counted
