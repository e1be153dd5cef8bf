"""One layer's decision: what the back-test recommends, done on the whole window and weighed against keeping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.solver.arrays import Float64
from eplb_service.solver.back_test import FEWEST_EPISODES, Course, back_test, fading
from eplb_service.solver.candidates import (
    FRESH,
    KEEP,
    LOCAL,
    TABLES,
    Candidate,
    Deployed,
    Search,
    anew,
    heat_of,
    improved,
    par_on,
    with_tables,
)


@dataclass(frozen=True)
class Answer:
    """What the solver says about one layer.

    Parameters
    ----------
    found
        Placement and tables, with their peak-to-average ratio on the window and the slots that move.
    par_before
        The ratio of what serves now.
    taken
        ``candidates.KEEP`` and so on.
    """

    found: Candidate
    par_before: float
    taken: int


def solve_layer(
    heat_NE: Float64,
    deployed: Deployed,
    search: Search,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
) -> Answer:
    """Decide one layer.

    Parameters
    ----------
    heat_NE
        float64 ``[N, E]``, tokens per episode and expert, oldest first.
    deployed, search
        What serves now, and how to search.
    half_life_H
        float64 ``[H]``, half-lives in episodes to choose from by back-testing; the first where there is none.
    min_gain
        Peak-to-average ratio that a change must win on the window, after paying for its moves.
    unplaced
        Place anew whatever it costs: what is deployed was not made for any heat.
    """
    ranks = deployed.phy2log_RS.shape[0]
    seen = heat_of(heat_NE, np.ones(heat_NE.shape[0]), ranks)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    before = par_on(now, seen, deployed.share_GE)
    if unplaced:
        return Answer(anew(seen, deployed, search), before, FRESH)
    course = Course(FRESH, float(half_life_H[0]), search.price)
    if heat_NE.shape[0] >= FEWEST_EPISODES:
        course = back_test(heat_NE, deployed, search, half_life_H, min_gain)
    best = Answer(now._replace(par=before), before, KEEP)
    cost = before - min_gain
    heat = seen
    if course.kind != KEEP and np.isfinite(course.half_life):
        heat = heat_of(heat_NE, fading(heat_NE.shape[0], course.half_life), ranks)
    for kind in range(TABLES, course.kind + 1):
        if kind == TABLES:
            found_RS = deployed.phy2log_RS
        elif kind == LOCAL:
            found_RS = improved(heat, deployed, search, np.full(1, course.price))[0]
        else:
            found_RS = anew(heat, deployed, search).phy2log_RS
        found = with_tables(found_RS, heat, deployed, search)
        par = par_on(found, seen, deployed.share_GE)
        if par + search.price * found.moves < cost:
            best, cost = Answer(found._replace(par=par), before, kind), par + search.price * found.moves
    return best
