"""What is done with the rest of a budget: layers placed anew are annealed on, worst first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

from eplb_service.solver.anew import polished
from eplb_service.solver.arrays import Float64
from eplb_service.solver.candidates import FRESH
from eplb_service.solver.layer import Answer
from eplb_service.solver.near_candidates import brought_near, crossing_of
from eplb_service.solver.problem import Deployed, Search, heat_of

_TRIES = 32_000
"""Of annealing one layer before the clock is read again: a few milliseconds."""
_FRUITLESS = 8
"""Turns over all layers that win nothing after which polishing ends."""

_APART = 1_000_003
"""Between the seeds of two turns; more than a model has layers."""


def polish(
    answers: dict[int, Answer],
    heat_of_layer: Callable[[int], Float64],
    deployed: Callable[[int], Deployed],
    search: Search,
    deadline: float,
    run: Callable[..., Iterable[Answer | None]],
) -> dict[int, Answer]:
    """Better answers for the layers that were placed anew; the others are not touched.

    ``answers`` by layer; ``heat_of_layer`` and ``deployed`` say what a layer was solved for; ``deadline`` on
    ``time.monotonic``; ``run`` is ``map`` or a thread pool's. What is found depends on the machine, but never becomes
    worse with time.
    """
    best = {layer: answer for layer, answer in answers.items() if answer.taken == FRESH}
    fruitless = 0

    def go_on(layer: int, seed: int) -> Answer | None:
        if time.monotonic() >= deadline:
            return None
        try:
            return annealed_on(best[layer], heat_of_layer(layer), deployed(layer), search, seed)
        except Exception:  # what a layer has is good already; another try must cost nobody anything
            return None

    for turn in count(1):
        if not best or fruitless == _FRUITLESS or time.monotonic() >= deadline:
            return best
        worst_first = sorted(best, key=lambda layer: -best[layer].found.par)
        seeds = [search.seed + turn * _APART + layer for layer in worst_first]
        better = zip(worst_first, run(go_on, worst_first, seeds), strict=True)
        gained = {layer: answer for layer, answer in better if answer is not None}
        best |= gained
        fruitless = 0 if gained else fruitless + 1
    raise AssertionError("turns have no end")


def annealed_on(
    answer: Answer, heat_NE: Float64, deployed: Deployed, search: Search, seed: int
) -> Answer | None:
    """A better answer for a layer after annealing on; ``None`` where they win nothing."""
    heat = heat_of(heat_NE, deployed.phy2log_RS.shape[0])
    found = polished(answer.found, heat, deployed, search, _TRIES, seed)
    if found.par >= answer.found.par:
        return None
    found = brought_near(found, heat, deployed, search.tables)
    crosses = crossing_of(found, heat, deployed, search.tables)
    return replace(answer, found=found, hindsight=min(answer.hindsight, found.par), crosses=crosses)
