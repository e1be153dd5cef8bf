"""Which replica each source's tokens of each expert go to: log2phy as part of the solution.

Engines let source ``g`` use replica ``g % replicas``. An expert's tokens arrive unevenly from the source ranks, so this
fixed rule splits them unevenly. Here each part (one source, one expert) goes to the replica whose rank stays coolest,
largest parts first (Graham's LPT again), and is moved on while that cools the hottest rank. Last, experts are swapped
between ranks, each with its sources (``table_swaps``): 32 sources cannot split an expert evenly over ten replicas, and
the placement's last touch is at the shares that the tables really give. G sources: ranks that see the same tokens are
one, and share one table.

References
----------
R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969 (LPT).
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Demand, Float32, Int32
from eplb_service.solver.search.construction import (
    Assignment,
    assignment_of,
    descending,
    hottest_rank,
    shift_load,
)
from eplb_service.solver.search.evaluation import (
    SMALLEST_GAIN,
    expert_heat,
    mean_of_max,
    risk,
)


@kernel
def slots_by_expert(phy2log_RS: Int32, experts: int) -> tuple[Int32, Int32]:
    """Physical ids in order of expert: those of expert ``e`` are ``slot_P[first_E1[e]:first_E1[e + 1]]``."""
    expert_P = phy2log_RS.ravel()
    first_E1 = np.zeros(experts + 1, dtype=np.int32)
    for expert in expert_P:
        first_E1[expert + 1] += 1
    for e in range(experts):
        first_E1[e + 1] += first_E1[e]
    next_E = first_E1[:-1].copy()
    slot_P = np.empty(expert_P.shape[0], dtype=np.int32)
    for p in range(expert_P.shape[0]):
        slot_P[next_E[expert_P[p]]] = p
        next_E[expert_P[p]] += 1
    return first_E1, slot_P


@kernel
def fixed_rule(first_E1: Int32, slot_P: Int32, sources: int, width: int = 1) -> Int32:
    """Source ``g`` uses replica ``g % k`` of an expert with ``k`` replicas, int32 ``[G, E]``.

    Where each ``width`` sources are the entries of one dealing table, entry ``i`` of table ``g`` is replica
    ``(g + i) % k``.
    """
    experts = first_E1.shape[0] - 1
    chosen_GE = np.empty((sources, experts), dtype=np.int32)
    for e in range(experts):
        first, replicas = first_E1[e], first_E1[e + 1] - first_E1[e]
        begin = 0
        for g in range(0, sources, width):
            at = begin
            for v in range(g, g + width):
                chosen_GE[v, e] = slot_P[first + at]
                at = at + 1 if at + 1 < replicas else 0
            begin = begin + 1 if begin + 1 < replicas else 0
    return chosen_GE


@kernel
def slot_shares(phy2log_RS: Int32, chosen_GE: Int32, share_GE: Float32) -> Float32:
    """Part of its expert's tokens that each slot receives through tables, float32 ``[R, S]``."""
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    share_P = share_RS.ravel()
    for g in range(chosen_GE.shape[0]):
        for e in range(chosen_GE.shape[1]):
            share_P[chosen_GE[g, e]] += share_GE[g, e]
    return share_RS


@kernel
def tables_par(
    phy2log_RS: Int32, chosen_GE: Int32, scaled_EN: Float32, share_N: Float32, share_GE: Float32
) -> float:
    """Peak-to-average ratio that tables realise.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    chosen_GE
        int32 ``[G, E]``, the physical id that each source's tokens of each expert go to.
    scaled_EN, share_N
        float32 ``[E, N]`` the experts' heat, and ``[N]`` the episodes' weights.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    """
    return mean_of_max(scaled_EN, share_N, phy2log_RS, slot_shares(phy2log_RS, chosen_GE, share_GE))


def solve_tables(
    phy2log_RS: Int32, demand: Demand, scaled_EN: Float32, share_N: Float32, share_GE: Float32, z: float
) -> tuple[Int32, float]:
    """Choose each source's replicas; never worse on these episodes than the engines' rule ``source % replicas``.

    Parameters
    ----------
    phy2log_RS, demand, scaled_EN, share_N
        A complete placement and its layer's heat.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source; each column sums to 1.
    z
        Weight of the standard deviation.

    Returns
    -------
    chosen_GE, chosen_par
        int32 ``[G, E]``, physical ids, and the peak-to-average ratio that they realise.
    """
    sources, experts = share_GE.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    rule_GE = fixed_rule(first_E1, slot_P, sources, 1)
    rule_par = tables_par(phy2log_RS, rule_GE, scaled_EN, share_N, share_GE)
    chosen_GE = rule_GE.copy()
    assignment = spread_parts(phy2log_RS, chosen_GE, first_E1, slot_P, demand, share_GE, z)
    cool(assignment, chosen_GE, first_E1, slot_P, demand, share_GE, z)
    chosen_par = tables_par(phy2log_RS, chosen_GE, scaled_EN, share_N, share_GE)
    if chosen_par < rule_par:
        return chosen_GE, chosen_par
    return rule_GE, rule_par


