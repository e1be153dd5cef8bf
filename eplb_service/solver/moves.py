"""Which rank sends each expert that a rank must receive."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.table_rule import slots_by_expert


@kernel
def choose_senders(deployed_RS: Int32, phy2log_RS: Int32, node_R: Int32) -> Int32:
    """One row per slot that changes: source rank, source slot, destination rank, destination slot, expert.

    Any rank that holds the expert now may send it; one on the receiver's node comes first, then the one that sends
    least so far, then the lowest. Returns int32 ``[M, 5]`` in order of destination.
    """
    ranks, slots = deployed_RS.shape
    first_E1, slot_P = slots_by_expert(deployed_RS, max(deployed_RS.max(), phy2log_RS.max()) + 1)
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
