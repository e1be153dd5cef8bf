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
    """Rank with a free slot, without the expert, and with the lowest risk once it holds it; -1 where none is.

    The least loaded rank is judged first: most others then carry more than it would, and need no judging.
    """
    slots = packing.phy2log_RS.shape[1]
    share = np.float32(1.0) / np.float32(packing.copies_E[expert])
    mean = share * demand.mean_E[expert]
    own = share * share * demand.gram_EE[expert, expert]
    least = -1
    for r in range(packing.load_R.shape[0]):
        if packing.filled_R[r] == slots or packing.holds_ER[expert, r]:
            continue
        if least < 0 or packing.load_R[r] < packing.load_R[least]:
            least = r
    if least < 0:
        return -1
    chosen = least
    lowest = _risk_with(packing, least, expert, share, mean, own, z)
    for r in range(packing.load_R.shape[0]):
        if packing.load_R[r] + mean >= lowest or packing.filled_R[r] == slots or packing.holds_ER[expert, r]:
            continue
        # Empty ranks are alike, and the first of them has been judged.
        if packing.filled_R[r] == 0 and packing.filled_R[least] == 0:
            continue
        found = _risk_with(packing, r, expert, share, mean, own, z)
        if found < lowest:
            chosen, lowest = r, found
    return chosen


@kernel
def _risk_with(
    packing: Packing, rank: int, expert: int, share: float, mean: float, own: float, z: float
) -> float:
    """Risk of a rank once it holds a copy with this share, mean load and variance."""
    variance = packing.variance_R[rank] + np.float32(2.0) * share * packing.cross_RE[rank, expert] + own
    return risk(packing.load_R[rank] + mean, variance, z)


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
