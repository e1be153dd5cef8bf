"""Tables (log2phy): the replica that each source's tokens of each expert go to, solved with the placement.

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

from eplb_core.solver.construction import (
    Assignment,
    assignment_of,
    descending,
    largest_first,
    shift_load,
)
from eplb_core.solver.evaluation import (
    MIN_GAIN,
    expert_heat,
    hottest_of,
    mean_of_max,
    risk,
    smooth_max_of,
)
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Episodes, Float32, Heat, Int32
from eplb_core.solver.swaps import MIN_RELIEF, best_swap, swap, swaps_of


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


def fixed_rule(first_E1: Int32, slot_P: Int32, sources: int, width: int = 1) -> Int32:
    """Source ``g`` uses replica ``g % k`` of an expert with ``k`` replicas, int32 ``[G, E]``.

    Where each ``width`` sources are the entries of one dealing table, entry ``i`` of table ``g`` is replica
    ``(g + i) % k``.
    """
    return np.ascontiguousarray(_rule_by_expert(first_E1, slot_P, sources, width).T)


@kernel
def _rule_by_expert(first_E1: Int32, slot_P: Int32, sources: int, width: int) -> Int32:
    """``fixed_rule`` with an expert's sources in a row, int32 ``[E, G]``: rows are written in one go."""
    experts = first_E1.shape[0] - 1
    chosen_EG = np.empty((experts, sources), dtype=np.int32)
    for e in range(experts):
        chosen_G = chosen_EG[e]
        first, replicas = first_E1[e], first_E1[e + 1] - first_E1[e]
        begin = 0
        for g in range(0, sources, width):
            at = begin
            for v in range(g, g + width):
                chosen_G[v] = slot_P[first + at]
                at = at + 1 if at + 1 < replicas else 0
            begin = begin + 1 if begin + 1 < replicas else 0
    return chosen_EG


@kernel
def slot_shares(phy2log_RS: Int32, chosen_GE: Int32, share_GE: Float32) -> Float32:
    """Part of its expert's tokens that each slot receives through tables, float32 ``[R, S]``."""
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    share_P = share_RS.ravel()
    for g in range(chosen_GE.shape[0]):
        for e in range(chosen_GE.shape[1]):
            share_P[chosen_GE[g, e]] += share_GE[g, e]
    return share_RS


def tables_par(phy2log_RS: Int32, chosen_GE: Int32, heat: Episodes, share_GE: Float32) -> float:
    """Peak-to-average ratio that tables int32 ``[G, E]`` realise; ``share_GE`` as for ``slot_shares``."""
    return mean_of_max(heat.scaled_EN, heat.share_N, phy2log_RS, slot_shares(phy2log_RS, chosen_GE, share_GE))


def solve_tables(phy2log_RS: Int32, heat: Heat, share_GE: Float32, z: float) -> tuple[Int32, float]:
    """Choose each source's replicas; never worse on these episodes than the engines' rule ``source % replicas``."""
    sources, experts = share_GE.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    chosen_EG = _rule_by_expert(first_E1, slot_P, sources, 1)
    rule_GE = np.ascontiguousarray(chosen_EG.T)
    rule_par = tables_par(phy2log_RS, rule_GE, heat.episodes, share_GE)
    share_EG = np.ascontiguousarray(share_GE.T)
    order_E, order_EG = descending(expert_heat(heat, z)), np.zeros_like(chosen_EG)
    shared_X = np.flatnonzero(np.diff(first_E1) > 1)
    order_EG[shared_X] = largest_first(share_EG[shared_X])
    assignment = _spread_parts(phy2log_RS, chosen_EG, first_E1, slot_P, heat, share_EG, order_E, order_EG, z)
    cool(assignment, chosen_EG, first_E1, slot_P, heat, share_EG, z)
    chosen_GE = np.ascontiguousarray(chosen_EG.T)
    chosen_par = tables_par(phy2log_RS, chosen_GE, heat.episodes, share_GE)
    if chosen_par < rule_par:
        return chosen_GE, chosen_par
    return rule_GE, rule_par


