"""Swaps between a hot rank and all others, judged together: the inner loop of the local search.

One pass lays what each slot would bring out in slot order; then, for each expert of the hot rank, straight loops
over all slots give the pressure that the swap leaves on its two ranks. They compile to SIMD, so a candidate costs a
few cycles.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand
from eplb_service.solver.packing import Packing, replace
from eplb_service.solver.pressure import Pressure, pressure

SCRATCH_ROWS = 8
"""Rows of the working memory that ``best_swap`` needs, each one float32 per physical slot."""


@kernel
def best_swap(
    packing: Packing, demand: Demand, now: Pressure, hot: int, z: float, bound: float, scratch: Float32
) -> tuple[int, int, int, float]:
    """The swap between ``hot`` and another rank that takes most pressure away, more than ``bound``.

    Returns slot of ``hot``, other rank, its slot and the pressure taken away; -1 three times where none takes enough.
    """
    ranks, slots = packing.phy2log_RS.shape
    size = ranks * slots
    zero, two, infinite = np.float32(0.0), np.float32(2.0), np.float32(np.inf)
    z32, base, scale = np.float32(z), np.float32(now.base), np.float32(now.scale)
    # Taken one by one, rows are known to be contiguous; unpacked, they are not.
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    share_P, pressure_P, out_P, left_P = scratch[4], scratch[5], scratch[6], scratch[7]
    expert_P = packing.phy2log_RS.ravel()
    _lay_out(packing, demand, now, hot, scratch)
    cross_E = packing.cross_RE[hot]
    lowest = np.float32(now.of_R[hot] - bound)
    found_slot, found = -1, -1
    for slot in range(slots):
        out = packing.phy2log_RS[hot, slot]
        share = packing.share_ER[out, hot]
        mean = share * demand.mean_E[out]
        own = share * share * demand.gram_EE[out, out]
        leaving = own - two * share * cross_E[out]
        gram_E = demand.gram_EE[out]
        p = 0
        for r in range(ranks):
            arriving = infinite if packing.holds_ER[out, r] else own + two * share * packing.cross_RE[r, out]
            for _ in range(slots):
                out_P[p] = arriving
                p += 1
        for p in range(size):
            left_P[p] = share_P[p] * gram_E[np.uint32(expert_P[p])]
        for p in range(size):
            both = two * share * left_P[p]
            here = here_load_P[p] - mean + z32 * np.sqrt(max(here_var_P[p] + leaving - both, zero))
            there = there_load_P[p] + mean + z32 * np.sqrt(max(there_var_P[p] + out_P[p] - both, zero))
            left_P[p] = pressure(here, base, scale) + pressure(there, base, scale) - pressure_P[p]
        least = infinite
        for p in range(size):
            least = min(least, left_P[p])
        if least < lowest:
            lowest, found_slot = least, slot
            for p in range(size):
                if left_P[p] == least:
                    found = p
                    break
    if found < 0:
        return -1, -1, -1, 0.0
    return found_slot, found // slots, found % slots, now.of_R[hot] - lowest


@kernel
def _lay_out(packing: Packing, demand: Demand, now: Pressure, hot: int, scratch: Float32) -> None:
    """What swapping each slot's expert in does to both ranks, whatever goes out for it; infinite where it may not."""
    ranks, slots = packing.phy2log_RS.shape
    two, infinite = np.float32(2.0), np.float32(np.inf)
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    share_P, pressure_P = scratch[4], scratch[5]
    cross_E = packing.cross_RE[hot]
    load, variance = packing.load_R[hot], packing.variance_R[hot]
    p = 0
    for r in range(ranks):
        other_load, other_variance, other_E = packing.load_R[r], packing.variance_R[r], packing.cross_RE[r]
        for s in range(slots):
            come = np.uint32(packing.phy2log_RS[r, s])
            share = packing.share_ER[come, r]
            mean = share * demand.mean_E[come]
            own = share * share * demand.gram_EE[come, come]
            share_P[p] = share
            pressure_P[p] = now.of_R[r]
            here_load_P[p] = infinite if packing.holds_ER[come, hot] else load + mean
            there_load_P[p] = other_load - mean
            here_var_P[p] = variance + own + two * share * cross_E[come]
            there_var_P[p] = other_variance + own - two * share * other_E[come]
            p += 1


@kernel
def swap(packing: Packing, demand: Demand, home_ER: Bool, hot: int, slot: int, rank: int, other: int) -> int:
    """Swap the experts of two slots, shares and all; returns by how many more slots they are away from home."""
    out = packing.phy2log_RS[hot, slot]
    come = packing.phy2log_RS[rank, other]
    out_share, come_share = packing.share_ER[out, hot], packing.share_ER[come, rank]
    replace(packing, demand, hot, slot, come, come_share)
    replace(packing, demand, rank, other, out, out_share)
    left = int(home_ER[out, hot]) + int(home_ER[come, rank])
    return left - int(home_ER[out, rank]) - int(home_ER[come, hot])
