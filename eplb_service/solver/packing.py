"""A placement under construction or search, and the greedy way to build one: hottest first, to the coolest rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Int32, Int64
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk


class Packing(NamedTuple):
    """One layer's slots with everything that makes a change cheap to judge; all arrays change in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, expert in each slot, -1 where empty."""
    copies_E: Int32
    """int32 ``[E]``; an expert's tokens split evenly over its copies."""
    holds_ER: Bool
    """bool ``[E, R]``, whether the rank holds the expert."""
    filled_R: Int32
    """int32 ``[R]``, slots in use; they come first."""
    load_R: Float32
    """float32 ``[R]``, mean load."""
    variance_R: Float32
    """float32 ``[R]``, variance of the load over episodes."""
    cross_RE: Float32
    """float32 ``[R, E]``, covariance of the rank's load with each expert's heat."""


@kernel
def empty_packing(copies_E: Int32, ranks: int, slots: int) -> Packing:
    """No slot filled; ``copies_E`` is what each expert will have."""
    experts = copies_E.shape[0]
    return Packing(
        np.full((ranks, slots), -1, dtype=np.int32),
        copies_E.copy(),
        np.zeros((experts, ranks), dtype=np.bool_),
        np.zeros(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros((ranks, experts), dtype=np.float32),
    )


@kernel
def load_of(phy2log_RS: Int32, demand: Demand) -> Packing:
    """The ``Packing`` of a complete placement."""
    ranks, slots = phy2log_RS.shape
    copies_E = np.zeros(demand.mean_E.shape[0], dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            copies_E[phy2log_RS[r, s]] += 1
    packing = empty_packing(copies_E, ranks, slots)
    for r in range(ranks):
        for s in range(slots):
            put(packing, demand, phy2log_RS[r, s], r)
    return packing


@kernel
def shift_load(packing: Packing, demand: Demand, expert: int, rank: int, weight: float) -> None:
    """Add ``weight`` (may be negative) of an expert's tokens to a rank's load, its slots untouched."""
    cross_E = packing.cross_RE[rank]
    gram_E = demand.gram_EE[expert]
    weight = np.float32(weight)
    packing.load_R[rank] += weight * demand.mean_E[expert]
    packing.variance_R[rank] += weight * (np.float32(2.0) * cross_E[expert] + weight * gram_E[expert])
    for e in range(cross_E.shape[0]):
        cross_E[e] += weight * gram_E[e]


@kernel
def put(packing: Packing, demand: Demand, expert: int, rank: int) -> None:
    """Fill the next free slot of ``rank`` with a copy of ``expert``."""
    packing.phy2log_RS[rank, packing.filled_R[rank]] = expert
    packing.filled_R[rank] += 1
    packing.holds_ER[expert, rank] = True
    shift_load(packing, demand, expert, rank, 1.0 / packing.copies_E[expert])


@kernel
def replace(packing: Packing, demand: Demand, rank: int, slot: int, expert: int, weight: float) -> None:
    """Let ``slot`` hold ``expert`` instead, at ``weight`` of its tokens; the old one leaves with its even share."""
    old = packing.phy2log_RS[rank, slot]
    shift_load(packing, demand, old, rank, -1.0 / packing.copies_E[old])
    shift_load(packing, demand, expert, rank, weight)
    packing.phy2log_RS[rank, slot] = expert
    packing.holds_ER[old, rank] = False
    packing.holds_ER[expert, rank] = True


@kernel
def hottest_rank(packing: Packing, z: float) -> tuple[int, float]:
    """Rank with the highest risk, and that risk."""
    worst = 0
    worst_risk = np.float32(-1.0)
    for r in range(packing.load_R.shape[0]):
        found = risk(packing.load_R[r], packing.variance_R[r], z)
        if found > worst_risk:
            worst, worst_risk = r, found
    return worst, worst_risk


@kernel
def pack(packing: Packing, demand: Demand, order_E: Int64, z: float) -> None:
    """Place all copies of the experts of ``order_E``, each on the rank that stays coolest with it."""
    for expert in order_E:
        for _ in range(packing.copies_E[expert]):
            rank = _coolest_rank(packing, demand, expert, z)
            if rank < 0:
                rank = _make_room(packing, demand, expert)
            put(packing, demand, expert, rank)


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
                shift_load(packing, demand, passed, giver, -1.0 / packing.copies_E[passed])
                packing.holds_ER[passed, giver] = False
                packing.filled_R[giver] -= 1
                packing.phy2log_RS[giver, slot] = packing.phy2log_RS[giver, slots - 1]
                packing.phy2log_RS[giver, slots - 1] = -1
                put(packing, demand, passed, roomy)
                return giver
    return -1
