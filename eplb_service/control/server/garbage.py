"""Keeps garbage collections short: a full one goes through all that lives, and holds the event loop meanwhile.

Ranks that stay for weeks and the compiler of the kernels are some 100,000 objects each; a full collection that goes
through them takes 0.1 s, and a plan for many ranks makes enough objects to start one. What lives is therefore set aside
every second, once what is young has been collected: whatever collections Python starts see a second's objects at most.
Cycles that are made of what was set aside wait for the full collection once a day.
"""

from __future__ import annotations

import asyncio
import gc

_SECONDS = 1.0
_ROUNDS_PER_FULL = 86_400
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


async def keep_collections_short() -> None:
    """Set aside what lives for as long as this runs."""
    while True:
        for _ in range(_ROUNDS_PER_FULL):
            await asyncio.sleep(_SECONDS)
            leave_out_what_is_young()
        leave_out_what_lives()
