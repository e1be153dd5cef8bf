"""Puts a new placement onto the deployed one so that as little as possible moves, and says who sends what moves.

Ranks are alike to the balance, so a placement solved from scratch may be dealt to them in any order; an expert that
stays on a rank keeps its slot; and of the ranks that hold an expert a near one with little to send sends it.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Int32, set_row
from eplb_service.solver.tables.log2phy import slots_by_expert


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
