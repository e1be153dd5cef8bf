"""What would have paid: fit on the older half of the window, judge on the newer half.

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So the window itself says, per layer, whether to keep, retune or move, and how much a move must win.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.anew import anew
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
from eplb_service.solver.problem import Deployed, Search
from eplb_service.solver.recency import Forecast, Halves, leaning

PRICE_LADDER = np.array([32.0, 16.0, 8.0, 4.0, 2.0, 1.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first."""


class Course(NamedTuple):
    """What the back-test recommends."""

    kind: int
    """``candidates.KEEP`` and so on."""
    price: float
    """Peak-to-average ratio per moved slot that the local search should ask, at least the true price."""


def back_test(
    halves: Halves,
    forecast: Forecast,
    deployed: Deployed,
    search: Search,
    min_gain: float,
    fresh_may_pay: bool,
) -> Course:
    """What would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    ``fresh_may_pay``: whether placing anew is worth trying at all.

    Where gains do not last, a local search that asks more than the true price for a move stops at those that do; so
    several prices are tried and all judged at the true one.
    """
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    best = par_on(now, halves.newer, deployed, search.tables)
    course = Course(KEEP, search.price)
    older = leaning(halves.older, forecast, 1.0)
    placed = [(TABLES, search.price, deployed.phy2log_RS)]
    if search.steps > 0:
        price_K = search.price * PRICE_LADDER
        found_KRS = improved(older, deployed, search, price_K)
        placed += [
            (LOCAL, price, found_RS) for price, found_RS in zip(price_K.tolist(), found_KRS, strict=True)
        ]
    if fresh_may_pay:
        placed.append((FRESH, search.price, anew(older, deployed, search).phy2log_RS))
    for kind, price, found_RS in placed:
        found = with_tables(found_RS, older, deployed, search.z, search.tables)
        cost = par_on(found, halves.newer, deployed, search.tables) + search.price * found.moves
        if cost < best - min_gain:
            best, course = cost, Course(kind, price)
    return course
