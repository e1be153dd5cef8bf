"""One layer's decision, and all layers of a decision side by side."""

from __future__ import annotations

import numpy as np
from numba import prange

from eplb_service.solver.arrays import Float32, Float64, Int32, Int64
from eplb_service.solver.back_test import FEWEST_EPISODES, back_test, fading
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
    kind, half_life = LOCAL, half_life_H[0]
    if heat_NE.shape[0] >= FEWEST_EPISODES:
        kind, half_life, _ = back_test(heat_NE, deployed, search, half_life_H, min_gain)
    if kind == KEEP:
        return now, before, KEEP
    heat = seen
    if half_life < np.inf:
        heat = heat_of(heat_NE, fading(heat_NE.shape[0], half_life), ranks)
    best, taken = now, KEEP
    cost = before - min_gain
    tuned = retuned(heat, deployed, search)
    for candidate_kind in range(TABLES, FRESH + 1):
        if candidate_kind > TABLES and kind == TABLES:
            break
        if candidate_kind == TABLES:
            found = tuned
        elif candidate_kind == LOCAL:
            found = improved(heat, deployed, tuned, search)
        else:
            found = anew(heat, deployed, search)
        found_par = par_on(found, seen, deployed.share_GE)
        if found_par + search.price * found.moves < cost:
            best, taken = (
                Candidate(found.phy2log_RS, found.log2phy_GE, found_par, found.moves),
                candidate_kind,
            )
            cost = found_par + search.price * found.moves
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
