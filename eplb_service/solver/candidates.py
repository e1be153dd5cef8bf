"""What can be done about a layer: keep it, retune its tables, or improve it where it stands."""

from __future__ import annotations

from typing import NamedTuple

from eplb_service.solver.arrays import Float32, Float64, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import mean_of_max
from eplb_service.solver.packing import even_shares, packing_of
from eplb_service.solver.problem import EVEN, SOLVED, Deployed, Heat, Search
from eplb_service.solver.relabel import keep_slots
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.table_rule import fixed_rule, slot_shares, slots_by_expert
from eplb_service.solver.table_swaps import rehoused, swap_through_tables
from eplb_service.solver.tables import solve_tables

KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""Leave the layer as it is, give it new tables, improve it where it stands, or place it anew."""


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
def with_tables(phy2log_RS: Int32, heat: Heat, deployed: Deployed, z: float, tables: int) -> Candidate:
    """A placement with its experts in their deployed slots, its tables and what both are worth."""
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
def touched_up(candidate: Candidate, heat: Heat, deployed: Deployed, search: Search) -> Candidate:
    """The candidate after swaps at the shares that its tables give, where those win; moves are taken as free."""
    log2phy_GE = candidate.log2phy_GE.copy()
    found_RS = swap_through_tables(
        candidate.phy2log_RS,
        log2phy_GE,
        heat.demand,
        deployed.share_GE,
        search.z,
        search.patience,
        search.steps,
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
def par_on(candidate: Candidate, heat: Heat, deployed: Deployed, tables: int) -> float:
    """Peak-to-average ratio of a candidate on other heat."""
    return realised(candidate.phy2log_RS, candidate.log2phy_GE, heat, deployed.share_GE, tables)


@kernel
def realised(phy2log_RS: Int32, log2phy_GE: Int32, heat: Heat, share_GE: Float32, tables: int) -> float:
    """Peak-to-average ratio, evenly split or through tables."""
    if tables == EVEN:
        share_RS = even_shares(phy2log_RS, share_GE.shape[1])
    else:
        share_RS = slot_shares(phy2log_RS, log2phy_GE, share_GE)
    return mean_of_max(heat.scaled_EN, heat.share_N, phy2log_RS, share_RS)
