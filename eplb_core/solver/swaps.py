"""Swaps of two experts between the hottest rank and another: laid out slot by slot, judged all at once, carried out.

What a search looks at again and again is kept between its steps, for thousands of slots side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.construction import Assignment, replace
from eplb_core.solver.evaluation import SmoothMax, smooth_term
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Heat

MIN_RELIEF = 1e-3
"""Pressure below which a step is rounding, not progress; the hottest rank's is 1.

In closed loops of 3 layers x 256 experts on 32 ranks x 9 slots (the four kinds of heat of ``make bench-solver``, seeds
1 and 2, two decisions after the first placement) 1e-4 and 1e-2 decide alike; 0.1 realises up to 0.8 % more.
"""


class Swaps(NamedTuple):
    """Every slot as one that the hottest rank may swap with; each array is float32 ``[R*S]`` but the last.

    The first five say what leaves with the slot's expert, and what its rank is then; they change with a rank's slots
    and loads alone, so that of thousands of ranks a search lays out again the two that it has changed.
    """

    share_P: Float32
    mean_P: Float32
    """Mean load that its part of the expert's tokens is."""
    own_P: Float32
    """Variance of that load by itself."""
    left_load_P: Float32
    """The rank's mean load without it."""
    left_variance_P: Float32
    """The variance of that."""
    here_load_P: Float32
    here_variance_P: Float32
    pressure_P: Float32
    out_P: Float32
    found_P: Float32
    held_E: Bool
    """bool ``[E]``; false between two searches."""


@kernel
def swaps_of(assignment: Assignment, heat: Heat) -> Swaps:
    """Lay out all slots."""
    ranks, slots = assignment.phy2log_RS.shape
    rows = np.empty((10, ranks * slots), dtype=np.float32)
    # Taken one by one, rows are known to be contiguous; unpacked, they are not.
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
    """Lay out a rank's slots as they are now."""
    slots, two = assignment.phy2log_RS.shape[1], np.float32(2.0)
    load, variance = assignment.load_R[rank], assignment.variance_R[rank]
    cross_E = assignment.cross_RE[rank]
    for s in range(slots):
        p, come = rank * slots + s, assignment.phy2log_RS[rank, s]
        share = assignment.share_ER[come, rank]
        mean = share * heat.mean_E[come]
        own = share * share * heat.gram_EE[come, come]
        swaps.share_P[p], swaps.mean_P[p], swaps.own_P[p] = share, mean, own
        swaps.left_load_P[p] = load - mean
        swaps.left_variance_P[p] = variance + own - two * share * cross_E[come]


@kernel
def best_swap(
    assignment: Assignment, heat: Heat, now: SmoothMax, hot: int, z: float, bound: float, swaps: Swaps
) -> tuple[int, int, int, float]:
    """The swap between ``hot`` and another rank that takes most pressure away, more than ``bound``.

    For the arguments see ``model``.
    """
    ranks, slots = assignment.phy2log_RS.shape
    size = ranks * slots
    zero, two, infinite = np.float32(0.0), np.float32(2.0), np.float32(np.inf)
    z32, base, scale = np.float32(z), np.float32(now.base), np.float32(now.scale)
    here_load_P, here_variance_P = swaps.here_load_P, swaps.here_variance_P
    left_load_P, left_variance_P = swaps.left_load_P, swaps.left_variance_P
    share_P, pressure_P, out_P, found_P = swaps.share_P, swaps.pressure_P, swaps.out_P, swaps.found_P
    expert_P, cross_E = assignment.phy2log_RS.ravel(), assignment.cross_RE[hot]
    _lay_out_arriving(assignment, now, hot, swaps)
    lowest = np.float32(now.of_R[hot] - bound)
    found_slot, found = -1, -1
    for slot in range(slots):
        out = assignment.phy2log_RS[hot, slot]
        share = assignment.share_ER[out, hot]
        mean = share * heat.mean_E[out]
        own = share * share * heat.gram_EE[out, out]
        leaving = own - two * share * cross_E[out]
        gram_E = heat.gram_EE[out]
        p = 0
        for r in range(ranks):
            arriving = (
                infinite if assignment.holds_ER[out, r] else own + two * share * assignment.cross_RE[r, out]
            )
            for _ in range(slots):
                out_P[p] = arriving
                p += 1
        for p in range(size):
            found_P[p] = share_P[p] * gram_E[np.uint32(expert_P[p])]
        for p in range(size):
            both = two * share * found_P[p]
            here = here_load_P[p] - mean + z32 * np.sqrt(max(here_variance_P[p] + leaving - both, zero))
            there = left_load_P[p] + mean + z32 * np.sqrt(max(left_variance_P[p] + out_P[p] - both, zero))
            found_P[p] = smooth_term(here, base, scale) + smooth_term(there, base, scale) - pressure_P[p]
        least = infinite
        for p in range(size):
            least = min(least, found_P[p])
        if least < lowest:
            lowest, found_slot = least, slot
            for p in range(size):
                if found_P[p] == least:
                    found = p
                    break
    if found < 0:
        return -1, -1, -1, 0.0
    return found_slot, found // slots, found % slots, now.of_R[hot] - lowest


@part
def _lay_out_arriving(assignment: Assignment, now: SmoothMax, hot: int, swaps: Swaps) -> None:
    """Lay out what ``hot`` is with each slot's expert, whatever goes out; infinite where it has that already."""
    ranks, slots = assignment.phy2log_RS.shape
    two, infinite = np.float32(2.0), np.float32(np.inf)
    here_load_P, here_variance_P, pressure_P = swaps.here_load_P, swaps.here_variance_P, swaps.pressure_P
    share_P, mean_P, own_P, held_E = swaps.share_P, swaps.mean_P, swaps.own_P, swaps.held_E
    expert_P, cross_E = assignment.phy2log_RS.ravel(), assignment.cross_RE[hot]
    load, variance = assignment.load_R[hot], assignment.variance_R[hot]
    for s in range(slots):
        held_E[assignment.phy2log_RS[hot, s]] = True
    for p in range(ranks * slots):
        come = np.uint32(expert_P[p])
        here_load_P[p] = infinite if held_E[come] else load + mean_P[p]
        here_variance_P[p] = variance + own_P[p] + two * share_P[p] * cross_E[come]
    for s in range(slots):
        held_E[assignment.phy2log_RS[hot, s]] = False
    p = 0
    for r in range(ranks):
        for _ in range(slots):
            pressure_P[p] = now.of_R[r]
            p += 1


@kernel
def swap(
    assignment: Assignment,
    heat: Heat,
    home_ER: Bool,
    swaps: Swaps,
    hot: int,
    slot: int,
    rank: int,
    other: int,
) -> int:
    """Swap the experts of two slots, shares and all; returns by how many more slots they are away from home.

    For the arguments see ``model``.
    """
    out = assignment.phy2log_RS[hot, slot]
    come = assignment.phy2log_RS[rank, other]
    out_share, come_share = assignment.share_ER[out, hot], assignment.share_ER[come, rank]
    replace(assignment, heat, hot, slot, come, come_share)
    replace(assignment, heat, rank, other, out, out_share)
    lay_out(assignment, heat, swaps, hot)
    lay_out(assignment, heat, swaps, rank)
    more: int = np.int64(home_ER[out, hot]) + np.int64(home_ER[come, rank])
    more -= np.int64(home_ER[out, rank]) + np.int64(home_ER[come, hot])
    return more
