"""Keeps garbage collections short: a full one goes through all that lives, and holds the event loop meanwhile.

Ranks that stay for weeks and the compiler of the kernels are some 100,000 objects each; a full collection that goes
through them takes 0.1 s, and a plan for many ranks makes enough objects to start one. What lives is therefore set aside
ten times a second, once what is young has been collected: whatever collections Python starts see few objects.
Cycles that are made of what was set aside wait for a full collection. Whether one is due is looked at once a day: it is
where what was set aside has grown by half, which a service whose ranks stay never sees.
"""

from __future__ import annotations

import asyncio
import gc

_SECONDS = 0.1
_ROUNDS_PER_LOOK = 864_000
_MOST_GROWTH = 1.5
_MIDDLE_GENERATION = 1


def leave_out_what_lives() -> int:
    """Collect all there is, and set aside what lives; returns how many objects that is."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def leave_out_what_is_young() -> None:
    """Collect what was made since the last time, and set aside what of it lives."""
    gc.collect(_MIDDLE_GENERATION)
    gc.freeze()


def full_collection_is_due(set_aside: int) -> bool:
    """Whether so much more has been set aside than the ``set_aside`` objects of the last full collection."""
    return gc.get_freeze_count() > _MOST_GROWTH * set_aside


async def keep_collections_short(set_aside: int) -> None:
    """Set aside what lives for as long as this runs.

    Parameters
    ----------
    set_aside
        Objects, from ``leave_out_what_lives``: counting them goes through all of them.
    """
    while True:
        for _ in range(_ROUNDS_PER_LOOK):
            await asyncio.sleep(_SECONDS)
            leave_out_what_is_young()
        if full_collection_is_due(set_aside):
            set_aside = leave_out_what_lives()
