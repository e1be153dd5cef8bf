"""Tables that give every replica of an expert the same part of its tokens, as nearly as sources can be dealt out.

They lean on no rank's load but for who gets the odd source, so they hold where heat moves on: what a solved table
wins on the window seen, it may lose on the next one.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.order import descending
from eplb_service.solver.packing import even_shares
from eplb_service.solver.table_rule import fixed_rule, slots_by_expert, tables_par


@kernel
def steady_tables(
    phy2log_RS: Int32, mean_E: Float32, scaled_EN: Float32, share_N: Float32, share_GE: Float32
) -> tuple[Int32, float]:
    """Deal each expert's sources to its replicas, largest first, each to the replica with the least so far.

    Hottest expert first; of replicas with equally much the one on the coolest rank comes first. ``mean_E`` float32
    ``[E]`` is the experts' mean heat; the other arguments as for ``tables.solve_tables``. Never worse on these
    episodes than the engines' rule ``source % copies``.

    Returns int32 ``[G, E]``, physical ids, and the peak-to-average ratio that they realise.
    """
    experts = share_GE.shape[1]
    slots = phy2log_RS.shape[1]
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    rule_GE = fixed_rule(first_E1, slot_P, share_GE.shape[0])
    rule_par = tables_par(phy2log_RS, rule_GE, scaled_EN, share_N, share_GE)
    steady_GE = rule_GE.copy()
    load_R = _even_loads(phy2log_RS, mean_E)
    part_P = np.zeros(slot_P.shape[0], dtype=np.float32)
    for e in descending(mean_E):
        first, after = first_E1[e], first_E1[e + 1]
        if after - first == 1:
            continue
        for g in descending(share_GE[:, e].copy()):
            least = first
            for place in range(first + 1, after):
                rank, best = slot_P[place] // slots, slot_P[least] // slots
                less = part_P[place] < part_P[least] - _SAME
                same = part_P[place] <= part_P[least] + _SAME
                if less or (same and load_R[rank] < load_R[best]):
                    least = place
            steady_GE[g, e] = slot_P[least]
            part_P[least] += share_GE[g, e]
        for place in range(first, after):
            odd = part_P[place] - np.float32(1.0) / np.float32(after - first)
            load_R[slot_P[place] // slots] += odd * mean_E[e]
    steady_par = tables_par(phy2log_RS, steady_GE, scaled_EN, share_N, share_GE)
    if steady_par <= rule_par:
        return steady_GE, steady_par
    return rule_GE, rule_par


_SAME = np.float32(1e-6)
"""Difference of two parts that is rounding."""


@kernel
def _even_loads(phy2log_RS: Int32, mean_E: Float32) -> Float32:
    """Mean load of each rank where every expert is split evenly, float32 ``[R]``."""
    share_RS = even_shares(phy2log_RS, mean_E.shape[0])
    load_R = np.zeros(phy2log_RS.shape[0], dtype=np.float32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            load_R[r] += share_RS[r, s] * mean_E[phy2log_RS[r, s]]
    return load_R
