"""The greedy way to build a placement: hottest copy first, each to the rank that stays coolest with it."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Int64
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk
from eplb_service.solver.packing import Packing, clear, put


@kernel
def pack(packing: Packing, demand: Demand, order_E: Int64, z: float) -> None:
    """Place all copies of the experts of ``order_E``, each on the rank that stays coolest with it."""
    for expert in order_E:
        for _ in range(packing.copies_E[expert]):
            rank = _coolest_rank(packing, demand, expert, z)
            if rank < 0:
                rank = _make_room(packing, demand, expert)
            put(packing, demand, expert, rank, 1.0 / packing.copies_E[expert])


@kernel
def _coolest_rank(packing: Packing, demand: Demand, expert: int, z: float) -> int:
    """Rank with a free slot, without the expert, and with the lowest risk once it holds it; -1 where none is."""
    slots = packing.phy2log_RS.shape[1]
    weight = np.float32(1.0) / np.float32(packing.copies_E[expert])
    own = weight * weight * demand.gram_EE[expert, expert]
    chosen = -1
    lowest = np.inf
    for r in range(packing.load_R.shape[0]):
        if packing.filled_R[r] == slots or packing.holds_ER[expert, r] or packing.load_R[r] >= lowest:
            continue
        variance = packing.variance_R[r] + np.float32(2.0) * weight * packing.cross_RE[r, expert] + own
        found = risk(packing.load_R[r], variance, z)
        if found < lowest:
            chosen, lowest = r, found
    return chosen


@kernel
def _make_room(packing: Packing, demand: Demand, expert: int) -> int:
    """Free a slot for ``expert`` where every rank with room holds it already; returns the rank.

    A full rank without the expert passes one of its own to a rank with room that lacks it. Such a pair exists while
    the expert has fewer copies placed than there are ranks: the full rank has more other experts than the one with
    room.
    """
    ranks, slots = packing.phy2log_RS.shape
    roomy = 0
    while packing.filled_R[roomy] == slots:
        roomy += 1
    for giver in range(ranks):
        if packing.holds_ER[expert, giver]:
            continue
        for slot in range(slots):
            passed = packing.phy2log_RS[giver, slot]
            if not packing.holds_ER[passed, roomy]:
                clear(packing, demand, giver, slot)
                packing.filled_R[giver] -= 1
                packing.phy2log_RS[giver, slot] = packing.phy2log_RS[giver, slots - 1]
                packing.phy2log_RS[giver, slots - 1] = -1
                put(packing, demand, passed, roomy, 1.0 / packing.copies_E[passed])
                return giver
    return -1
