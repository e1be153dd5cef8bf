"""One layer's decision: score what serves now and each candidate through its own tables, and take the cheapest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange

from eplb_service.solver.arrays import Float32, Float64, Int32, Int64
from eplb_service.solver.jit import kernel, parallel_kernel
from eplb_service.solver.objective import demand, normalise
from eplb_service.solver.packing import load_of
from eplb_service.solver.relabel import keep_slots, match_ranks
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.tables import fixed_rule, slots_by_expert, solve_tables, tables_par
from eplb_service.solver.tree_search import tree_search

KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""What was taken: the deployed placement as it is, with new tables, improved by local search, or solved anew."""


class Search(NamedTuple):
    """How hard and for what a layer is solved."""

    z: float
    """Weight of the standard deviation."""
    price: float
    """Peak-to-average ratio that one moved slot must win."""
    groups: int
    """Expert groups of the tree search; 0 for greedy replica counts."""
    spread: int
    """Copies that a group may get beside its greedy number."""
    beam: int
    """Nodes that go on from each level of the tree."""
    steps: int
    """Bound on the local search; 0 for none."""
    tables: bool
    """Solve log2phy; otherwise the fixed rule."""
    warm: bool
    """Consider what is deployed; otherwise only a fresh placement."""


@kernel
def solve_layer(
    heat_NE: Float64,
    weight_N: Float64,
    deployed_RS: Int32,
    deployed_GE: Int32,
    share_GE: Float32,
    search: Search,
    phy2log_RS: Int32,
    chosen_GE: Int32,
) -> tuple[float, float, int, int]:
    """Decide one layer.

    Parameters
    ----------
    heat_NE, weight_N
        float64 tokens per episode and expert, and the episodes' weights.
    deployed_RS, deployed_GE
        int32, the placement and each source's table now.
    share_GE
        float32, each source's part of each expert's tokens.
    search
        A ``Search``.
    phy2log_RS, chosen_GE
        int32, filled with the answer.

    Returns peak-to-average ratio now, that of the answer, slots that move, and what was taken.
    """
    ranks, slots = deployed_RS.shape
    scaled_EN, share_N = normalise(heat_NE, weight_N, ranks)
    layer = demand(scaled_EN, share_N)
    phy2log_RS[:] = deployed_RS
    chosen_GE[:] = deployed_GE
    before = tables_par(deployed_RS, deployed_GE, scaled_EN, share_N, share_GE)
    after, moves, taken, cost = before, 0, KEEP, before
    home_ER = np.zeros((heat_NE.shape[1], ranks), dtype=np.bool_)
    if search.warm:
        if search.tables:
            found_GE, found = solve_tables(deployed_RS, layer, scaled_EN, share_N, share_GE, search.z)
            if found < cost:
                after, taken, cost = found, TABLES, found
                chosen_GE[:] = found_GE
        for r in range(ranks):
            for s in range(slots):
                home_ER[deployed_RS[r, s], r] = True
    for candidate in (LOCAL, FRESH):
        if candidate == LOCAL:
            if not search.warm or search.steps == 0:
                continue
            packing = load_of(deployed_RS, layer)
            new_RS, _ = risk_search(packing, layer, home_ER, search.z, search.price, search.steps)
        else:
            packing, _ = tree_search(layer, ranks, slots, search.z, search.groups, search.spread, search.beam)
            new_RS = packing.phy2log_RS
            if search.steps > 0:
                new_RS, _ = risk_search(packing, layer, home_ER, search.z, 0.0, search.steps)
            new_RS = match_ranks(new_RS, deployed_RS, heat_NE.shape[1])
        new_RS, new_moves = keep_slots(new_RS, deployed_RS)
        if search.tables:
            found_GE, found = solve_tables(new_RS, layer, scaled_EN, share_N, share_GE, search.z)
        else:
            first_E1, slot_P = slots_by_expert(new_RS, heat_NE.shape[1])
            found_GE = fixed_rule(first_E1, slot_P, share_GE.shape[0])
            found = tables_par(new_RS, found_GE, scaled_EN, share_N, share_GE)
        if found + search.price * new_moves < cost or (candidate == FRESH and not search.warm):
            after, moves, taken, cost = found, new_moves, candidate, found + search.price * new_moves
            phy2log_RS[:] = new_RS
            chosen_GE[:] = found_GE
    return before, after, moves, taken


def _solve_layers(
    heat_LNE: Float64,
    weight_N: Float64,
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: Float32,
    search: Search,
) -> tuple[Int32, Int32, Float64, Int64]:
    """``solve_layer`` for each layer.

    Returns int32 ``[L, R, S]``, int32 ``[L, G, E]``, float64 ``[L, 2]`` (ratio before, after), int64 ``[L, 2]``
    (moves, what was taken).
    """
    layers = heat_LNE.shape[0]
    phy2log_LRS = np.empty_like(deployed_LRS)
    chosen_LGE = np.empty_like(deployed_LGE)
    par_L2 = np.empty((layers, 2))
    taken_L2 = np.empty((layers, 2), dtype=np.int64)
    for i in prange(layers):
        before, after, moves, taken = solve_layer(
            heat_LNE[i],
            weight_N,
            deployed_LRS[i],
            deployed_LGE[i],
            share_LGE[i],
            search,
            phy2log_LRS[i],
            chosen_LGE[i],
        )
        par_L2[i, 0], par_L2[i, 1] = before, after
        taken_L2[i, 0], taken_L2[i, 1] = moves, taken
    return phy2log_LRS, chosen_LGE, par_L2, taken_L2


solve_layers = kernel(_solve_layers)
solve_layers_parallel = parallel_kernel(_solve_layers)
