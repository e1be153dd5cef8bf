"""How many copies each expert gets when copies are handed out one by one to the hottest."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel


@kernel
def hand_out(copies_E: Int32, heat_E: Float32, budget: int, ranks: int) -> int:
    """Give ``budget`` more copies, each to the expert with the hottest copies; none gets more than ``ranks``.

    ``copies_E`` (int32) is changed in place. Experts with zero heat are served last. Returns the copies that found
    no taker.
    """
    experts = copies_E.shape[0]
    for left in range(budget, 0, -1):
        taker = -1
        for e in range(experts):
            if copies_E[e] < ranks and (
                taker < 0 or heat_E[e] * copies_E[taker] > heat_E[taker] * copies_E[e]
            ):
                taker = e
        if taker < 0:
            return left
        copies_E[taker] += 1
    return 0


@kernel
def greedy_copies(heat_E: Float32, ranks: int, slots: int) -> Int32:
    """Copies of each expert, int32 ``[E]``, summing to ``ranks*slots``: one each, then to the hottest."""
    experts = heat_E.shape[0]
    copies_E = np.ones(experts, dtype=np.int32)
    hand_out(copies_E, heat_E, ranks * slots - experts, ranks)
    return copies_E
