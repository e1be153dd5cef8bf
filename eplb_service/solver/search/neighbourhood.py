"""Swaps of two experts, judged together with all others of a rank.

Swaps between a hot rank and all others are judged together. One pass lays out in slot order what each slot would bring;
then, for each expert of the hot rank, straight loops over all slots give the pressure that the swap leaves on its two
ranks. They compile to SIMD, so a candidate costs a few cycles.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Demand, Float32
from eplb_service.solver.search.construction import Assignment, replace
from eplb_service.solver.search.evaluation import SmoothMax, pressure, risk

SCRATCH_ROWS = 8
"""Rows of the working memory that ``best_swap`` needs, each one float32 per physical slot."""


@kernel
def best_swap(
    assignment: Assignment, demand: Demand, now: SmoothMax, hot: int, z: float, bound: float, scratch: Float32
) -> tuple[int, int, int, float]:
    """The swap between ``hot`` and another rank that takes most pressure away, more than ``bound``.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat.
    now
        The ranks' pressures, on the scale of their risks now.
    hot
        The rank that is to be cooled.
    z
        Weight of the standard deviation.
    bound
        Pressure, in parts of the hottest rank's, that a swap must take away at least.
    scratch
        float32 ``[SCRATCH_ROWS, R*S]``, working memory.

    Returns
    -------
    slot, rank, other, taken
        Slot of ``hot``, the other rank, its slot, and the pressure taken away; -1 three times where none takes
        enough.
    """
    ranks, slots = assignment.phy2log_RS.shape
    size = ranks * slots
    zero, two, infinite = np.float32(0.0), np.float32(2.0), np.float32(np.inf)
    z32, base, scale = np.float32(z), np.float32(now.base), np.float32(now.scale)
    # Taken one by one, rows are known to be contiguous; unpacked, they are not.
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    share_P, pressure_P, out_P, left_P = scratch[4], scratch[5], scratch[6], scratch[7]
    expert_P = assignment.phy2log_RS.ravel()
    _lay_out(assignment, demand, now, hot, scratch)
    cross_E = assignment.cross_RE[hot]
    lowest = np.float32(now.of_R[hot] - bound)
    found_slot, found = -1, -1
    for slot in range(slots):
        out = assignment.phy2log_RS[hot, slot]
        share = assignment.share_ER[out, hot]
        mean = share * demand.mean_E[out]
        own = share * share * demand.gram_EE[out, out]
        leaving = own - two * share * cross_E[out]
        gram_E = demand.gram_EE[out]
        p = 0
        for r in range(ranks):
            arriving = (
                infinite if assignment.holds_ER[out, r] else own + two * share * assignment.cross_RE[r, out]
            )
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


@part
def _lay_out(assignment: Assignment, demand: Demand, now: SmoothMax, hot: int, scratch: Float32) -> None:
    """What swapping each slot's expert in does to both ranks, whatever goes out for it; infinite where it may not."""
    ranks, slots = assignment.phy2log_RS.shape
    two, infinite = np.float32(2.0), np.float32(np.inf)
    here_load_P, there_load_P, here_var_P, there_var_P = scratch[0], scratch[1], scratch[2], scratch[3]
    share_P, pressure_P = scratch[4], scratch[5]
    cross_E = assignment.cross_RE[hot]
    load, variance = assignment.load_R[hot], assignment.variance_R[hot]
    p = 0
    for r in range(ranks):
        other_load, other_variance, other_E = (
            assignment.load_R[r],
            assignment.variance_R[r],
            assignment.cross_RE[r],
        )
        for s in range(slots):
            come = np.uint32(assignment.phy2log_RS[r, s])
            share = assignment.share_ER[come, r]
            mean = share * demand.mean_E[come]
            own = share * share * demand.gram_EE[come, come]
            share_P[p] = share
            pressure_P[p] = now.of_R[r]
            here_load_P[p] = infinite if assignment.holds_ER[come, hot] else load + mean
            there_load_P[p] = other_load - mean
            here_var_P[p] = variance + own + two * share * cross_E[come]
            there_var_P[p] = other_variance + own - two * share * other_E[come]
            p += 1


@kernel
def swap(
    assignment: Assignment, demand: Demand, home_ER: Bool, hot: int, slot: int, rank: int, other: int
) -> int:
    """Swap the experts of two slots, shares and all; returns by how many more slots they are away from home.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat; the placement changes in place.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement.
    hot, slot
        One rank, and its slot.
    rank, other
        The other rank, and its slot.
    """
    out = assignment.phy2log_RS[hot, slot]
    come = assignment.phy2log_RS[rank, other]
    out_share, come_share = assignment.share_ER[out, hot], assignment.share_ER[come, rank]
    replace(assignment, demand, hot, slot, come, come_share)
    replace(assignment, demand, rank, other, out, out_share)
    more: int = np.int64(home_ER[out, hot]) + np.int64(home_ER[come, rank])
    more -= np.int64(home_ER[out, rank]) + np.int64(home_ER[come, hot])
    return more


@part
def risk_of_both(
    assignment: Assignment, demand: Demand, rank: int, a: int, u: float, b: int, v: float, z: float
) -> float:
    """Risk of a rank once it receives ``u`` more of expert ``a``'s tokens and ``v`` more of ``b``'s.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat.
    rank
        Whose risk it is.
    a, u
        An expert, and the part of its tokens that comes; negative where it goes.
    b, v
        The other one, and its part.
    z
        Weight of the standard deviation.
    """
    two = np.float32(2.0)
    load = assignment.load_R[rank] + u * demand.mean_E[a] + v * demand.mean_E[b]
    variance = assignment.variance_R[rank] + u * u * demand.gram_EE[a, a] + v * v * demand.gram_EE[b, b]
    variance += two * (
        u * v * demand.gram_EE[a, b] + u * assignment.cross_RE[rank, a] + v * assignment.cross_RE[rank, b]
    )
    return risk(load, variance, z)
