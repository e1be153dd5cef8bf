"""Swaps of experts at the shares that their tables really give, each with its sources; this project's own.

The local search takes shares as even. A few sources cannot split an expert's tokens evenly over many replicas, so what
it found is improved once more at the shares that the solved tables give.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Demand, Float32, Int32, SearchParams
from eplb_service.solver.search.construction import assignment_of
from eplb_service.solver.search.evaluation import hottest_of, smooth_max_of
from eplb_service.solver.search.local_search import SMALLEST_RELIEF
from eplb_service.solver.search.neighbourhood import SCRATCH_ROWS, best_swap, swap
from eplb_service.solver.tables.log2phy import slot_shares


@kernel
def swap_through_tables(
    phy2log_RS: Int32,
    log2phy_GE: Int32,
    demand: Demand,
    share_GE: Float32,
    params: SearchParams,
) -> Int32:
    """Swap the experts of the hottest rank while that takes pressure away; returns the placement, int32 ``[R, S]``.

    Each swap takes pressure away on the scale of the risks before it, so a single one may lift the smooth peak: whoever
    calls judges where it ends by the realised ratio.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    log2phy_GE
        int32 ``[G, E]``, its tables, changed in place: a source stays with its replica wherever that goes.
    demand, share_GE
        The layer's heat, and float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    params
        Of these it takes ``z``, ``local_search_steps`` and ``local_search_patience``.
    """
    ranks, slots = phy2log_RS.shape
    z = params.z
    assignment = assignment_of(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), demand)
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    nowhere_ER = np.zeros_like(assignment.holds_ER)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck = 0
    now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    for _ in range(params.local_search_steps):
        hot = hottest_of(now, stuck_R)
        slot, rank, other, _ = best_swap(assignment, demand, now, hot, z, SMALLEST_RELIEF, scratch)
        if slot < 0:
            stuck_R[hot] = True
            stuck += 1
            if stuck == min(params.local_search_patience, ranks):
                break
            continue
        one, two = assignment.phy2log_RS[hot, slot], assignment.phy2log_RS[rank, other]
        _readdress(log2phy_GE, one, hot * slots + slot, rank * slots + other)
        _readdress(log2phy_GE, two, rank * slots + other, hot * slots + slot)
        swap(assignment, demand, nowhere_ER, hot, slot, rank, other)
        stuck_R[:] = False
        stuck = 0
        now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    return assignment.phy2log_RS


@kernel
def rehoused(log2phy_GE: Int32, phy2log_RS: Int32) -> Int32:
    """Tables whose replicas stayed on their ranks, but not in their slots; int32 ``[G, E]``."""
    ranks, slots = phy2log_RS.shape
    sources, experts = log2phy_GE.shape
    slot_RE = np.full((ranks, experts), -1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            slot_RE[r, phy2log_RS[r, s]] = s
    found_GE = np.empty_like(log2phy_GE)
    for g in range(sources):
        for e in range(experts):
            rank = log2phy_GE[g, e] // slots
            found_GE[g, e] = rank * slots + slot_RE[rank, e]
    return found_GE


@part
def _readdress(log2phy_GE: Int32, expert: int, was: int, becomes: int) -> None:
    """Send an expert's tokens that went to one physical slot to another."""
    for g in range(log2phy_GE.shape[0]):
        if log2phy_GE[g, expert] == was:
            log2phy_GE[g, expert] = becomes
