"""What can be done about a layer: retune its tables, improve its placement from where it is, or place it from scratch.

From scratch: replica counts by tree search, local search from its best leaves, annealing where slots are few, tables,
and a last touch through the tables.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.annealing import anneal
from eplb_service.solver.construction import assignment_of, even_shares
from eplb_service.solver.evaluation import mean_of_max
from eplb_service.solver.jit import kernel
from eplb_service.solver.local_search import local_search
from eplb_service.solver.model import (
    EVEN,
    SOLVED,
    Candidate,
    Float32,
    Float64,
    Heat,
    Int32,
    Layer,
    SearchParams,
)
from eplb_service.solver.tables import (
    fixed_rule,
    rehoused,
    slot_shares,
    slots_by_expert,
    solve_tables,
    swap_through_tables,
)
from eplb_service.solver.topology import keep_slots, match_ranks
from eplb_service.solver.tree_search import place, tree_search


@kernel
def improved(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Local search from the deployed placement; int32 ``[K, R, S]``, a placement for each price of a move.

    Shares are taken as even: tables that lean on the window seen fit the next one worse.
    """
    heat, deployed = layer
    share_RS = even_shares(deployed.phy2log_RS, deployed.share_GE.shape[1])
    assignment = assignment_of(deployed.phy2log_RS, share_RS, heat.demand)
    found_KRS, _ = local_search(assignment, heat.demand, deployed.home_ER, params, price_K)
    return found_KRS


@kernel
def with_tables(phy2log_RS: Int32, layer: Layer, z: float, tables: int) -> Candidate:
    """A placement with its experts in their deployed slots, its tables and what both are worth."""
    heat, deployed = layer
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if tables == SOLVED:
        log2phy_GE, par = solve_tables(
            kept_RS, heat.demand, heat.scaled_EN, heat.share_N, deployed.share_GE, z
        )
    else:
        first_E1, slot_P = slots_by_expert(kept_RS, deployed.share_GE.shape[1])
        log2phy_GE = fixed_rule(first_E1, slot_P, deployed.share_GE.shape[0])
        par = realised(kept_RS, log2phy_GE, heat, deployed.share_GE, tables)
    return Candidate(kept_RS, log2phy_GE, par, moves)


@kernel
def touched_up(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """The candidate after swaps at the shares that its tables give, unless they raise its realised ratio.

    That ratio is the objective here: it never rises. Moves are taken as free.
    """
    heat, deployed = layer
    log2phy_GE = candidate.log2phy_GE.copy()
    found_RS = swap_through_tables(
        candidate.phy2log_RS,
        log2phy_GE,
        heat.demand,
        deployed.share_GE,
        params,
    )
    kept_RS, moves = keep_slots(found_RS, deployed.phy2log_RS)
    kept_GE = rehoused(log2phy_GE, kept_RS)
    par = realised(kept_RS, kept_GE, heat, deployed.share_GE, SOLVED)
    if par < candidate.par:
        return Candidate(kept_RS, kept_GE, par, moves)
    return candidate


@kernel
def cheaper(one: Candidate, other: Candidate, price: float) -> Candidate:
    """The candidate with the lower ratio once its moves are paid for; the first where they cost the same."""
    return other if other.par + price * other.moves < one.par + price * one.moves else one


@kernel
def par_on(candidate: Candidate, layer: Layer, tables: int) -> float:
    """Peak-to-average ratio of a candidate on other heat."""
    return realised(candidate.phy2log_RS, candidate.log2phy_GE, layer.heat, layer.deployed.share_GE, tables)


@kernel
def realised(phy2log_RS: Int32, log2phy_GE: Int32, heat: Heat, share_GE: Float32, tables: int) -> float:
    """Peak-to-average ratio, evenly split or through tables."""
    if tables == EVEN:
        share_RS = even_shares(phy2log_RS, share_GE.shape[1])
    else:
        share_RS = slot_shares(phy2log_RS, log2phy_GE, share_GE)
    return mean_of_max(heat.scaled_EN, heat.share_N, phy2log_RS, share_RS)


@kernel
def from_scratch(layer: Layer, params: SearchParams) -> Candidate:
    """Tree search over replica counts, local search from its best leaves, tables; the best through its tables."""
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    best_KE, _ = tree_search(heat.demand, ranks, slots, params)
    nowhere_ER = np.zeros_like(deployed.home_ER)
    best = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, np.inf, 0)
    for replicas_E in best_KE:
        assignment = place(replicas_E, heat.demand, ranks, slots, params.z)
        found_KRS, _ = local_search(assignment, heat.demand, nowhere_ER, params, np.zeros(1))
        placed_RS = found_KRS[0]
        if params.annealing_tries > 0:
            placed_RS, _ = anneal(
                placed_RS,
                heat.scaled_EN,
                heat.share_N,
                params.annealing_tries // best_KE.shape[0],
                params.seed,
            )
        best = cheaper(best, served(placed_RS, layer, params), params.move_price)
    return best


@kernel
def annealed(candidate: Candidate, layer: Layer, params: SearchParams, tries: int, seed: int) -> Candidate:
    """The candidate after so many tries of annealing, where they win."""
    found_RS, _ = anneal(candidate.phy2log_RS, layer.heat.scaled_EN, layer.heat.share_N, tries, seed)
    return cheaper(candidate, served(found_RS, layer, params), params.move_price)


@kernel
def served(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """A placement dealt to the ranks that hold most of it, with its tables, touched up through them."""
    deployed = layer.deployed
    experts = deployed.share_GE.shape[1]
    dealt_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = with_tables(dealt_RS, layer, params.z, params.tables)
    if params.tables == SOLVED and params.table_swaps:
        return touched_up(candidate, layer, params)
    return candidate
