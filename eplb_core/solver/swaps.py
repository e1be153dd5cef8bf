"""Find and apply swaps of two experts between the hottest rank and any other rank.

The search judges all possible swaps at every step, so values that several swaps depend on are kept from one step to the
next. They are stored in arrays with one entry per slot, so that loops over thousands of slots compile to SIMD code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.construction import Assignment, replace
from eplb_core.solver.evaluation import SmoothMax, smooth_term
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Heat

MIN_RELIEF = 1e-3
"""Minimum reduction in pressure that counts as progress; smaller ones are treated as rounding errors. The hottest
rank's pressure is 1.

Its effect was measured in closed-loop runs with 3 layers x 256 experts on 32 ranks x 9 slots (the four kinds of heat in
``make bench-solver``, seeds 1 and 2, two decisions after the first placement). Values of 1e-4 and 1e-2 give the same
results, and 0.1 raises the realised PAR by up to 0.8 %.
"""


class Swaps(NamedTuple):
    """Precomputed values for every slot that may be swapped with a slot of the hottest rank.

    All arrays except the last are float32 ``[R*S]``. The first five describe a slot's replica, and the slot's rank
    without that replica. They depend only on the rank's slots and loads. After a change to two ranks, only the entries
    of these two are recomputed, even if there are thousands of ranks.
    """

    share_P: Float32
    """Fraction of its expert's tokens that the replica receives."""
    mean_P: Float32
    """Mean load of the replica."""
    variance_P: Float32
    """Variance of the replica's load."""
    remaining_load_P: Float32
    """Mean load of the slot's rank without the replica."""
    remaining_variance_P: Float32
    """Load variance of the slot's rank without the replica."""
    hot_load_P: Float32
    """Mean load of the hottest rank with the replica added; infinite if the rank already holds the expert."""
    hot_variance_P: Float32
    """Load variance of the hottest rank with the replica added."""
    pressure_P: Float32
    """Current pressure of the slot's rank."""
    arrival_P: Float32
    """Variance that the hottest rank's replica under consideration would add to the current load of the slot's rank;
    infinite if the rank already holds the expert."""
    scratch_P: Float32
    """Scratch memory for ``best_swap``."""
    held_E: Bool
    """bool ``[E]``, True if the hottest rank holds the expert; all False between calls of ``best_swap``."""


@kernel
def swaps_of(assignment: Assignment, heat: Heat) -> Swaps:
    """Allocate the arrays and precompute the values for all slots."""
    ranks, slots = assignment.phy2log_RS.shape
    rows = np.empty((10, ranks * slots), dtype=np.float32)
    # Index the rows one by one, because numba does not recognise that unpacked rows are contiguous.
    swaps = Swaps(
        rows[0],
        rows[1],
        rows[2],
        rows[3],
        rows[4],
        rows[5],
        rows[6],
        rows[7],
        rows[8],
        rows[9],
        np.zeros(heat.mean_E.shape[0], dtype=np.bool_),
    )
    for r in range(ranks):
        lay_out(assignment, heat, swaps, r)
    return swaps


@kernel
def lay_out(assignment: Assignment, heat: Heat, swaps: Swaps, rank: int) -> None:
    """Compute the first five arrays of ``swaps`` for the slots of one rank."""
    slots = assignment.phy2log_RS.shape[1]
    two = np.float32(2.0)
    load = assignment.load_R[rank]
    variance = assignment.variance_R[rank]
    cross_E = assignment.cross_RE[rank]
    for s in range(slots):
        p = rank * slots + s
        expert = assignment.phy2log_RS[rank, s]
        share = assignment.share_ER[expert, rank]
        mean = share * heat.mean_E[expert]
        replica_variance = share * share * heat.gram_EE[expert, expert]
        swaps.share_P[p] = share
        swaps.mean_P[p] = mean
        swaps.variance_P[p] = replica_variance
        swaps.remaining_load_P[p] = load - mean
        swaps.remaining_variance_P[p] = variance + replica_variance - two * share * cross_E[expert]


