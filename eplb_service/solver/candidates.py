"""What can be done about a layer: retune its tables, improve it where it stands, or place it anew."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Float64, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, demand_of, normalise
from eplb_service.solver.packing import even_shares, packing_of
from eplb_service.solver.relabel import keep_slots, match_ranks
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.tables import (
    fixed_rule,
    slots_by_expert,
    solve_tables,
    tables_par,
)
from eplb_service.solver.tree_search import place, tree_search

KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""Leave the layer as it is, give it new tables, improve it where it stands, or place it anew."""


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
    leaves: int
    """Leaves of the tree that are searched further."""
    patience: int
    """Hot ranks in a row that nothing helps before a local search ends."""
    steps: int
    """Bound on a local search; 0 for none."""
    tables: bool
    """Solve log2phy; otherwise the fixed rule."""


class Deployed(NamedTuple):
    """What serves now, and from where tokens come."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    log2phy_GE: Int32
    """int32 ``[G, E]``, each source's table."""
    share_GE: Float32
    """float32 ``[G, E]``, each source's part of each expert's tokens."""
    home_ER: Bool
    """bool ``[E, R]``, ranks that hold each expert."""


class Heat(NamedTuple):
    """A stretch of one layer's heat, normalised."""

    scaled_EN: Float32
    """float32 ``[E, N]``, mean rank load 1 in each episode."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights, summing to 1."""
    demand: Demand
    """Its mean and covariance."""


class Candidate(NamedTuple):
    """A placement with its tables."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    log2phy_GE: Int32
    """int32 ``[G, E]``."""
    par: float
    """Peak-to-average ratio on the heat that it was made for."""
    moves: int
    """Slots that must receive weights."""


@kernel
def heat_of(heat_NE: Float64, weight_N: Float64, ranks: int) -> Heat:
    """Normalise episodes ``[N, E]`` with their weights ``[N]``."""
    scaled_EN, share_N = normalise(heat_NE, weight_N, ranks)
    return Heat(scaled_EN, share_N, demand_of(scaled_EN, share_N))


@kernel
def homes(phy2log_RS: Int32, experts: int) -> Bool:
    """Whether each rank holds each expert, bool ``[E, R]``."""
    ranks, slots = phy2log_RS.shape
    home_ER = np.zeros((experts, ranks), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            home_ER[phy2log_RS[r, s], r] = True
    return home_ER


@kernel
def improved(heat: Heat, deployed: Deployed, search: Search, price_K: Float64) -> Int32:
    """Local search from the deployed placement; int32 ``[K, R, S]``, a placement for each price of a move.

    Shares are taken as even: tables that lean on the window seen fit the next one worse.
    """
    share_RS = even_shares(deployed.phy2log_RS, deployed.share_GE.shape[1])
    packing = packing_of(deployed.phy2log_RS, share_RS, heat.demand)
    found_KRS, _ = risk_search(
        packing, heat.demand, deployed.home_ER, search.z, price_K, search.patience, search.steps
    )
    return found_KRS


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
        dealt_RS = match_ranks(found_KRS[0], deployed.phy2log_RS, copies_E.shape[0])
        candidate = with_tables(dealt_RS, heat, deployed, search)
        if candidate.par + search.price * candidate.moves < best.par + search.price * best.moves:
            best = candidate
    return best


@kernel
def with_tables(phy2log_RS: Int32, heat: Heat, deployed: Deployed, search: Search) -> Candidate:
    """A placement with its experts in their deployed slots, its tables and what both are worth."""
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if search.tables:
        log2phy_GE, par = solve_tables(
            kept_RS, heat.demand, heat.scaled_EN, heat.share_N, deployed.share_GE, search.z
        )
    else:
        first_E1, slot_P = slots_by_expert(kept_RS, deployed.share_GE.shape[1])
        log2phy_GE = fixed_rule(first_E1, slot_P, deployed.share_GE.shape[0])
        par = tables_par(kept_RS, log2phy_GE, heat.scaled_EN, heat.share_N, deployed.share_GE)
    return Candidate(kept_RS, log2phy_GE, par, moves)


@kernel
def par_on(candidate: Candidate, heat: Heat, share_GE: Float32) -> float:
    """Peak-to-average ratio of a candidate on other heat."""
    return tables_par(candidate.phy2log_RS, candidate.log2phy_GE, heat.scaled_EN, heat.share_N, share_GE)
