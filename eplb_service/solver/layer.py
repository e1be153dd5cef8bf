"""One layer's decision, and all layers of a decision side by side."""

from __future__ import annotations

import numpy as np
from numba import prange

from eplb_service.solver.arrays import Float32, Float64, Int32, Int64
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
    homes,
    improved,
    par_on,
    retuned,
)
from eplb_service.solver.jit import kernel, parallel_kernel


@kernel
def solve_layer(
    heat_NE: Float64, deployed: Deployed, search: Search, half_life_H: Float64, min_gain: float
) -> tuple[Candidate, float, int]:
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

    Returns the answer with its ratio on the window, the ratio of what serves now, and what was taken.
    """
    ranks = deployed.phy2log_RS.shape[0]
    seen = heat_of(heat_NE, np.ones(heat_NE.shape[0]), ranks)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    before = par_on(now, seen, deployed.share_GE)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, before, 0)
    if not search.warm:
        return anew(seen, deployed, search), before, FRESH
    course = Course(FRESH, half_life_H[0], search.price)
    if heat_NE.shape[0] >= FEWEST_EPISODES:
        course = back_test(heat_NE, deployed, search, half_life_H, min_gain)
    if course.kind == KEEP:
        return now, before, KEEP
    heat = seen
    if course.half_life < np.inf:
        heat = heat_of(heat_NE, fading(heat_NE.shape[0], course.half_life), ranks)
    best, taken = now, KEEP
    cost = before - min_gain
    for kind in range(TABLES, course.kind + 1):
        if kind == TABLES:
            tuned = retuned(heat, deployed, search)
            found = tuned
        elif kind == LOCAL:
            if search.steps == 0:
                continue
            found = improved(heat, deployed, tuned, search, np.full(1, course.price))[0]
        else:
            found = anew(heat, deployed, search)
        par = par_on(found, seen, deployed.share_GE)
        if par + search.price * found.moves < cost:
            best, taken = Candidate(found.phy2log_RS, found.log2phy_GE, par, found.moves), kind
            cost = par + search.price * found.moves
    return best, before, taken


def _solve_layers(
    heat_LNE: Float64,
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: Float32,
    search: Search,
    half_life_H: Float64,
    min_gain: float,
) -> tuple[Int32, Int32, Float64, Int64]:
    """``solve_layer`` for each layer.

    Returns int32 ``[L, R, S]``, int32 ``[L, G, E]``, float64 ``[L, 2]`` (ratio before, after), int64 ``[L, 2]``
    (moves, what was taken).
    """
    layers = heat_LNE.shape[0]
    phy2log_LRS = np.empty_like(deployed_LRS)
    log2phy_LGE = np.empty_like(deployed_LGE)
    par_L2 = np.empty((layers, 2))
    taken_L2 = np.empty((layers, 2), dtype=np.int64)
    for i in prange(layers):
        home_ER = homes(deployed_LRS[i], heat_LNE.shape[2])
        deployed = Deployed(deployed_LRS[i], deployed_LGE[i], share_LGE[i], home_ER)
        found, before, taken = solve_layer(heat_LNE[i], deployed, search, half_life_H, min_gain)
        phy2log_LRS[i] = found.phy2log_RS
        log2phy_LGE[i] = found.log2phy_GE
        par_L2[i, 0], par_L2[i, 1] = before, found.par
        taken_L2[i, 0], taken_L2[i, 1] = found.moves, taken
    return phy2log_LRS, log2phy_LGE, par_L2, taken_L2


solve_layers = kernel(_solve_layers)
solve_layers_parallel = parallel_kernel(_solve_layers)