@kernel
def spread_parts(
    phy2log_RS: Int32,
    chosen_GE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
) -> Assignment:
    """Hottest expert first, its largest part first, each to the replica whose rank stays coolest.

    Parts without tokens stay where they are. One expert at a time: its parts change the loads of the few ranks that
    hold it only in one direction, so a part costs a few operations whatever the number of experts.

    Parameters
    ----------
    phy2log_RS, demand
        A complete placement and its layer's heat.
    chosen_GE
        int32 ``[G, E]``, the physical id that each source's tokens of each expert go to; changes in place.
    first_E1, slot_P
        Where each expert's replicas are, see ``slots_by_expert``.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    z
        Weight of the standard deviation.
    """
    slots = phy2log_RS.shape[1]
    experts = share_GE.shape[1]
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    for e in range(experts):
        if first_E1[e] + 1 == first_E1[e + 1]:
            only = slot_P[first_E1[e]]
            share_RS[only // slots, only % slots] = 1.0
    assignment = assignment_of(phy2log_RS, share_RS, demand)
    added_R = np.zeros(phy2log_RS.shape[0], dtype=np.float32)
    for e in descending(expert_heat(demand, z)):
        first, after = first_E1[e], first_E1[e + 1]
        if first + 1 == after:
            continue
        for place in range(first, after):
            added_R[slot_P[place] // slots] = 0
        for g in descending(share_GE[:, e].copy()):
            share = share_GE[g, e]
            if share <= 0:
                break
            lowest = np.inf
            for place in range(first, after):
                rank = slot_P[place] // slots
                found = risk_with(assignment, demand, e, rank, added_R[rank] + share, z)
                if found < lowest:
                    lowest = found
                    chosen_GE[g, e] = slot_P[place]
            added_R[chosen_GE[g, e] // slots] += share
        for place in range(first, after):
            rank = slot_P[place] // slots
            shift_load(assignment, demand, e, rank, added_R[rank])
    return assignment


@kernel
def risk_with(
    assignment: Assignment, demand: Demand, expert: int, rank: int, share: float, z: float
) -> float:
    """Risk of a rank once it carries ``share`` more of an expert's tokens.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat.
    expert, rank
        The expert, and the rank that carries more of it.
    share
        Part of the expert's tokens; negative where it carries less.
    z
        Weight of the standard deviation.
    """
    load = assignment.load_R[rank] + share * demand.mean_E[expert]
    variance = assignment.variance_R[rank] + share * (
        np.float32(2.0) * assignment.cross_RE[rank, expert] + share * demand.gram_EE[expert, expert]
    )
    return risk(load, variance, z)


@kernel
def cool(
    assignment: Assignment,
    chosen_GE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
) -> None:
    """Move parts off the hottest rank while that leaves both ranks touched cooler than it was.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat; the placement changes in place.
    chosen_GE
        int32 ``[G, E]``, the physical id that each source's tokens of each expert go to; changes in place.
    first_E1, slot_P
        Where each expert's replicas are, see ``slots_by_expert``.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    z
        Weight of the standard deviation.
    """
    ranks, slots = assignment.phy2log_RS.shape
    for _ in range(4 * ranks * slots):
        hot, hottest = hottest_rank(assignment, z)
        lowest = hottest - SMALLEST_GAIN
        found_slot, found_g, found_place = -1, -1, -1
        for slot in range(slots):
            e = assignment.phy2log_RS[hot, slot]
            if assignment.replicas_E[e] == 1:
                continue
            own = hot * slots + slot
            for g in range(share_GE.shape[0]):
                share = share_GE[g, e]
                if chosen_GE[g, e] != own or share <= 0:
                    continue
                here = risk_with(assignment, demand, e, hot, -share, z)
                for place in range(first_E1[e], first_E1[e + 1]):
                    if slot_P[place] == own:
                        continue
                    after = max(here, risk_with(assignment, demand, e, slot_P[place] // slots, share, z))
                    if after < lowest:
                        lowest = after
                        found_slot, found_g, found_place = slot, g, place
        if found_slot < 0:
            return
        e = assignment.phy2log_RS[hot, found_slot]
        share = share_GE[found_g, e]
        shift_load(assignment, demand, e, hot, -share)
        chosen_GE[found_g, e] = slot_P[found_place]
        shift_load(assignment, demand, e, slot_P[found_place] // slots, share)