@kernel
def _spread_parts(
    phy2log_RS: Int32,
    chosen_EG: Int32,
    first_E1: Int32,
    slot_P: Int32,
    heat: Heat,
    share_EG: Float32,
    order_E: Int32,
    order_EG: Int32,
    z: float,
) -> Assignment:
    """Hottest expert first, its largest part first, each to the replica whose rank stays coolest.

    These orders are ``order_E`` int32 ``[E]`` and, of experts with several replicas, ``order_EG`` int32 ``[E, G]``.
    Parts without tokens stay where they are. One expert at a time: its parts change the loads of the few ranks that
    hold it only in one direction, so a part costs a few operations whatever the number of experts.
    """
    slots = phy2log_RS.shape[1]
    experts = share_EG.shape[0]
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    for e in range(experts):
        if first_E1[e] + 1 == first_E1[e + 1]:
            only = slot_P[first_E1[e]]
            share_RS[only // slots, only % slots] = 1.0
    assignment = assignment_of(phy2log_RS, share_RS, heat)
    load_K, variance_K, cross_K = _room(first_E1), _room(first_E1), _room(first_E1)
    added_K, found_K = _room(first_E1), _room(first_E1)
    for e in order_E:
        slot_K = slot_P[first_E1[e] : first_E1[e + 1]]
        if slot_K.shape[0] == 1:
            continue
        _look_up(assignment, e, slot_K, load_K, variance_K, cross_K)
        for k in range(slot_K.shape[0]):
            added_K[k] = 0
        mean, own = heat.mean_E[e], heat.gram_EE[e, e]
        for g in order_EG[e]:
            share = share_EG[e, g]
            if share <= 0:
                break
            for k in range(slot_K.shape[0]):
                more = added_K[k] + share
                variance = variance_K[k] + more * (np.float32(2.0) * cross_K[k] + more * own)
                found_K[k] = risk(load_K[k] + more * mean, variance, z)
            coolest = 0
            for k in range(1, slot_K.shape[0]):
                if found_K[k] < found_K[coolest]:
                    coolest = k
            chosen_EG[e, g] = slot_K[coolest]
            added_K[coolest] += share
        for k in range(slot_K.shape[0]):
            shift_load(assignment, heat, e, slot_K[k] // slots, added_K[k])
    return assignment


@kernel
def cool(
    assignment: Assignment,
    chosen_EG: Int32,
    first_E1: Int32,
    slot_P: Int32,
    heat: Heat,
    share_EG: Float32,
    z: float,
) -> None:
    """Move parts off the hottest rank while that leaves both ranks touched cooler than it was.

    For the arguments see ``model``.
    """
    ranks, slots = assignment.phy2log_RS.shape
    risk_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        risk_R[r] = risk(assignment.load_R[r], assignment.variance_R[r], z)
    load_K, variance_K, cross_K = _room(first_E1), _room(first_E1), _room(first_E1)
    here_G, infinite, z32 = np.empty(share_EG.shape[1], dtype=np.float32), np.float32(np.inf), np.float32(z)
    for _ in range(4 * ranks * slots):
        hot = 0
        for r in range(1, ranks):
            if risk_R[r] > risk_R[hot]:
                hot = r
        lowest = risk_R[hot] - MIN_GAIN
        found_slot, found_g, found_place = -1, -1, -1
        for slot in range(slots):
            e = assignment.phy2log_RS[hot, slot]
            if assignment.replicas_E[e] == 1:
                continue
            own, first, replicas = hot * slots + slot, first_E1[e], first_E1[e + 1] - first_E1[e]
            mean, alone = heat.mean_E[e], heat.gram_EE[e, e]
            load, variance, cross = (
                assignment.load_R[hot],
                assignment.variance_R[hot],
                assignment.cross_RE[hot, e],
            )
            _look_up(assignment, e, slot_P[first : first + replicas], load_K, variance_K, cross_K)
            share_G, chosen_G = share_EG[e], chosen_EG[e]
            for g in range(share_G.shape[0]):
                share = share_G[g]
                left = variance - share * (np.float32(2.0) * cross - share * alone)
                here_G[g] = risk(load - share * mean, left, z32)
                # It has to be another's, or no tokens.
                if chosen_G[g] != own or share <= 0:
                    here_G[g] = infinite
            for g in range(share_G.shape[0]):
                here, share = here_G[g], share_G[g]
                if here >= lowest:
                    continue
                for k in range(replicas):
                    more = variance_K[k] + share * (np.float32(2.0) * cross_K[k] + share * alone)
                    after = max(here, risk(load_K[k] + share * mean, more, z))
                    if after < lowest and slot_P[first + k] != own:
                        lowest = after
                        found_slot, found_g, found_place = slot, g, first + k
        if found_slot < 0:
            return
        e = assignment.phy2log_RS[hot, found_slot]
        share, to = share_EG[e, found_g], slot_P[found_place] // slots
        shift_load(assignment, heat, e, hot, -share)
        chosen_EG[e, found_g] = slot_P[found_place]
        shift_load(assignment, heat, e, to, share)
        risk_R[hot] = risk(assignment.load_R[hot], assignment.variance_R[hot], z)
        risk_R[to] = risk(assignment.load_R[to], assignment.variance_R[to], z)


@kernel
def _room(first_E1: Int32) -> Float32:
    """Room for a number for each replica of any expert."""
    most = np.int64(0)
    for e in range(first_E1.shape[0] - 1):
        most = max(most, first_E1[e + 1] - first_E1[e])
    return np.empty(most, dtype=np.float32)


@part
def _look_up(
    assignment: Assignment, expert: int, slot_K: Int32, load_K: Float32, variance_K: Float32, cross_K: Float32
) -> None:
    """Note loads, variances and covariances of the ranks of an expert's replicas: read once for all its parts."""
    for k in range(slot_K.shape[0]):
        rank = slot_K[k] // assignment.phy2log_RS.shape[1]
        load_K[k], variance_K[k] = assignment.load_R[rank], assignment.variance_R[rank]
        cross_K[k] = assignment.cross_RE[rank, expert]


@kernel
def swap_through_tables(
    phy2log_RS: Int32,
    log2phy_GE: Int32,
    heat: Heat,
    share_GE: Float32,
    z: float,
    steps: int,
) -> Int32:
    """Swap the experts of the hottest rank while that takes pressure away; returns the placement, int32 ``[R, S]``.

    Each swap takes pressure away on the scale of the risks before it, so a single one may lift the smooth peak: whoever
    calls judges where it ends by the realised ratio. For the arguments see ``model``.
    """
    slots = phy2log_RS.shape[1]
    assignment = assignment_of(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), heat)
    swaps = swaps_of(assignment, heat)
    nowhere_ER = np.zeros_like(assignment.holds_ER)
    now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    for _ in range(steps):
        hot = hottest_of(now)
        slot, rank, other, _ = best_swap(assignment, heat, now, hot, z, MIN_RELIEF, swaps)
        if slot < 0:
            break
        one, two = assignment.phy2log_RS[hot, slot], assignment.phy2log_RS[rank, other]
        _readdress(log2phy_GE, one, hot * slots + slot, rank * slots + other)
        _readdress(log2phy_GE, two, rank * slots + other, hot * slots + slot)
        swap(assignment, heat, nowhere_ER, swaps, hot, slot, rank, other)
        now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    return assignment.phy2log_RS


@kernel
def rehoused(log2phy_GE: Int32, phy2log_RS: Int32) -> Int32:
    """Tables whose replicas stayed on their ranks, but not in their slots; int32 ``[G, E]``."""
    ranks, slots = phy2log_RS.shape
    sources, experts = log2phy_GE.shape
    slot_RE = np.full((ranks, experts), -1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            slot_RE[r, phy2log_RS[r, s]] = s
    found_GE = np.empty_like(log2phy_GE)
    for g in range(sources):
        for e in range(experts):
            rank = log2phy_GE[g, e] // slots
            found_GE[g, e] = rank * slots + slot_RE[rank, e]
    return found_GE


@part
def _readdress(log2phy_GE: Int32, expert: int, was: int, becomes: int) -> None:
    """Send an expert's tokens that went to one physical slot to another."""
    for g in range(log2phy_GE.shape[0]):
        if log2phy_GE[g, expert] == was:
            log2phy_GE[g, expert] = becomes
