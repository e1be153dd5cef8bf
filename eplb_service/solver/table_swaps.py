"""Swaps through tables: the placement's last touch, at the shares that the sources' tables really give.

A source sends all its tokens of an expert to one replica, so shares come in steps: ten replicas of an expert that 32
sources send to get three or four sources each, and those with four are a third hotter than the search believed. Once
the tables are made, swapping experts between ranks, each with its sources, evens that out.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand
from eplb_service.solver.packing import packing_of
from eplb_service.solver.pressure import hottest_of, pressures, smooth_peak
from eplb_service.solver.risk_search import SMALLEST_RELIEF
from eplb_service.solver.swaps import SCRATCH_ROWS, best_swap, swap
from eplb_service.solver.table_rule import slot_shares


@kernel
def swap_through_tables(
    phy2log_RS: Int32,
    log2phy_GE: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
    patience: int,
    most_steps: int,
) -> Int32:
    """Swap while that lowers the smooth peak; returns the new placement, int32 ``[R, S]``.

    ``log2phy_GE`` (int32 ``[G, E]``) is changed in place: a source stays with its replica wherever that goes.
    ``patience`` and ``most_steps`` as for ``risk_search``.
    """
    ranks, slots = phy2log_RS.shape
    packing = packing_of(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), demand)
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    nowhere_ER = np.zeros_like(packing.holds_ER)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck = 0
    now = pressures(packing, z)
    peak = smooth_peak(now)
    for _ in range(most_steps):
        hot = hottest_of(now, stuck_R)
        slot, rank, other, _ = best_swap(packing, demand, now, hot, z, SMALLEST_RELIEF, scratch)
        after = now
        if slot >= 0:
            swap(packing, demand, nowhere_ER, hot, slot, rank, other)
            after = pressures(packing, z)
        if smooth_peak(after) >= peak:
            if slot >= 0:
                swap(packing, demand, nowhere_ER, hot, slot, rank, other)
            stuck_R[hot] = True
            stuck += 1
            if stuck == min(patience, ranks):
                break
            continue
        came, went = packing.phy2log_RS[hot, slot], packing.phy2log_RS[rank, other]
        _readdress(log2phy_GE, went, hot * slots + slot, rank * slots + other)
        _readdress(log2phy_GE, came, rank * slots + other, hot * slots + slot)
        stuck_R[:] = False
        stuck = 0
        now, peak = after, smooth_peak(after)
    return packing.phy2log_RS


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


@kernel
def _readdress(log2phy_GE: Int32, expert: int, was: int, becomes: int) -> None:
    """Send an expert's tokens that went to one physical slot to another."""
    for g in range(log2phy_GE.shape[0]):
        if log2phy_GE[g, expert] == was:
            log2phy_GE[g, expert] = becomes