@kernel
def best_swap(
    assignment: Assignment, heat: Heat, smooth_max: SmoothMax, hot: int, bound: float, swaps: Swaps
) -> tuple[int, int, int, float]:
    """Find the swap between ``hot`` and any other rank that reduces the pressure most.

    Parameters
    ----------
    assignment
        The placement.
    heat
        Normalised heat of the layer.
    smooth_max
        Current pressures.
    hot
        The hottest rank.
    bound
        Reduction in pressure that the swap must exceed.
    swaps
        Precomputed values of the placement.

    Returns
    -------
    tuple of int, int, int and float
        Slot on ``hot``, the other rank, the slot on that rank, and the reduction in pressure. The first three are -1 if
        no swap exceeds ``bound``.
    """
    ranks, slots = assignment.phy2log_RS.shape
    size = ranks * slots
    zero = np.float32(0.0)
    two = np.float32(2.0)
    infinite = np.float32(np.inf)
    z32 = np.float32(smooth_max.z)
    base = np.float32(smooth_max.base)
    scale = np.float32(smooth_max.scale)
    hot_load_P = swaps.hot_load_P
    hot_variance_P = swaps.hot_variance_P
    remaining_load_P = swaps.remaining_load_P
    remaining_variance_P = swaps.remaining_variance_P
    share_P = swaps.share_P
    pressure_P = swaps.pressure_P
    arrival_P = swaps.arrival_P
    scratch_P = swaps.scratch_P
    expert_P = assignment.phy2log_RS.ravel()
    cross_E = assignment.cross_RE[hot]
    _lay_out_hot_rank(assignment, smooth_max, hot, swaps)
    lowest = np.float32(smooth_max.pressure_R[hot] - bound)
    best_slot = -1
    best_p = -1
    for slot in range(slots):
        expert = assignment.phy2log_RS[hot, slot]
        share = assignment.share_ER[expert, hot]
        mean = share * heat.mean_E[expert]
        variance = share * share * heat.gram_EE[expert, expert]
        departure = variance - two * share * cross_E[expert]
        gram_E = heat.gram_EE[expert]
        p = 0
        for r in range(ranks):
            arrival = (
                infinite
                if assignment.holds_ER[expert, r]
                else variance + two * share * assignment.cross_RE[r, expert]
            )
            for _ in range(slots):
                arrival_P[p] = arrival
                p += 1
        for p in range(size):
            scratch_P[p] = share_P[p] * gram_E[np.uint32(expert_P[p])]
        for p in range(size):
            # In a swap, the load variance of both ranks drops by twice the covariance of the two replicas.
            both = two * share * scratch_P[p]
            hot_risk = hot_load_P[p] - mean + z32 * np.sqrt(max(hot_variance_P[p] + departure - both, zero))
            peer_risk = (
                remaining_load_P[p]
                + mean
                + z32 * np.sqrt(max(remaining_variance_P[p] + arrival_P[p] - both, zero))
            )
            scratch_P[p] = (
                smooth_term(hot_risk, base, scale) + smooth_term(peer_risk, base, scale) - pressure_P[p]
            )
        least = infinite
        for p in range(size):
            least = min(least, scratch_P[p])
        if least < lowest:
            lowest = least
            best_slot = slot
            for p in range(size):
                if scratch_P[p] == least:
                    best_p = p
                    break
    if best_p < 0:
        return -1, -1, -1, 0.0
    return best_slot, best_p // slots, best_p % slots, smooth_max.pressure_R[hot] - lowest


@part
def _lay_out_hot_rank(assignment: Assignment, smooth_max: SmoothMax, hot: int, swaps: Swaps) -> None:
    """Compute ``hot_load_P``, ``hot_variance_P`` and ``pressure_P`` of all slots.

    They are the same for all replicas that may leave the hottest rank.
    """
    ranks, slots = assignment.phy2log_RS.shape
    two = np.float32(2.0)
    infinite = np.float32(np.inf)
    hot_load_P = swaps.hot_load_P
    hot_variance_P = swaps.hot_variance_P
    pressure_P = swaps.pressure_P
    share_P = swaps.share_P
    mean_P = swaps.mean_P
    variance_P = swaps.variance_P
    held_E = swaps.held_E
    expert_P = assignment.phy2log_RS.ravel()
    cross_E = assignment.cross_RE[hot]
    load = assignment.load_R[hot]
    variance = assignment.variance_R[hot]
    for s in range(slots):
        held_E[assignment.phy2log_RS[hot, s]] = True
    for p in range(ranks * slots):
        expert = np.uint32(expert_P[p])
        hot_load_P[p] = infinite if held_E[expert] else load + mean_P[p]
        hot_variance_P[p] = variance + variance_P[p] + two * share_P[p] * cross_E[expert]
    for s in range(slots):
        held_E[assignment.phy2log_RS[hot, s]] = False
    p = 0
    for r in range(ranks):
        for _ in range(slots):
            pressure_P[p] = smooth_max.pressure_R[r]
            p += 1


@kernel
def swap(
    assignment: Assignment,
    heat: Heat,
    home_ER: Bool,
    swaps: Swaps,
    hot: int,
    hot_slot: int,
    rank: int,
    slot: int,
) -> int:
    """Swap the experts in two slots; each expert keeps its token share.

    Parameters
    ----------
    assignment
        The placement, changed in place.
    heat
        Normalised heat of the layer.
    home_ER
        bool ``[E, R]``, True if the rank holds the expert in the deployed placement.
    swaps
        Precomputed values, updated in place.
    hot
        The hottest rank.
    hot_slot
        Slot of ``hot``.
    rank
        The other rank.
    slot
        Slot of ``rank``.

    Returns
    -------
    int
        Change in the number of slots whose expert is not at home.
    """
    hot_expert = assignment.phy2log_RS[hot, hot_slot]
    expert = assignment.phy2log_RS[rank, slot]
    hot_share = assignment.share_ER[hot_expert, hot]
    share = assignment.share_ER[expert, rank]
    replace(assignment, heat, hot, hot_slot, expert, share)
    replace(assignment, heat, rank, slot, hot_expert, hot_share)
    lay_out(assignment, heat, swaps, hot)
    lay_out(assignment, heat, swaps, rank)
    change: int = np.int64(home_ER[hot_expert, hot]) + np.int64(home_ER[expert, rank])
    change -= np.int64(home_ER[hot_expert, rank]) + np.int64(home_ER[expert, hot])
    return change
