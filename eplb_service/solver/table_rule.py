"""What tables are and what they realise: the engines' fixed rule, the slots' shares through tables, their ratio."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import mean_of_max


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


@kernel
def fixed_rule(first_E1: Int32, slot_P: Int32, sources: int) -> Int32:
    """Source ``g`` uses replica ``g % k`` of an expert with ``k`` replicas, int32 ``[G, E]``."""
    experts = first_E1.shape[0] - 1
    chosen_GE = np.empty((sources, experts), dtype=np.int32)
    for e in range(experts):
        first, copies = first_E1[e], first_E1[e + 1] - first_E1[e]
        at = 0
        for g in range(sources):
            chosen_GE[g, e] = slot_P[first + at]
            at = at + 1 if at + 1 < copies else 0
    return chosen_GE


@kernel
def slot_shares(phy2log_RS: Int32, chosen_GE: Int32, share_GE: Float32) -> Float32:
    """Part of its expert's tokens that each slot receives through tables, float32 ``[R, S]``."""
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    share_P = share_RS.ravel()
    for g in range(chosen_GE.shape[0]):
        for e in range(chosen_GE.shape[1]):
            share_P[chosen_GE[g, e]] += share_GE[g, e]
    return share_RS


@kernel
def tables_par(
    phy2log_RS: Int32, chosen_GE: Int32, scaled_EN: Float32, share_N: Float32, share_GE: Float32
) -> float:
    """Peak-to-average ratio that tables realise."""
    return mean_of_max(scaled_EN, share_N, phy2log_RS, slot_shares(phy2log_RS, chosen_GE, share_GE))
