"""Tables (``log2phy``): the replica that each source uses for each expert.

Engines use a fixed rule: source ``g`` sends to replica ``g % replicas``. The sources contribute unevenly to an expert's
tokens, so the fixed rule splits the tokens unevenly. This module solves the tables together with the placement:

1. Each source's share of each expert's tokens is assigned to the replica whose rank stays coolest, largest shares first
   (Graham's LPT).
2. Individual shares are moved off the hottest rank as long as this cools it (``cool``).
3. Experts are swapped between ranks together with their sources (``swap_through_tables``). For example, 32 sources
   cannot split an expert evenly over ten replicas, so the placement is adjusted to the split that the tables achieve.

The G sources are groups of ranks: ranks that see the same tokens form one source and share one table.

References
----------
R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969 (LPT).
"""

from __future__ import annotations

from typing import NamedTuple

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


class TablesByExpert(NamedTuple):
    """Tables stored by expert, with each expert's entries contiguous, and the slots of each expert."""

    chosen_EG: Int32
    """int32 ``[E, G]``, physical id to which each source sends its tokens of each expert, updated in place."""
    share_EG: Float32
    """float32 ``[E, G]``, fraction of each expert's tokens that comes from each source."""
    first_E1: Int32
    """int32 ``[E + 1]``, as returned by ``slots_by_expert``."""
    slot_P: Int32
    """int32 ``[P]``, as returned by ``slots_by_expert``."""


@kernel
def slots_by_expert(phy2log_RS: Int32, experts: int) -> tuple[Int32, Int32]:
    """Group the physical slots by expert.

    Returns
    -------
    first_E1 : Int32
        ``[E + 1]``, start of each expert's slots in ``slot_P``.
    slot_P : Int32
        ``[P]``, physical ids. The slots of expert ``e`` are ``slot_P[first_E1[e]:first_E1[e + 1]]``.

    Examples
    --------
    Expert 0 is in slots 0 and 2:

    >>> slots_by_expert(np.array([[0, 1], [0, 2]], dtype=np.int32), 3)
    (array([0, 2, 3, 4], dtype=int32), array([0, 2, 1, 3], dtype=int32))
    """
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
    """Return the tables of the engines' fixed rule.

    Parameters
    ----------
    first_E1
        int32 ``[E + 1]``, as returned by ``slots_by_expert``.
    slot_P
        int32 ``[P]``, as returned by ``slots_by_expert``.
    sources
        Number of sources, G.
    width
        Number of dealing-table entries per expert. Each group of ``width`` sources represents the entries of one table.

    Returns
    -------
    Int32
        int32 ``[G, E]``. Source ``g`` uses replica ``g % k`` of an expert with ``k`` replicas. In dealing tables, entry
        ``i`` of table ``g`` is replica ``(g + i) % k``.

    Examples
    --------
    Four sources alternate between the two replicas of expert 0:

    >>> first_E1, slot_P = slots_by_expert(np.array([[0, 1], [0, 2]], dtype=np.int32), 3)
    >>> fixed_rule(first_E1, slot_P, sources=4)
    array([[0, 1, 3],
           [2, 1, 3],
           [0, 1, 3],
           [2, 1, 3]], dtype=int32)
    """
    return np.ascontiguousarray(_rule_by_expert(first_E1, slot_P, sources, width).T)


@kernel
def _rule_by_expert(first_E1: Int32, slot_P: Int32, sources: int, width: int) -> Int32:
    """Return the result of ``fixed_rule``, transposed to ``[E, G]`` so that each expert's entries are contiguous."""
    experts = first_E1.shape[0] - 1
    chosen_EG = np.empty((experts, sources), dtype=np.int32)
    for e in range(experts):
        chosen_G = chosen_EG[e]
        first = first_E1[e]
        replicas = first_E1[e + 1] - first_E1[e]
        # Counters that wrap around are cheaper than a division per entry.
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
    """Return the fraction of its expert's tokens that each slot receives through the tables, float32 ``[R, S]``.

    Examples
    --------
    Source 0 sends its three quarters of expert 0's tokens to slot 0, and source 1 sends the rest to slot 2:

    >>> phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    >>> chosen_GE = np.array([[0, 1, 3], [2, 1, 3]], dtype=np.int32)
    >>> share_GE = np.array([[0.75, 0.5, 0.5], [0.25, 0.5, 0.5]], dtype=np.float32)
    >>> slot_shares(phy2log_RS, chosen_GE, share_GE)
    array([[0.75, 1.  ],
           [0.25, 1.  ]], dtype=float32)
    """
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    share_P = share_RS.ravel()
    for g in range(chosen_GE.shape[0]):
        for e in range(chosen_GE.shape[1]):
            share_P[chosen_GE[g, e]] += share_GE[g, e]
    return share_RS


