"""One layer's decision: what the back-test recommends, done on the whole window and weighed against keeping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.solver.anew import anew
from eplb_service.solver.arrays import Float64, Int32
from eplb_service.solver.back_test import PRICE_LADDER, Course, back_test
from eplb_service.solver.candidates import (
    FRESH,
    KEEP,
    LOCAL,
    TABLES,
    Candidate,
    improved,
    par_on,
    with_tables,
)
from eplb_service.solver.near_candidates import brought_near, crossing_of
from eplb_service.solver.problem import Deployed, Heat, Search, heat_of
from eplb_service.solver.recency import FEWEST_EPISODES, Forecast, choose_forecast, halves_of, leaning


@dataclass(frozen=True)
class Answer:
    """What the solver says about one layer.

    Parameters
    ----------
    found
        Placement and tables, with their peak-to-average ratio on the window and the slots that move.
    par_before
        The ratio of what serves now.
    hindsight
        The ratio on this very window of a placement made for it, whatever that moves.
    half_life
        Episodes after which heat was taken to count half; infinite where old heat is as good as new.
    taken
        ``candidates.KEEP`` and so on.
    crossed, crosses
        Part of the tokens that leave their source's node, before and after; see ``near_candidates.crossing_of``.
    """

    found: Candidate
    par_before: float
    hindsight: float
    half_life: float
    taken: int
    crossed: float = 0.0
    crosses: float = 0.0


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
    seen = heat_of(heat_NE, deployed.phy2log_RS.shape[0])
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    now = now._replace(par=par_on(now, seen, deployed, search.tables))
    fresh = anew(seen, deployed, search)
    forecast = Forecast(float(half_life_H[0]), 0.0)

    def answer(found: Candidate, taken: int) -> Answer:
        crossed = crossing_of(now, seen, deployed, search.tables)
        if taken != KEEP:
            found = brought_near(found, seen, deployed, search.tables)
        crosses = crossing_of(found, seen, deployed, search.tables)
        return Answer(found, now.par, fresh.par, forecast.half_life, taken, crossed, crosses)

    if unplaced:
        return answer(fresh, FRESH)
    if now.par - fresh.par <= min_gain:
        # Not even hindsight would have won enough.
        return answer(now, KEEP)
    # A step takes as long as the hottest rank, so a move's price is a part of the ratio now.
    search = search._replace(price=search.price * now.par)
    course = Course(FRESH, search.price)
    if heat_NE.shape[0] >= FEWEST_EPISODES:
        halves = halves_of(heat_NE, deployed.phy2log_RS.shape[0])
        forecast = choose_forecast(halves, half_life_H)
        fresh_may_pay = now.par - fresh.par > search.price * fresh.moves / 2
        course = back_test(halves, forecast, deployed, search, min_gain, fresh_may_pay)
    found, taken = _best(course, leaning(seen, forecast, 2.0), now, deployed, search, min_gain)
    return answer(found._replace(par=par_on(found, seen, deployed, search.tables)), taken)


def _improved(course: Course, heat: Heat, deployed: Deployed, search: Search) -> Int32:
    """The local search at the price recommended; where so dear a move wins nothing here, at the next lower ones."""
    price_K = search.price * PRICE_LADDER
    found_KRS = improved(heat, deployed, search, price_K[price_K <= course.price * (1 + 1e-9)])
    found_RS: Int32
    for found_RS in found_KRS:
        if not np.array_equal(found_RS, deployed.phy2log_RS):
            return found_RS
    return deployed.phy2log_RS


def _best(
    course: Course, heat: Heat, now: Candidate, deployed: Deployed, search: Search, min_gain: float
) -> tuple[Candidate, int]:
    """The recommended course or a cheaper one, where it still wins on the whole window; and which one it is."""
    best, taken = now, KEEP
    cost = par_on(now, heat, deployed, search.tables) - min_gain
    for kind in range(TABLES, course.kind + 1):
        if kind == FRESH:
            found = anew(heat, deployed, search)
        else:
            found_RS = deployed.phy2log_RS
            if kind == LOCAL:
                found_RS = _improved(course, heat, deployed, search)
            found = with_tables(found_RS, heat, deployed, search.z, search.tables)
        if found.par + search.price * found.moves < cost:
            best, taken, cost = found, kind, found.par + search.price * found.moves
    return best, taken
