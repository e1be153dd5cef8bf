"""Which rank sends each expert that a rank must receive."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Int32
from eplb_service.solver.jit import kernel


@kernel
def choose_senders(deployed_RS: Int32, phy2log_RS: Int32, node_R: Int32) -> Int32:
    """One row per slot that changes: source rank, source slot, destination rank, destination slot, expert.

    Any rank that holds the expert now may send it; one on the receiver's node comes first, then the one that sends
    least so far, then the lowest. Returns int32 ``[M, 5]`` in order of destination.
    """
    ranks, slots = deployed_RS.shape
    sent_R = np.zeros(ranks, dtype=np.int32)
    move_M5 = np.empty((ranks * slots, 5), dtype=np.int32)
    moves = 0
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            if expert == deployed_RS[r, s]:
                continue
            sender, sender_slot = -1, -1
            for q in range(ranks):
                for t in range(slots):
                    if deployed_RS[q, t] != expert:
                        continue
                    near, best_near = node_R[q] == node_R[r], sender >= 0 and node_R[sender] == node_R[r]
                    if (
                        sender < 0
                        or (near and not best_near)
                        or (near == best_near and sent_R[q] < sent_R[sender])
                    ):
                        sender, sender_slot = q, t
            sent_R[sender] += 1
            move_M5[moves, 0] = sender
            move_M5[moves, 1] = sender_slot
            move_M5[moves, 2] = r
            move_M5[moves, 3] = s
            move_M5[moves, 4] = expert
            moves += 1
    filled_M5: Int32 = move_M5[:moves].copy()
    return filled_M5
