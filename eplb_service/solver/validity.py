"""Whether a layer can be served: asked of every answer, and of every table that is deployed."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Int32
from eplb_service.solver.jit import kernel


@kernel
def placeable(phy2log_RS: Int32, experts: int) -> bool:
    """Whether every expert is placed and none stands twice on a rank."""
    last_rank_E = np.full(experts, -1, dtype=np.int64)
    placed = 0
    for r in range(phy2log_RS.shape[0]):
        for expert in phy2log_RS[r]:
            if expert < 0 or expert >= experts or last_rank_E[expert] == r:
                return False
            placed += last_rank_E[expert] < 0
            last_rank_E[expert] = r
    return bool(placed == experts)


@kernel
def tables_hold(log2phy_GE: Int32, phy2log_RS: Int32) -> bool:
    """Whether every entry of every table, int32 ``[G, E]``, names a slot that holds the expert."""
    expert_P = phy2log_RS.ravel()
    for g in range(log2phy_GE.shape[0]):
        for e in range(log2phy_GE.shape[1]):
            slot = log2phy_GE[g, e]
            if slot < 0 or slot >= expert_P.shape[0] or expert_P[slot] != e:
                return False
    return True
