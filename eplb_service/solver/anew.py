"""A layer placed from nothing: counts, placement, search, annealing, tables, and a last touch through the tables."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.annealing import anneal
from eplb_service.solver.arrays import Int32
from eplb_service.solver.candidates import Candidate, cheaper, touched_up, with_tables
from eplb_service.solver.jit import kernel
from eplb_service.solver.problem import SOLVED, Deployed, Heat, Search
from eplb_service.solver.relabel import match_ranks
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.tree_search import place, tree_search


@kernel
def anew(heat: Heat, deployed: Deployed, search: Search) -> Candidate:
    """Tree search over replica counts, local search from its best leaves, tables; the best through its tables."""
    ranks, slots = deployed.phy2log_RS.shape
    best_KE, _ = tree_search(
        heat.demand, ranks, slots, search.z, search.groups, search.spread, search.beam, search.leaves
    )
    nowhere_ER = np.zeros_like(deployed.home_ER)
    best = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, np.inf, 0)
    for copies_E in best_KE:
        packing = place(copies_E, heat.demand, ranks, slots, search.z)
        found_KRS, _ = risk_search(
            packing, heat.demand, nowhere_ER, search.z, np.zeros(1), search.patience, search.steps
        )
        placed_RS = found_KRS[0]
        if search.tries > 0:
            placed_RS, _ = anneal(
                placed_RS, heat.scaled_EN, heat.share_N, search.tries // best_KE.shape[0], search.seed
            )
        best = cheaper(best, served(placed_RS, heat, deployed, search), search.price)
    return best


@kernel
def polished(
    candidate: Candidate, heat: Heat, deployed: Deployed, search: Search, tries: int, seed: int
) -> Candidate:
    """The candidate after so many tries of annealing, where they win."""
    found_RS, _ = anneal(candidate.phy2log_RS, heat.scaled_EN, heat.share_N, tries, seed)
    return cheaper(candidate, served(found_RS, heat, deployed, search), search.price)


@kernel
def served(phy2log_RS: Int32, heat: Heat, deployed: Deployed, search: Search) -> Candidate:
    """A placement dealt to the ranks that hold most of it, with its tables, touched up through them."""
    experts = deployed.share_GE.shape[1]
    dealt_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = with_tables(dealt_RS, heat, deployed, search.z, search.tables)
    if search.tables == SOLVED:
        return touched_up(candidate, heat, deployed, search)
    return candidate
