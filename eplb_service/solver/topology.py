"""Puts a new placement onto the deployed one so that as little as possible moves, and says who sends what moves.

Ranks are alike to the balance, so a placement solved from scratch may be dealt to them in any order; an expert that
stays on a rank keeps its slot; and of the ranks that hold an expert a near one with little to send sends it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.construction import descending
from eplb_service.solver.evaluation import SMALLEST_GAIN, loads_in_episodes
from eplb_service.solver.jit import kernel
from eplb_service.solver.model import (
    CHOSEN,
    EVEN,
    STEPWISE,
    Candidate,
    Float32,
    Heat,
    Int32,
    Layer,
    SearchParams,
    set_row,
)
from eplb_service.solver.tables import slot_shares, slots_by_expert, tables_par


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
    holds_RE = np.zeros((ranks, experts), dtype=np.bool_)
    nodes = 0
    for node in node_R:
        nodes = max(nodes, node + 1)
    node_holds_KE = np.zeros((nodes, experts), dtype=np.bool_)
    for r in range(ranks):
        for expert in deployed_RS[r]:
            holds_RE[r, expert] = True
            node_holds_KE[node_R[r], expert] = True
    score_RR = np.zeros((ranks, ranks), dtype=np.int32)
    pairs_C = np.zeros((slots + 1) ** 2, dtype=np.int32)
    for row in range(ranks):
        for r in range(ranks):
            for expert in phy2log_RS[row]:
                score_RR[row, r] += (slots + 1) * holds_RE[r, expert] + node_holds_KE[node_R[r], expert]
            pairs_C[score_RR[row, r]] += 1
    dealt_RS = np.empty_like(phy2log_RS)
    row_dealt_R = np.zeros(ranks, dtype=np.bool_)
    rank_taken_R = np.zeros(ranks, dtype=np.bool_)
    for score in range(pairs_C.shape[0] - 1, -1, -1):
        if pairs_C[score] == 0:
            continue
        for row in range(ranks):
            for r in range(ranks):
                if score_RR[row, r] == score and not row_dealt_R[row] and not rank_taken_R[r]:
                    set_row(dealt_RS[r], phy2log_RS[row])
                    row_dealt_R[row] = True
                    rank_taken_R[r] = True
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


_SWEEPS = 2
"""Passes over all experts: what one brings home leaves room for others; a third pass finds next to nothing."""


class _Parts(NamedTuple):
    """One expert's parts, with what rerouting them is judged by."""

    slot_G: Int32
    """int32 ``[G]``, physical slot that each source sends its part to; changes in place."""
    share_G: Float32
    """float32 ``[G]``, each source's part of the expert's tokens."""
    node_G: Int32
    """int32 ``[G]``, node of each source, -1 where its ranks are on several."""
    node_P: Int32
    """int32 ``[R*S]``, node of each physical slot."""
    replica_K: Int32
    """int32 ``[K]``, the expert's physical slots."""
    mean: float
    """The expert's mean heat."""
    heat_N: Float32
    """float32 ``[N]``, the expert's normalised heat."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights."""
    load_RN: Float32
    """float32 ``[R, N]``, load of each rank in each episode; changes in place."""
    others_N: Float32
    """float32 ``[N]``, load of the hottest rank that does not hold the expert."""
    width: int
    """Parts in a row that are one source's: of its entries that go to one slot, any is as good to send back."""


