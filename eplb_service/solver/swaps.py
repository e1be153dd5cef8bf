"""Swaps between the hottest rank and all others, judged together: the inner loop of the local search.

One pass lays what each slot would bring out in slot order; then, for each expert of the hottest rank, straight
loops over all slots give the higher risk of the two ranks after the swap. They compile to SIMD, so a candidate
costs a few cycles.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand
from eplb_service.solver.packing import Packing, replace

SCRATCH_ROWS = 7
"""Rows of the working memory that ``best_swap`` needs, each one float32 per physical slot."""


@kernel
def best_swap(
    packing: Packing, demand: Demand, hot: int, z: float, bound: float, scratch: Float32
) -> tuple[int, int, int, float]:
    """The swap between ``hot`` and another rank that leaves the hotter of the two coolest, below ``bound``.

    Returns slot of ``hot``, other rank, its slot and the higher risk after; -1 three times where no swap stays below.
    """
    ranks, slots = packing.phy2log_RS.shape
    size = ranks * slots
    zero, two, infinite = np.float32(0.0), np.float32(2.0), np.float32(np.inf)
    z32 = np.float32(z)
    # Taken one by one, rows are known to be contiguous; unpacked, they are not.
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    weight_P, out_P, risk_P = scratch[4], scratch[5], scratch[6]
    expert_P = packing.phy2log_RS.ravel()
    _lay_out(packing, demand, hot, scratch)
    cross_E = packing.cross_RE[hot]
    lowest = np.float32(bound)
    found_slot, found = -1, -1
    for slot in range(slots):
        out = packing.phy2log_RS[hot, slot]
        weight = packing.share_ER[out, hot]
        mean = weight * demand.mean_E[out]
        own = weight * weight * demand.gram_EE[out, out]
        leaving = own - two * weight * cross_E[out]
        gram_E = demand.gram_EE[out]
        p = 0
        for r in range(ranks):
            arriving = infinite if packing.holds_ER[out, r] else own + two * weight * packing.cross_RE[r, out]
            for _ in range(slots):
                out_P[p] = arriving
                p += 1
        for p in range(size):
            risk_P[p] = weight_P[p] * gram_E[np.uint32(expert_P[p])]
        for p in range(size):
            both = two * weight * risk_P[p]
            here = here_load_P[p] - mean + z32 * np.sqrt(max(here_var_P[p] + leaving - both, zero))
            there = there_load_P[p] + mean + z32 * np.sqrt(max(there_var_P[p] + out_P[p] - both, zero))
            risk_P[p] = max(here, there)
        coolest = infinite
        for p in range(size):
            coolest = min(coolest, risk_P[p])
        if coolest < lowest:
            lowest, found_slot = coolest, slot
            for p in range(size):
                if risk_P[p] == coolest:
                    found = p
                    break
    if found < 0:
        return -1, -1, -1, bound
    return found_slot, found // slots, found % slots, lowest


@kernel
def _lay_out(packing: Packing, demand: Demand, hot: int, scratch: Float32) -> None:
    """What swapping each slot's expert in does to both ranks, whatever goes out for it; infinite where it may not."""
    ranks, slots = packing.phy2log_RS.shape
    two, infinite = np.float32(2.0), np.float32(np.inf)
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    weight_P = scratch[4]
    cross_E = packing.cross_RE[hot]
    load, variance = packing.load_R[hot], packing.variance_R[hot]
    p = 0
    for r in range(ranks):
        other_load, other_variance, other_E = packing.load_R[r], packing.variance_R[r], packing.cross_RE[r]
        for s in range(slots):
            come = np.uint32(packing.phy2log_RS[r, s])
            weight = packing.share_ER[come, r]
            mean = weight * demand.mean_E[come]
            own = weight * weight * demand.gram_EE[come, come]
            weight_P[p] = weight
            here_load_P[p] = infinite if packing.holds_ER[come, hot] else load + mean
            there_load_P[p] = other_load - mean
            here_var_P[p] = variance + own + two * weight * cross_E[come]
            there_var_P[p] = other_variance + own - two * weight * other_E[come]
            p += 1


@kernel
def swap(packing: Packing, demand: Demand, home_ER: Bool, hot: int, slot: int, rank: int, other: int) -> int:
    """Swap the experts of two slots, shares and all; returns by how many more slots the placement differs from home."""
    out = packing.phy2log_RS[hot, slot]
    come = packing.phy2log_RS[rank, other]
    out_share, come_share = packing.share_ER[out, hot], packing.share_ER[come, rank]
    replace(packing, demand, hot, slot, come, come_share)
    replace(packing, demand, rank, other, out, out_share)
    left = int(home_ER[out, hot]) + int(home_ER[come, rank])
    return left - int(home_ER[out, rank]) - int(home_ER[come, hot])
