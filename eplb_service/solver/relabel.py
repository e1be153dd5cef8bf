"""Put a new placement onto the deployed one so that as little as possible moves.

Ranks are alike to the balance, so a placement solved from nothing may be dealt to them in any order; and an expert
that stays on a rank keeps its slot.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Int32
from eplb_service.solver.jit import kernel


@kernel
def match_ranks(phy2log_RS: Int32, deployed_RS: Int32, experts: int) -> Int32:
    """Deal the rows of ``phy2log_RS`` to the ranks that share most experts with them, largest overlap first."""
    ranks, slots = phy2log_RS.shape
    holds_RE = np.zeros((ranks, experts), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            holds_RE[r, deployed_RS[r, s]] = True
    shared_RR = np.zeros((ranks, ranks), dtype=np.int32)
    for row in range(ranks):
        for r in range(ranks):
            for s in range(slots):
                shared_RR[row, r] += holds_RE[r, phy2log_RS[row, s]]
    dealt_RS = np.empty_like(phy2log_RS)
    row_dealt_R = np.zeros(ranks, dtype=np.bool_)
    rank_taken_R = np.zeros(ranks, dtype=np.bool_)
    for shared in range(slots, -1, -1):
        for row in range(ranks):
            for r in range(ranks):
                if shared_RR[row, r] == shared and not row_dealt_R[row] and not rank_taken_R[r]:
                    dealt_RS[r] = phy2log_RS[row]
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