def tables_par(phy2log_RS: Int32, chosen_GE: Int32, heat: Episodes, share_GE: Float32) -> float:
    """Return the peak-to-average ratio (PAR) that the tables ``chosen_GE``, int32 ``[G, E]``, achieve."""
    return mean_of_max(heat.scaled_EN, heat.share_N, phy2log_RS, slot_shares(phy2log_RS, chosen_GE, share_GE))


def solve_tables(phy2log_RS: Int32, heat: Heat, share_GE: Float32, z: float) -> tuple[Int32, float]:
    """Choose a replica for each source and expert.

    Falls back to the fixed rule if its PAR on these episodes is at least as good.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement.
    heat
        Heat of the layer.
    share_GE
        float32 ``[G, E]``, each source's share of each expert's tokens.
    z
        Weight of the standard deviation in a rank's risk.

    Returns
    -------
    tuple of Int32 and float
        Tables ``[G, E]``, and their PAR.
    """
    sources, experts = share_GE.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    chosen_EG = _rule_by_expert(first_E1, slot_P, sources, 1)
    rule_GE = np.ascontiguousarray(chosen_EG.T)
    rule_par = tables_par(phy2log_RS, rule_GE, heat.episodes, share_GE)
    share_EG = np.ascontiguousarray(share_GE.T)
    order_E = descending(expert_heat(heat, z))
    order_EG = np.zeros_like(chosen_EG)
    replicated_X = np.flatnonzero(np.diff(first_E1) > 1)
    order_EG[replicated_X] = largest_first(share_EG[replicated_X])
    tables = TablesByExpert(chosen_EG, share_EG, first_E1, slot_P)
    cool(_assign_shares(phy2log_RS, tables, heat, order_E, order_EG, z), tables, heat, z)
    chosen_GE = np.ascontiguousarray(chosen_EG.T)
    chosen_par = tables_par(phy2log_RS, chosen_GE, heat.episodes, share_GE)
    if chosen_par < rule_par:
        return chosen_GE, chosen_par
    return rule_GE, rule_par


