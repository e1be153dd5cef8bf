"""What would have paid: fit on the older half of the window, judge on the newer half.

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So the window itself says, per layer, whether to keep, retune or move, and how fast old episodes should
fade.
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
    retuned,
)
from eplb_service.solver.jit import kernel

FEWEST_EPISODES = 4
"""Below it there is no older half worth fitting."""

PRICE_LADDER = np.array([16.0, 4.0, 1.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first."""


@kernel
def fading(episodes: int, half_life: float) -> Float64:
    """Weights that halve every ``half_life`` episodes back from the newest, float64 ``[N]``; infinite: all 1."""
    weight_N = np.ones(episodes)
    if half_life < np.inf:
        for n in range(episodes):
            weight_N[n] = 0.5 ** ((episodes - 1 - n) / half_life)
    return weight_N


class Course(NamedTuple):
    """What the back-test recommends."""

    kind: int
    """``candidates.KEEP`` and so on."""
    half_life: float
    """Episodes after which heat counts half; infinite for no fading."""
    price: float
    """Peak-to-average ratio per moved slot that the local search should ask, at least the true price."""


@kernel
def back_test(
    heat_NE: Float64, deployed: Deployed, search: Search, half_life_H: Float64, min_gain: float
) -> Course:
    """What would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    Where gains do not last, a local search that asks more than the true price for a move stops at those that do;
    so several prices are tried and all judged at the true one.
    """
    ranks = deployed.phy2log_RS.shape[0]
    half = heat_NE.shape[0] // 2
    newer = heat_of(heat_NE[half:], np.ones(heat_NE.shape[0] - half), ranks)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    best = par_on(now, newer, deployed.share_GE)
    course = Course(KEEP, half_life_H[0], search.price)
    price_K = search.price * PRICE_LADDER
    for half_life in half_life_H:
        older = heat_of(heat_NE[:half], fading(half, half_life), ranks)
        tuned = retuned(older, deployed, search)
        cost = par_on(tuned, newer, deployed.share_GE)
        if cost < best - min_gain:
            best, course = cost, Course(TABLES, half_life, search.price)
        if search.steps > 0:
            found = improved(older, deployed, tuned, search, price_K)
            for k in range(price_K.shape[0]):
                cost = par_on(found[k], newer, deployed.share_GE) + search.price * found[k].moves
                if cost < best - min_gain:
                    best, course = cost, Course(LOCAL, half_life, price_K[k])
        fresh = anew(older, deployed, search)
        cost = par_on(fresh, newer, deployed.share_GE) + search.price * fresh.moves
        if cost < best - min_gain:
            best, course = cost, Course(FRESH, half_life, search.price)
    return course
