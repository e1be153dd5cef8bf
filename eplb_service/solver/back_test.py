"""What would have paid: fit on the older half of the window, judge on the newer half.

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So the window itself says, per layer, whether to keep, retune or move, and how fast old episodes should
fade.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float64
from eplb_service.solver.candidates import (
    KEEP,
    LOCAL,
    TABLES,
    Candidate,
    Deployed,
    Search,
    heat_of,
    improved,
    par_on,
    retuned,
)
from eplb_service.solver.jit import kernel

FEWEST_EPISODES = 4
"""Below it there is no older half worth fitting."""


@kernel
def fading(episodes: int, half_life: float) -> Float64:
    """Weights that halve every ``half_life`` episodes back from the newest, float64 ``[N]``; infinite: all 1."""
    weight_N = np.ones(episodes)
    if half_life < np.inf:
        for n in range(episodes):
            weight_N[n] = 0.5 ** ((episodes - 1 - n) / half_life)
    return weight_N


@kernel
def back_test(
    heat_NE: Float64, deployed: Deployed, search: Search, half_life_H: Float64, min_gain: float
) -> tuple[int, float, float]:
    """Kind of candidate and half-life that would have done best on the newer half, and what it would have won.

    A later half-life in ``half_life_H``, or a dearer kind, must beat the one before by ``min_gain`` after paying for
    its moves.
    """
    ranks = deployed.phy2log_RS.shape[0]
    half = heat_NE.shape[0] // 2
    newer = heat_of(heat_NE[half:], np.ones(heat_NE.shape[0] - half), ranks)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    kept = par_on(now, newer, deployed.share_GE)
    best, kind, chosen = kept, KEEP, half_life_H[0]
    for half_life in half_life_H:
        older = heat_of(heat_NE[:half], fading(half, half_life), ranks)
        tuned = retuned(older, deployed, search)
        cost = par_on(tuned, newer, deployed.share_GE)
        if cost < best - min_gain:
            best, kind, chosen = cost, TABLES, half_life
        moved = improved(older, deployed, tuned, search)
        cost = par_on(moved, newer, deployed.share_GE) + search.price * moved.moves
        if cost < best - min_gain:
            best, kind, chosen = cost, LOCAL, half_life
    return kind, chosen, kept - best