@kernel
def _assign_shares(
    phy2log_RS: Int32, tables: TablesByExpert, heat: Heat, order_E: Int32, order_EG: Int32, z: float
) -> Assignment:
    """Assign each source's share of each expert's tokens to the replica whose rank stays coolest, hottest expert first.

    Only the few ranks that hold the current expert change, and their loads only grow. The time per share is therefore
    independent of the number of experts.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement.
    tables
        Tables, changed in place. Entries of sources without tokens are left unchanged.
    heat
        Heat of the layer.
    order_E
        int32 ``[E]``, experts, hottest first.
    order_EG
        int32 ``[E, G]``, sources of each expert, largest share first. Only rows of replicated experts are read.
    z
        Weight of the standard deviation in a rank's risk.

    Returns
    -------
    Assignment
        The placement with its loads under the tables.
    """
    chosen_EG, share_EG, first_E1, slot_P = tables
    slots = phy2log_RS.shape[1]
    experts = share_EG.shape[0]
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    for e in range(experts):
        if first_E1[e] + 1 == first_E1[e + 1]:
            only_slot = slot_P[first_E1[e]]
            share_RS[only_slot // slots, only_slot % slots] = 1.0
    assignment = assignment_of(phy2log_RS, share_RS, heat)
    load_K, variance_K, cross_K = _ranks_of_replicas(first_E1)
    added_K = _replica_scratch(first_E1)
    risk_K = _replica_scratch(first_E1)
    for e in order_E:
        slot_K = slot_P[first_E1[e] : first_E1[e + 1]]
        if slot_K.shape[0] == 1:
            continue
        _look_up(assignment, e, slot_K, load_K, variance_K, cross_K)
        for k in range(slot_K.shape[0]):
            added_K[k] = 0
        mean = heat.mean_E[e]
        expert_variance = heat.gram_EE[e, e]
        for g in order_EG[e]:
            share = share_EG[e, g]
            if share <= 0:
                break
            for k in range(slot_K.shape[0]):
                added = added_K[k] + share
                variance = variance_K[k] + added * (np.float32(2.0) * cross_K[k] + added * expert_variance)
                risk_K[k] = risk(load_K[k] + added * mean, variance, z)
            coolest = 0
            for k in range(1, slot_K.shape[0]):
                if risk_K[k] < risk_K[coolest]:
                    coolest = k
            chosen_EG[e, g] = slot_K[coolest]
            added_K[coolest] += share
        for k in range(slot_K.shape[0]):
            shift_load(assignment, heat, e, slot_K[k] // slots, added_K[k])
    return assignment


@kernel
def cool(assignment: Assignment, tables: TablesByExpert, heat: Heat, z: float) -> None:
    """Move shares off the hottest rank as long as both ranks involved end up cooler than the hottest rank was.

    Each step makes the move that minimises the risk of the hotter of the two ranks.

    Parameters
    ----------
    assignment
        Placement with its loads, changed in place.
    tables
        Tables, changed in place.
    heat
        Heat of the layer.
    z
        Weight of the standard deviation in a rank's risk.
    """
    ranks, slots = assignment.phy2log_RS.shape
    risk_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        risk_R[r] = risk(assignment.load_R[r], assignment.variance_R[r], z)
    ranks_K = _ranks_of_replicas(tables.first_E1)
    hot_risk_G = np.empty(tables.share_EG.shape[1], dtype=np.float32)
    for _ in range(4 * ranks * slots):
        hot = 0
        for r in range(1, ranks):
            if risk_R[r] > risk_R[hot]:
                hot = r
        limit = risk_R[hot] - MIN_GAIN
        hot_slot, source, target_slot = _coolest_move(
            assignment, tables, heat, z, hot, limit, ranks_K, hot_risk_G
        )
        if hot_slot < 0:
            return
        e = assignment.phy2log_RS[hot, hot_slot]
        share = tables.share_EG[e, source]
        target_rank = target_slot // slots
        shift_load(assignment, heat, e, hot, -share)
        tables.chosen_EG[e, source] = target_slot
        shift_load(assignment, heat, e, target_rank, share)
        risk_R[hot] = risk(assignment.load_R[hot], assignment.variance_R[hot], z)
        risk_R[target_rank] = risk(assignment.load_R[target_rank], assignment.variance_R[target_rank], z)


@kernel
def _coolest_move(
    assignment: Assignment,
    tables: TablesByExpert,
    heat: Heat,
    z: float,
    hot: int,
    limit: float,
    ranks_K: _RanksOfReplicas,
    hot_risk_G: Float32,
) -> tuple[int, int, int]:
    """Find the move of a share off ``hot`` that minimises the risk of the hotter of the two ranks.

    Parameters
    ----------
    assignment
        Placement with its loads.
    tables
        Tables.
    heat
        Heat of the layer.
    z
        Weight of the standard deviation in a rank's risk.
    hot
        The hottest rank.
    limit
        Upper bound on the risk of both ranks after the move.
    ranks_K
        Scratch memory.
    hot_risk_G
        float32 ``[G]``, scratch memory.

    Returns
    -------
    tuple of int, int and int
        Slot on ``hot``, source, and physical id of the slot that receives the source's tokens. The first is -1 if no
        move stays below ``limit``.
    """
    chosen_EG, share_EG, first_E1, slot_P = tables
    load_K, variance_K, cross_K = ranks_K
    slots = assignment.phy2log_RS.shape[1]
    infinite = np.float32(np.inf)
    z32 = np.float32(z)
    load = assignment.load_R[hot]
    variance = assignment.variance_R[hot]
    lowest = limit
    best = (-1, -1, -1)
    for slot in range(slots):
        e = assignment.phy2log_RS[hot, slot]
        if assignment.replicas_E[e] == 1:
            continue
        hot_slot = hot * slots + slot
        slot_K = slot_P[first_E1[e] : first_E1[e + 1]]
        mean = heat.mean_E[e]
        expert_variance = heat.gram_EE[e, e]
        cross = assignment.cross_RE[hot, e]
        _look_up(assignment, e, slot_K, load_K, variance_K, cross_K)
        share_G = share_EG[e]
        chosen_G = chosen_EG[e]
        for g in range(share_G.shape[0]):
            share = share_G[g]
            hot_variance = variance - share * (np.float32(2.0) * cross - share * expert_variance)
            hot_risk_G[g] = risk(load - share * mean, hot_variance, z32)
            # Skip sources that do not use this slot or have no tokens.
            if chosen_G[g] != hot_slot or share <= 0:
                hot_risk_G[g] = infinite
        for g in range(share_G.shape[0]):
            hot_risk = hot_risk_G[g]
            share = share_G[g]
            if hot_risk >= lowest:
                continue
            for k in range(slot_K.shape[0]):
                added_variance = share * (np.float32(2.0) * cross_K[k] + share * expert_variance)
                after = max(hot_risk, risk(load_K[k] + share * mean, variance_K[k] + added_variance, z))
                if after < lowest and slot_K[k] != hot_slot:
                    lowest = after
                    best = (slot, g, np.int64(slot_K[k]))
    return best


@kernel
def _replica_scratch(first_E1: Int32) -> Float32:
    """Return an uninitialised array with one element per replica of the expert that has the most replicas."""
    max_replicas = np.int64(0)
    for e in range(first_E1.shape[0] - 1):
        max_replicas = max(max_replicas, first_E1[e + 1] - first_E1[e])
    return np.empty(max_replicas, dtype=np.float32)


class _RanksOfReplicas(NamedTuple):
    """Loads of the ranks that hold an expert, looked up once for all of the expert's sources."""

    load_K: Float32
    """float32 ``[K]``, mean load of the rank of each replica."""
    variance_K: Float32
    """float32 ``[K]``, variance of the rank's load."""
    cross_K: Float32
    """float32 ``[K]``, covariance of the rank's load with the expert's heat."""


@part
def _ranks_of_replicas(first_E1: Int32) -> _RanksOfReplicas:
    """Return uninitialised arrays that are large enough for the expert with the most replicas."""
    return _RanksOfReplicas(
        _replica_scratch(first_E1), _replica_scratch(first_E1), _replica_scratch(first_E1)
    )


@part
def _look_up(
    assignment: Assignment, expert: int, slot_K: Int32, load_K: Float32, variance_K: Float32, cross_K: Float32
) -> None:
    """Copy the load, variance and covariance of each replica's rank into ``load_K``, ``variance_K`` and ``cross_K``.

    This is done once per expert, and the copies are then used for all of its sources.
    """
    for k in range(slot_K.shape[0]):
        rank = slot_K[k] // assignment.phy2log_RS.shape[1]
        load_K[k] = assignment.load_R[rank]
        variance_K[k] = assignment.variance_R[rank]
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
    """Swap experts off the hottest rank, together with their sources, as long as this relieves the rank.

    Relief is measured on the scale of the risks before the swap, so a single swap can raise the smooth maximum. The
    caller must compare the PAR before and after.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement to start from.
    log2phy_GE
        int32 ``[G, E]``, tables, changed in place so that sources follow the swapped experts.
    heat
        Heat of the layer.
    share_GE
        float32 ``[G, E]``, each source's share of each expert's tokens.
    z
        Weight of the standard deviation in a rank's risk.
    steps
        Maximum number of swaps.

    Returns
    -------
    Int32
        int32 ``[R, S]``, the new placement.
    """
    slots = phy2log_RS.shape[1]
    assignment = assignment_of(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), heat)
    swaps = swaps_of(assignment, heat)
    no_homes_ER = np.zeros_like(assignment.holds_ER)
    smooth_max = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    for _ in range(steps):
        hot = hottest_of(smooth_max)
        slot, rank, rank_slot, _ = best_swap(assignment, heat, smooth_max, hot, MIN_RELIEF, swaps)
        if slot < 0:
            break
        hot_expert = assignment.phy2log_RS[hot, slot]
        cool_expert = assignment.phy2log_RS[rank, rank_slot]
        _readdress(log2phy_GE, hot_expert, hot * slots + slot, rank * slots + rank_slot)
        _readdress(log2phy_GE, cool_expert, rank * slots + rank_slot, hot * slots + slot)
        swap(assignment, heat, no_homes_ER, swaps, hot, slot, rank, rank_slot)
        smooth_max = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    return assignment.phy2log_RS


@kernel
def follow_slots(log2phy_GE: Int32, phy2log_RS: Int32) -> Int32:
    """Return tables updated for replicas that have changed slots within their ranks, as in ``topology.keep_slots``.

    Every source still uses the replica on the same rank.

    Parameters
    ----------
    log2phy_GE
        int32 ``[G, E]``, tables before the slots changed.
    phy2log_RS
        int32 ``[R, S]``, placement after they changed.

    Examples
    --------
    Rank 0 now holds its experts 0 and 1 in the opposite order:

    >>> log2phy_GE = np.array([[0, 1, 3], [2, 1, 3]], dtype=np.int32)
    >>> follow_slots(log2phy_GE, np.array([[1, 0], [0, 2]], dtype=np.int32))
    array([[1, 0, 3],
           [2, 0, 3]], dtype=int32)
    """
    ranks, slots = phy2log_RS.shape
    sources, experts = log2phy_GE.shape
    slot_RE = np.full((ranks, experts), -1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            slot_RE[r, phy2log_RS[r, s]] = s
    rehoused_GE = np.empty_like(log2phy_GE)
    for g in range(sources):
        for e in range(experts):
            rank = log2phy_GE[g, e] // slots
            rehoused_GE[g, e] = rank * slots + slot_RE[rank, e]
    return rehoused_GE


@part
def _readdress(log2phy_GE: Int32, expert: int, old_slot: int, new_slot: int) -> None:
    """Redirect an expert's tokens from one physical slot to another in all tables."""
    for g in range(log2phy_GE.shape[0]):
        if log2phy_GE[g, expert] == old_slot:
            log2phy_GE[g, expert] = new_slot
