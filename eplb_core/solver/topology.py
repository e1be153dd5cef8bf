"""Puts a new placement onto the deployed one so that as little as possible moves, and says who sends what moves.

Ranks are alike to the balance, so a placement solved from scratch may be dealt to them in any order; an expert that
stays on a rank keeps its slot; and of the ranks that hold an expert a near one with little to send sends it.
"""

from __future__ import annotations

import numpy as np

from eplb_core.solver.construction import descending
from eplb_core.solver.evaluation import (
    MIN_GAIN,
    TopRanks,
    loads_in_episodes,
    mean_peak,
    peak_of_two_changed,
    top_ranks_of,
    update_loads,
)
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import (
    CHOSEN,
    EVEN,
    STEPWISE,
    Candidate,
    Episodes,
    Float32,
    Int32,
    LayerLayout,
    SearchParams,
    set_row,
)
from eplb_core.solver.tables import slot_shares, slots_by_expert, tables_par


@kernel
def choose_senders(deployed_RS: Int32, phy2log_RS: Int32, node_R: Int32) -> Int32:
    """One row per slot that changes: source rank, source slot, destination rank, destination slot, expert.

    Any rank that holds the expert now may send it; one on the receiver's node comes first, then the one that sends
    least so far, then the lowest. Returns int32 ``[M, 5]`` in order of destination.
    """
    ranks, slots = deployed_RS.shape
    # There are no more experts than slots.
    first_E1, slot_P = slots_by_expert(deployed_RS, ranks * slots)
    sent_R = np.zeros(ranks, dtype=np.int32)
    move_M5 = np.empty((ranks * slots, 5), dtype=np.int32)
    moves = 0
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            if expert == deployed_RS[r, s]:
                continue
            holder_K = slot_P[first_E1[expert] : first_E1[expert + 1]]
            sent_from = holder_K[0]
            for holder in holder_K[1:]:
                near, best_near = (
                    node_R[holder // slots] == node_R[r],
                    node_R[sent_from // slots] == node_R[r],
                )
                less = sent_R[holder // slots] < sent_R[sent_from // slots]
                if (near and not best_near) or (near == best_near and less):
                    sent_from = holder
            sent_R[sent_from // slots] += 1
            move_M5[moves, 0] = sent_from // slots
            move_M5[moves, 1] = sent_from % slots
            move_M5[moves, 2] = r
            move_M5[moves, 3] = s
            move_M5[moves, 4] = expert
            moves += 1
    filled_M5: Int32 = move_M5[:moves].copy()
    return filled_M5


@kernel
def match_ranks(phy2log_RS: Int32, deployed_RS: Int32, experts: int, node_R: Int32) -> Int32:
    """Deal the rows of ``phy2log_RS`` to the ranks that share most experts with them, largest overlap first.

    At equal overlap a rank comes first whose node holds more of the row: what moves then comes from nearby.
    ``node_R`` int32 ``[R]``, numbered from 0. ``deployed_RS`` may have another number of columns.
    """
    ranks, slots = phy2log_RS.shape
    worth_ER = np.zeros((experts, ranks), dtype=np.int32)
    nodes = 0
    for node in node_R:
        nodes = max(nodes, node + 1)
    node_holds_KE = np.zeros((nodes, experts), dtype=np.bool_)
    for r in range(ranks):
        for expert in deployed_RS[r]:
            worth_ER[expert, r] = slots + 1
            node_holds_KE[node_R[r], expert] = True
    for e in range(experts):
        for r in range(ranks):
            worth_ER[e, r] += node_holds_KE[node_R[r], e]
    score_RR = np.zeros((ranks, ranks), dtype=np.int32)
    given_C = np.zeros((slots + 1) ** 2, dtype=np.bool_)
    # Rows that are not dealt yet, and ranks that have none, as many, both in order.
    row_U, rank_U = np.empty(ranks, dtype=np.int32), np.empty(ranks, dtype=np.int32)
    for row in range(ranks):
        row_U[row] = rank_U[row] = row
        for expert in phy2log_RS[row]:
            for r in range(ranks):
                score_RR[row, r] += worth_ER[expert, r]
        for r in range(ranks):
            given_C[score_RR[row, r]] = True
    dealt_RS = np.empty_like(phy2log_RS)
    taken_R = np.zeros(ranks, dtype=np.bool_)
    for score in range(given_C.shape[0] - 1, -1, -1):
        if not given_C[score]:
            continue
        left = free = 0
        for waiting in row_U:
            dealt = False
            for rank in rank_U:
                if score_RR[waiting, rank] == score and not taken_R[rank]:
                    set_row(dealt_RS[rank], phy2log_RS[waiting])
                    dealt = taken_R[rank] = True
                    break
            if not dealt:
                row_U[left] = waiting
                left += 1
        for rank in rank_U:
            if not taken_R[rank]:
                rank_U[free] = rank
                free += 1
        row_U, rank_U = row_U[:left], rank_U[:left]
    return dealt_RS


@kernel
def keep_slots(phy2log_RS: Int32, deployed_RS: Int32) -> tuple[Int32, int]:
    """The same experts on each rank, those that were there already in their deployed slots.

    Returns int32 ``[R, S]`` and the number of slots that hold another expert than before.
    """
    ranks, slots = phy2log_RS.shape
    kept_RS = np.full((ranks, slots), -1, dtype=np.int32)
    moves = 0
    for r in range(ranks):
        for s in range(slots):
            for t in range(slots):
                if phy2log_RS[r, t] == deployed_RS[r, s]:
                    kept_RS[r, s] = deployed_RS[r, s]
        free = 0
        for t in range(slots):
            came = True
            for s in range(slots):
                if kept_RS[r, s] == phy2log_RS[r, t] and deployed_RS[r, s] == phy2log_RS[r, t]:
                    came = False
            if came:
                while kept_RS[r, free] >= 0:
                    free += 1
                kept_RS[r, free] = phy2log_RS[r, t]
                moves += 1
    return kept_RS, moves


_ROUNDING = 1e-6
"""Mean peak that is rounding: two equal parts that change places change no load."""
_SWEEPS = 2
"""Passes over all experts: what one brings home leaves room for others; a third pass finds next to nothing."""


@kernel
def _localise_tables(
    phy2log_RS: Int32,
    near_EG: Int32,
    share_EG: Float32,
    top: TopRanks,
    heat: Episodes,
    deployed: LayerLayout,
    part_X2: Int32,
    limit: float,
) -> None:
    """Bring parts home in the tables ``near_EG``, int32 ``[E, G]``, each in the way that leaves the ranks coolest.

    ``part_X2`` is as ``_parts_with_homes`` gives it. No part comes home if that takes the mean peak above ``limit``,
    what it is with the tables given; ``top`` has the loads, and goes along.
    """
    ranks, slots = phy2log_RS.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, share_EG.shape[0])
    # The last row stays 0.
    changed_RN = np.zeros((ranks + 1, top.load_RN.shape[1]), dtype=np.float32)
    changed_R1, rank_K = np.zeros(ranks + 1, dtype=np.bool_), np.zeros(2, dtype=np.int32)
    first_P, next_G = np.full(slot_P.shape[0], -1, dtype=np.int32), np.empty(near_EG.shape[1], dtype=np.int32)
    for _ in range(_SWEEPS):
        listed = -1
        for e, g in part_X2:
            own = near_EG[e, g]
            if deployed.node_R[own // slots] == deployed.node_G[g]:
                continue
            replica_K = slot_P[first_E1[e] : first_E1[e + 1]]
            if e != listed:
                listed = e
                _list_sources(near_EG[e], first_P, next_G)
            served = first_P, next_G
            to, back = _best_way_home(
                near_EG[e], share_EG[e], heat, deployed, replica_K, top, changed_RN, served, g, e, limit
            )
            if to < 0:
                continue
            more, near_EG[e, g] = share_EG[e, g], to
            _relist(first_P, next_G, g, own, to)
            if back >= 0:
                more, near_EG[e, back] = more - share_EG[e, back], own
                _relist(first_P, next_G, back, to, own)
            rank_K[0], rank_K[1] = own // slots, to // slots
            changed_R1[rank_K[0]] = changed_R1[rank_K[1]] = True
            _shift(top, heat.scaled_EN[e], more, rank_K[0], rank_K[1], changed_RN)
            update_loads(top, rank_K, 2, changed_R1, changed_RN)
            changed_R1[rank_K[0]] = changed_R1[rank_K[1]] = False


@part
def _list_sources(near_G: Int32, first_P: Int32, next_G: Int32) -> None:
    """List each slot's sources, ascending: its first in ``first_P``, after each the next in ``next_G``, -1 for none."""
    for g in range(near_G.shape[0]):
        first_P[near_G[g]] = -1
    for g in range(near_G.shape[0] - 1, -1, -1):
        next_G[g] = first_P[near_G[g]]
        first_P[near_G[g]] = g


@part
def _relist(first_P: Int32, next_G: Int32, source: int, own: int, to: int) -> None:
    """Take a source out of its ``own`` slot's list and put it into that of the slot ``to``, ascending."""
    before = -1
    at = first_P[own]
    while at != source:
        before, at = at, next_G[at]
    if before < 0:
        first_P[own] = next_G[source]
    else:
        next_G[before] = next_G[source]
    before, at = -1, first_P[to]
    while 0 <= at < source:
        before, at = at, next_G[at]
    next_G[source] = at
    if before < 0:
        first_P[to] = source
    else:
        next_G[before] = source


def _parts_with_homes(phy2log_RS: Int32, heat: Episodes, deployed: LayerLayout) -> Int32:
    """Parts with tokens whose source's node holds the expert: expert and source, int32 ``[X, 2]``.

    Hottest expert first, of each the largest part first. Of many nodes each holds few experts.
    """
    share_GE, mean_E = deployed.share_GE, heat.scaled_EN @ heat.share_N
    # The last row is of sources on several nodes, which are -1.
    holds_KE = np.zeros((deployed.node_R.max() + 2, share_GE.shape[1]), dtype=np.bool_)
    holds_KE[deployed.node_R[:, None], phy2log_RS] = True
    order_E, home_GE = descending(mean_E), holds_KE[deployed.node_G]
    home_GE &= share_GE * mean_E > MIN_GAIN
    place_X, source_X = home_GE.T[order_E].nonzero()
    expert_X = order_E[place_X]
    first_X = np.lexsort((-share_GE[source_X, expert_X], place_X))
    return np.stack([expert_X, source_X], axis=1)[first_X].astype(np.int32)


@kernel
def _best_way_home(
    near_G: Int32,
    share_G: Float32,
    heat: Episodes,
    deployed: LayerLayout,
    replica_K: Int32,
    top: TopRanks,
    changed_RN: Float32,
    served: tuple[Int32, Int32],
    source: int,
    expert: int,
    limit: float,
) -> tuple[int, int]:
    """Find the slot that brings a part home at the lowest mean peak, and whose part comes back for it, -1 for none.

    Only a part that is not at home there comes back. -1 twice where every way lifts the mean peak above ``limit``.
    ``served`` are the lists of ``_list_sources``.
    """
    first_P, next_G = served
    ranks, slots = deployed.phy2log_RS.shape
    own, home, none_N = near_G[source], deployed.node_G[source], changed_RN[ranks]
    to, back, lowest = -1, -1, np.float32(limit)
    for replica in replica_K:
        if deployed.node_R[replica // slots] != home:
            continue
        # The mean peak is convex in what changes ranks: beyond a way that is no better than another none is.
        low, high = np.float32(-np.inf), np.float32(np.inf)
        best, least = low, high
        here, there = own // slots, replica // slots
        # What the other ranks leave: below that no way leads.
        floor = peak_of_two_changed(top, heat.share_N, here, there, none_N, none_N)
        # Its part alone, then in exchange for each of those that the replica serves.
        g, coming = -1, first_P[replica]
        while True:
            more = share_G[source] - (share_G[g] if g >= 0 else np.float32(0.0))
            if low < more < high and (g < 0 or deployed.node_G[g] != home):
                _shift(top, heat.scaled_EN[expert], more, here, there, changed_RN)
                found = peak_of_two_changed(
                    top, heat.share_N, here, there, changed_RN[here], changed_RN[there]
                )
                worse = best if found < least else more
                if found < least:
                    best, least = more, found
                if worse < best:
                    low = worse
                else:
                    high = worse
                if found < lowest:
                    to, back, lowest = np.int64(replica), g, found
            if coming < 0 or least <= floor:
                break
            g, coming = coming, next_G[coming]
    return to, back


@part
def _shift(top: TopRanks, heat_N: Float32, more: float, here: int, there: int, changed_RN: Float32) -> None:
    """Note both ranks' loads once ``more`` of an expert's tokens go ``there`` instead of ``here``."""
    for n in range(heat_N.shape[0]):
        changed_RN[here, n] = top.load_RN[here, n] - more * heat_N[n]
        changed_RN[there, n] = top.load_RN[there, n] + more * heat_N[n]


def localised(candidate: Candidate, heat: Episodes, deployed: LayerLayout, params: SearchParams) -> Candidate:
    """The candidate with tables that keep more tokens on their nodes, no hotter on this heat.

    As it is where there is one node, or where tables are not the solver's to choose.
    """
    if params.tables not in CHOSEN or not deployed.node_R.any():
        return candidate
    placed_RS, log2phy_GE = candidate.phy2log_RS, candidate.log2phy_GE
    share_RS = slot_shares(placed_RS, log2phy_GE, deployed.share_GE)
    top = top_ranks_of(loads_in_episodes(placed_RS, share_RS, heat.scaled_EN))
    limit = mean_peak(top.peak_KN[0], heat.share_N) + _ROUNDING
    near_EG, share_EG = np.array(log2phy_GE.T, order="C"), np.ascontiguousarray(deployed.share_GE.T)
    part_X2 = _parts_with_homes(placed_RS, heat, deployed)
    _localise_tables(placed_RS, near_EG, share_EG, top, heat, deployed, part_X2, limit)
    near_GE = np.ascontiguousarray(near_EG.T)
    after = tables_par(placed_RS, near_GE, heat, deployed.share_GE)
    return candidate._replace(log2phy_GE=near_GE, par=after)


def crossing_share(candidate: Candidate, heat: Episodes, deployed: LayerLayout, tables: int) -> float:
    """Part of the tokens that leave their source's node; 0 on one node, or where the host asks no table.

    Sources whose ranks are on several nodes count as at home everywhere: each of their nodes has the tokens.
    """
    if tables in (EVEN, STEPWISE) or not deployed.node_R.any():
        return 0.0
    node_P = np.repeat(deployed.node_R, candidate.phy2log_RS.shape[1])
    return _leaving_share(candidate.log2phy_GE, node_P, heat.scaled_EN @ heat.share_N, deployed)


@kernel
def _leaving_share(log2phy_GE: Int32, node_P: Int32, mean_E: Float32, deployed: LayerLayout) -> float:
    """Part of the tokens that leave their source's node; ``node_P`` int32 ``[R*S]``, node of each slot."""
    leaving = total = 0.0
    for g in range(log2phy_GE.shape[0]):
        home = deployed.node_G[g]
        for e in range(log2phy_GE.shape[1]):
            tokens = deployed.share_GE[g, e] * mean_E[e]
            total += tokens
            if home >= 0 and node_P[log2phy_GE[g, e]] != home:
                leaving += tokens
    return leaving / max(total, 1e-30)
