"""A layer placed from nothing: counts, placement, search, annealing, tables, and a last touch through the tables."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.annealing import anneal
from eplb_service.solver.arrays import Int32
from eplb_service.solver.candidates import Candidate, cheaper, touched_up, with_tables
from eplb_service.solver.jit import kernel
from eplb_service.solver.packing import even_shares
from eplb_service.solver.peak_search import peak_search
from eplb_service.solver.problem import SOLVED, Deployed, Heat, Search
from eplb_service.solver.relabel import match_ranks
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.table_kicks import kicked_through_tables
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
        if search.peaks:
            share_RS = even_shares(placed_RS, copies_E.shape[0])
            peak_search(placed_RS, share_RS, heat.scaled_EN, heat.share_N, _PATIENCE_ON_PEAKS, search.steps)
        if search.tries > 0:
            placed_RS, _ = anneal(
                placed_RS, heat.scaled_EN, heat.share_N, search.tries // best_KE.shape[0], search.seed
            )
        best = cheaper(best, served(placed_RS, heat, deployed, search), search.price)
    if search.tables == SOLVED and search.groups > 0:
        rounds = _TABLE_WORK // (ranks * slots) if search.tries > 0 else 0
        best = kicked_through_tables(best, heat, deployed, search, rounds, search.seed)
    return best


_TABLE_WORK = 24_000
"""Slots that kicks through tables may look through in a small layer."""
_PATIENCE_ON_PEAKS = 4
"""Ranks that the search on the peaks tries before it ends: each is the hottest in some episodes only."""


@kernel
def polished(
    candidate: Candidate, heat: Heat, deployed: Deployed, search: Search, rounds: int, seed: int
) -> Candidate:
    """The candidate after annealing, and as many kicks through tables, where they win."""
    tries = rounds * _TRIES_A_ROUND
    found_RS, _ = anneal(candidate.phy2log_RS, heat.scaled_EN, heat.share_N, tries, seed)
    best = cheaper(candidate, served(found_RS, heat, deployed, search), search.price)
    if search.tables == SOLVED:
        best = kicked_through_tables(best, heat, deployed, search, rounds, seed)
    return best


_TRIES_A_ROUND = 4000
"""Tries of annealing for each kick: about as much time."""


@kernel
def served(phy2log_RS: Int32, heat: Heat, deployed: Deployed, search: Search) -> Candidate:
    """A placement dealt to the ranks that hold most of it, with its tables, touched up through them."""
    experts = deployed.share_GE.shape[1]
    dealt_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = with_tables(dealt_RS, heat, deployed, search.z, search.tables)
    if search.tables == SOLVED:
        return touched_up(candidate, heat, deployed, search)
    return candidate
