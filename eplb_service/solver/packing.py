"""A placement under construction or search: its slots, each slot's share of its expert's tokens, and the rank loads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk


class Packing(NamedTuple):
    """One layer's slots with everything that makes a change cheap to judge; all arrays change in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, expert in each slot, -1 where empty."""
    copies_E: Int32
    """int32 ``[E]``, slots that hold, or will hold, the expert."""
    share_ER: Float32
    """float32 ``[E, R]``, part of the expert's tokens that the rank's copy receives; 0 where it holds none."""
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
        np.zeros((experts, ranks), dtype=np.float32),
        np.zeros((experts, ranks), dtype=np.bool_),
        np.zeros(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros((ranks, experts), dtype=np.float32),
    )


@kernel
def packing_of(phy2log_RS: Int32, share_RS: Float32, demand: Demand) -> Packing:
    """The ``Packing`` of a complete placement whose slots receive ``share_RS`` of their experts' tokens."""
    ranks, slots = phy2log_RS.shape
    packing = empty_packing(copies_of(phy2log_RS, demand.mean_E.shape[0]), ranks, slots)
    for r in range(ranks):
        for s in range(slots):
            put(packing, demand, phy2log_RS[r, s], r, share_RS[r, s])
    return packing


@kernel
def copies_of(phy2log_RS: Int32, experts: int) -> Int32:
    """Copies of each expert, int32 ``[E]``."""
    copies_E = np.zeros(experts, dtype=np.int32)
    for expert in phy2log_RS.ravel():
        copies_E[expert] += 1
    return copies_E


@kernel
def even_shares(phy2log_RS: Int32, experts: int) -> Float32:
    """Each expert's tokens split evenly over its copies, float32 ``[R, S]``."""
    copies_E = copies_of(phy2log_RS, experts)
    share_RS = np.empty(phy2log_RS.shape, dtype=np.float32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            share_RS[r, s] = np.float32(1.0) / np.float32(copies_E[phy2log_RS[r, s]])
    return share_RS


@kernel
def shift_load(packing: Packing, demand: Demand, expert: int, rank: int, share: float) -> None:
    """Add ``share`` (may be negative) of an expert's tokens to what a rank's copy receives, its slots untouched."""
    cross_E = packing.cross_RE[rank]
    gram_E = demand.gram_EE[expert]
    share32 = np.float32(share)
    packing.share_ER[expert, rank] += share32
    packing.load_R[rank] += share32 * demand.mean_E[expert]
    packing.variance_R[rank] += share32 * (np.float32(2.0) * cross_E[expert] + share32 * gram_E[expert])
    for e in range(cross_E.shape[0]):
        cross_E[e] += share32 * gram_E[e]


@kernel
def put(packing: Packing, demand: Demand, expert: int, rank: int, share: float) -> None:
    """Fill the next free slot of ``rank`` with a copy of ``expert``."""
    packing.phy2log_RS[rank, packing.filled_R[rank]] = expert
    packing.filled_R[rank] += 1
    packing.holds_ER[expert, rank] = True
    shift_load(packing, demand, expert, rank, share)


@kernel
def clear(packing: Packing, demand: Demand, rank: int, slot: int) -> None:
    """Take the expert of one slot off its rank; the slot itself must be filled or given up next."""
    expert = packing.phy2log_RS[rank, slot]
    shift_load(packing, demand, expert, rank, -packing.share_ER[expert, rank])
    packing.share_ER[expert, rank] = 0
    packing.holds_ER[expert, rank] = False


@kernel
def replace(packing: Packing, demand: Demand, rank: int, slot: int, expert: int, share: float) -> None:
    """Let ``slot`` hold ``expert`` instead, at ``share`` of its tokens."""
    clear(packing, demand, rank, slot)
    packing.phy2log_RS[rank, slot] = expert
    packing.holds_ER[expert, rank] = True
    shift_load(packing, demand, expert, rank, share)


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