@kernel
def _localise_tables(
    phy2log_RS: Int32,
    log2phy_GE: Int32,
    heat: Heat,
    share_GE: Float32,
    node_G: Int32,
    node_R: Int32,
    width: int,
) -> tuple[Int32, float]:
    """Bring parts home, those of the hottest experts first, each in the way that leaves the ranks coolest.

    ``phy2log_RS`` and ``log2phy_GE`` are a complete placement and its tables, ``mean_E`` float32 ``[E]`` is each
    expert's mean heat, ``node_R`` int32 ``[R]`` each rank's node; for the others see ``_Parts``.

    Returns tables int32 ``[G, E]`` and the peak-to-average ratio that they realise, never above that of the tables
    given.
    """
    slots = phy2log_RS.shape[1]
    before = tables_par(phy2log_RS, log2phy_GE, heat, share_GE)
    load_RN = loads_in_episodes(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), heat.scaled_EN)
    first_E1, slot_P = slots_by_expert(phy2log_RS, share_GE.shape[1])
    node_P = np.empty(slot_P.shape[0], dtype=np.int32)
    for p in range(node_P.shape[0]):
        node_P[p] = node_R[p // slots]
    near_GE = log2phy_GE.copy()
    peak = np.float32(before)
    for _ in range(_SWEEPS):
        for e in descending(heat.mean_E):
            replica_K = slot_P[first_E1[e] : first_E1[e + 1]]
            if replica_K.shape[0] == 1:
                continue
            others_N = _hottest_of_others(load_RN, replica_K, slots)
            slot_G, share_G = near_GE[:, e].copy(), share_GE[:, e].copy()
            parts = _Parts(
                slot_G,
                share_G,
                node_G,
                node_P,
                replica_K,
                heat.mean_E[e],
                heat.scaled_EN[e],
                heat.share_N,
                load_RN,
                others_N,
                width,
            )
            # Rounding must not lift the ratio above what it was.
            peak = _move_to_local_replicas(parts, peak, before - SMALLEST_GAIN)
            set_row(near_GE[:, e], slot_G)
    after = tables_par(phy2log_RS, near_GE, heat, share_GE)
    return (near_GE, after) if after <= before else (log2phy_GE, before)


@kernel
def _move_to_local_replicas(parts: _Parts, peak: float, limit: float) -> float:
    """Bring one expert's parts home, largest first, while the mean peak stays at most ``peak`` or ``limit``.

    Returns the mean peak then.
    """
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    for g in descending(parts.share_G):
        to, other, found = _best_local_move(parts, g, peak, limit)
        if to < 0:
            continue
        peak = found
        own, more = parts.slot_G[g], parts.share_G[g]
        parts.slot_G[g] = to
        if other >= 0:
            more -= parts.share_G[other]
            parts.slot_G[other] = own
        for n in range(parts.heat_N.shape[0]):
            shifted = more * parts.heat_N[n]
            parts.load_RN[own // slots, n] -= shifted
            parts.load_RN[to // slots, n] += shifted
    return peak


@kernel
def _best_local_move(parts: _Parts, source: int, peak: float, limit: float) -> tuple[int, int, float]:
    """Find how a source's part that leaves its node gets home: where to, whose part comes back, the mean peak then.

    Of all ways that bring more tokens home than they send away it is the one with the lowest mean peak, no higher
    than ``peak`` (what it is now) or ``limit``. The other source is -1 where nothing comes back. -1 twice where there
    is no such way, or the part leaves no node.
    """
    own, home, share = parts.slot_G[source], parts.node_G[source], parts.share_G[source]
    to, back, lowest = -1, -1, max(np.float32(peak), np.float32(limit))
    if home < 0 or share <= 0 or parts.node_P[own] == home:
        return to, back, lowest
    for replica in parts.replica_K:
        if parts.node_P[replica] != home:
            continue
        rest_N = _rest(parts, own, replica)
        last = -1
        for g in range(-1, parts.slot_G.shape[0]):
            more, won = share, share
            if g >= 0:
                if parts.slot_G[g] != replica or g // parts.width == last:
                    continue
                last = g // parts.width
                more -= parts.share_G[g]
                if parts.node_G[g] == home:
                    won = more
                elif parts.node_G[g] == parts.node_P[own]:
                    won += parts.share_G[g]
            if won * parts.mean <= SMALLEST_GAIN:
                continue
            # Equal parts change no load, and rounding must not say otherwise.
            found = np.float32(peak) if more == 0 else _peak_with(parts, own, replica, more, rest_N)
            if found < lowest or (found == lowest and to < 0):
                to, back, lowest = replica, g, found
    return to, back, lowest


@kernel
def _rest(parts: _Parts, one: int, two: int) -> Float32:
    """Load of the hottest rank but those of two of the expert's slots, float32 ``[N]``."""
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    rest_N: Float32 = parts.others_N.copy()
    for replica in parts.replica_K:
        if replica not in (one, two):
            _raise_to(rest_N, parts.load_RN[replica // slots])
    return rest_N


@kernel
def _peak_with(parts: _Parts, own: int, to: int, more: float, rest_N: Float32) -> float:
    """Mean peak once ``more`` of the expert's tokens go to the slot ``to`` instead of ``own``."""
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    here_N, there_N, heat_N = parts.load_RN[own // slots], parts.load_RN[to // slots], parts.heat_N
    peak: float = np.float32(0.0)
    for n in range(heat_N.shape[0]):
        shifted = more * heat_N[n]
        peak += parts.share_N[n] * max(rest_N[n], here_N[n] - shifted, there_N[n] + shifted)
    return peak


@kernel
def _hottest_of_others(load_RN: Float32, slot_K: Int32, slots: int) -> Float32:
    """Load of the hottest rank but for those of physical slots ``slot_K`` in each episode, float32 ``[N]``.

    ``slots`` is how many a rank has; 0 where there is no other rank.
    """
    without_R = np.zeros(load_RN.shape[0], dtype=np.bool_)
    for slot in slot_K:
        without_R[slot // slots] = True
    peak_N = np.zeros(load_RN.shape[1], dtype=np.float32)
    for r in range(load_RN.shape[0]):
        if not without_R[r]:
            _raise_to(peak_N, load_RN[r])
    return peak_N


@kernel
def _raise_to(peak_N: Float32, load_N: Float32) -> None:
    """Lift each episode's peak to a load that is above it."""
    for n in range(peak_N.shape[0]):
        peak_N[n] = max(peak_N[n], load_N[n])


@kernel
def _crossing(
    log2phy_GE: Int32, share_GE: Float32, mean_E: Float32, node_G: Int32, node_R: Int32, slots: int
) -> float:
    """Part of all tokens that tables send to another node than their source's.

    Sources whose ranks are on several nodes count as at home
    everywhere: each of their nodes has the tokens.
    """
    leaving, total = 0.0, 0.0
    for g in range(log2phy_GE.shape[0]):
        for e in range(log2phy_GE.shape[1]):
            tokens = share_GE[g, e] * mean_E[e]
            total += tokens
            if node_G[g] >= 0 and node_R[log2phy_GE[g, e] // slots] != node_G[g]:
                leaving += tokens
    return leaving / total if total > 0 else 0.0


def localised(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """The candidate with tables that keep more tokens on their nodes, no hotter on this heat.

    As it is where there is one node, or where tables are not the solver's to choose.
    """
    heat, deployed = layer
    if params.tables not in CHOSEN or not deployed.node_R.any():
        return candidate
    log2phy_GE, par = _localise_tables(
        candidate.phy2log_RS,
        candidate.log2phy_GE,
        heat,
        deployed.share_GE,
        deployed.node_G,
        deployed.node_R,
        params.width,
    )
    return candidate._replace(log2phy_GE=log2phy_GE, par=par)


def crossing_share(candidate: Candidate, layer: Layer, tables: int) -> float:
    """Part of the tokens that leave their source's node; 0 on one node, or where the host asks no table."""
    heat, deployed = layer
    if tables in (EVEN, STEPWISE) or not deployed.node_R.any():
        return 0.0
    return _crossing(
        candidate.log2phy_GE,
        deployed.share_GE,
        heat.mean_E,
        deployed.node_G,
        deployed.node_R,
        candidate.phy2log_RS.shape[1],
    )
