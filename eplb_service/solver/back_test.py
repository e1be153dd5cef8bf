"""What would have paid: fit on the older half of the window, judge on the newer half.

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So the window itself says, per layer, whether to keep, retune or move, how much a move must win, and
how fast old episodes should fade.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Float64
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

FEWEST_EPISODES = 4
"""Below it there is no older half worth fitting."""

PRICE_LADDER = np.array([16.0, 4.0, 1.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first."""


class Course(NamedTuple):
    """What the back-test recommends."""

    kind: int
    """``candidates.KEEP`` and so on."""
    half_life: float
    """Episodes after which heat counts half; infinite for no fading."""
    price: float
    """Peak-to-average ratio per moved slot that the local search should ask, at least the true price."""


def fading(episodes: int, half_life: float) -> Float64:
    """Weights that halve every ``half_life`` episodes back from the newest, float64 ``[N]``; infinite: all 1."""
    weight_N: Float64 = 0.5 ** (np.arange(episodes - 1, -1, -1) / half_life)
    return weight_N


def back_test(
    heat_NE: Float64, deployed: Deployed, search: Search, half_life_H: Float64, min_gain: float
) -> Course:
    """What would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    Where gains do not last, a local search that asks more than the true price for a move stops at those that do; so
    several prices are tried and all judged at the true one.
    """
    ranks = deployed.phy2log_RS.shape[0]
    half = heat_NE.shape[0] // 2
    newer = heat_of(heat_NE[half:], np.ones(heat_NE.shape[0] - half), ranks)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    best = par_on(now, newer, deployed.share_GE)
    course = Course(KEEP, float(half_life_H[0]), search.price)
    price_K = search.price * PRICE_LADDER
    for half_life in half_life_H.tolist():
        older = heat_of(heat_NE[:half], fading(half, half_life), ranks)
        courses = [(Course(TABLES, half_life, search.price), deployed.phy2log_RS)]
        if search.steps > 0:
            found_KRS = improved(older, deployed, search, price_K)
            courses += [
                (Course(LOCAL, half_life, price), found_RS)
                for price, found_RS in zip(price_K.tolist(), found_KRS, strict=True)
            ]
        courses.append((Course(FRESH, half_life, search.price), anew(older, deployed, search).phy2log_RS))
        for tried, found_RS in courses:
            found = with_tables(found_RS, older, deployed, search)
            cost = par_on(found, newer, deployed.share_GE) + search.price * found.moves
            if cost < best - min_gain:
                best, course = cost, tried
    return course
