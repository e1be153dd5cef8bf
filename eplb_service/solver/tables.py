"""Which replica each source rank's tokens of each expert go to: log2phy as part of the solution.

An expert's tokens arrive unevenly from the source ranks, so a fixed rule splits them unevenly over its replicas.
Here each part (one source, one expert) goes to the replica whose rank stays coolest, largest parts first, and is
moved on while that cools the hottest rank. G token groups: ranks that see the same tokens are one source and share
one table.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, expert_heat, mean_of_max, risk
from eplb_service.solver.packing import Packing, empty_packing, hottest_rank, shift_load
from eplb_service.solver.risk_search import SMALLEST_GAIN


@kernel
def solve_tables(
    phy2log_RS: Int32, demand: Demand, scaled_EN: Float32, share_N: Float32, share_GE: Float32, z: float
) -> tuple[Int32, float]:
    """Choose each source's replicas; never worse on these episodes than the engines' rule ``source % copies``.

    Parameters
    ----------
    phy2log_RS, demand, scaled_EN, share_N
        A complete placement and its layer's heat.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source; each column sums to 1.
    z
        Weight of the standard deviation.

    Returns int32 ``[G, E]``, physical ids, and the peak-to-average ratio that they realise.
    """
    first_E1, slot_P = slots_by_expert(phy2log_RS, share_GE.shape[1])
    rule_GE = fixed_rule(first_E1, slot_P, share_GE.shape[0])
    rule_par = tables_par(phy2log_RS, rule_GE, scaled_EN, share_N, share_GE)
    chosen_GE, packing = _spread(phy2log_RS, rule_GE, first_E1, slot_P, demand, share_GE, z)
    _cool(packing, chosen_GE, first_E1, slot_P, demand, share_GE, z)
    chosen_par = tables_par(phy2log_RS, chosen_GE, scaled_EN, share_N, share_GE)
    if chosen_par < rule_par:
        return chosen_GE, chosen_par
    return rule_GE, rule_par


@kernel
def slots_by_expert(phy2log_RS: Int32, experts: int) -> tuple[Int32, Int32]:
    """Physical ids in order of expert: those of expert ``e`` are ``slot_P[first_E1[e]:first_E1[e + 1]]``."""
    ranks, slots = phy2log_RS.shape
    first_E1 = np.zeros(experts + 1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            first_E1[phy2log_RS[r, s] + 1] += 1
    for e in range(experts):
        first_E1[e + 1] += first_E1[e]
    next_E = first_E1[:-1].copy()
    slot_P = np.empty(ranks * slots, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            e = phy2log_RS[r, s]
            slot_P[next_E[e]] = r * slots + s
            next_E[e] += 1
    return first_E1, slot_P


@kernel
def fixed_rule(first_E1: Int32, slot_P: Int32, sources: int) -> Int32:
    """Source ``g`` uses replica ``g % k`` of an expert with ``k`` replicas, int32 ``[G, E]``."""
    experts = first_E1.shape[0] - 1
    chosen_GE = np.empty((sources, experts), dtype=np.int32)
    for g in range(sources):
        for e in range(experts):
            chosen_GE[g, e] = slot_P[first_E1[e] + g % (first_E1[e + 1] - first_E1[e])]
    return chosen_GE


@kernel
def tables_par(
    phy2log_RS: Int32, chosen_GE: Int32, scaled_EN: Float32, share_N: Float32, share_GE: Float32
) -> float:
    """Peak-to-average ratio that tables realise."""
    slots = phy2log_RS.shape[1]
    weight_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    for g in range(chosen_GE.shape[0]):
        for e in range(chosen_GE.shape[1]):
            weight_RS[chosen_GE[g, e] // slots, chosen_GE[g, e] % slots] += share_GE[g, e]
    return mean_of_max(scaled_EN, share_N, phy2log_RS, weight_RS)


@kernel
def _spread(
    phy2log_RS: Int32,
    rule_GE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
) -> tuple[Int32, Packing]:
    """Largest part first, to the replica whose rank stays coolest; parts without tokens follow the rule."""
    ranks, slots = phy2log_RS.shape
    sources, experts = share_GE.shape
    copies_E = np.diff(first_E1)
    packing = empty_packing(copies_E, ranks, slots)
    heat_E = expert_heat(demand, z)
    part_GE = np.zeros((sources, experts), dtype=np.float32)
    for e in range(experts):
        if copies_E[e] == 1:
            shift_load(packing, demand, e, slot_P[first_E1[e]] // slots, 1.0)
        else:
            for g in range(sources):
                part_GE[g, e] = share_GE[g, e] * heat_E[e]
    chosen_GE = rule_GE.copy()
    part_I = part_GE.ravel()
    for item in np.argsort(-part_I, kind="mergesort"):
        if part_I[item] <= 0:
            break
        g, e = item // experts, item % experts
        lowest = np.inf
        for place in range(first_E1[e], first_E1[e + 1]):
            rank = slot_P[place] // slots
            after = _risk_with(packing, demand, e, rank, share_GE[g, e], z)
            if after < lowest:
                lowest = after
                chosen_GE[g, e] = slot_P[place]
        shift_load(packing, demand, e, chosen_GE[g, e] // slots, share_GE[g, e])
    return chosen_GE, packing


@kernel
def _risk_with(packing: Packing, demand: Demand, expert: int, rank: int, weight: float, z: float) -> float:
    """Risk of a rank once it carries ``weight`` more of an expert's tokens."""
    load = packing.load_R[rank] + weight * demand.mean_E[expert]
    variance = packing.variance_R[rank] + weight * (
        np.float32(2.0) * packing.cross_RE[rank, expert] + weight * demand.gram_EE[expert, expert]
    )
    return risk(load, variance, z)


@kernel
def _cool(
    packing: Packing,
    chosen_GE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
) -> None:
    """Move parts off the hottest rank while that leaves the ranks touched cooler than it was."""
    sources = share_GE.shape[0]
    ranks, slots = packing.phy2log_RS.shape
    for _ in range(4 * ranks * slots):
        hot, hottest = hottest_rank(packing, z)
        lowest = hottest - SMALLEST_GAIN
        found_g, found_e, found_place = -1, -1, -1
        for e in range(first_E1.shape[0] - 1):
            if packing.copies_E[e] == 1:
                continue
            for g in range(sources):
                weight = share_GE[g, e]
                if chosen_GE[g, e] // slots != hot or weight <= 0:
                    continue
                here = _risk_with(packing, demand, e, hot, -weight, z)
                for place in range(first_E1[e], first_E1[e + 1]):
                    rank = slot_P[place] // slots
                    if rank == hot:
                        continue
                    after = max(here, _risk_with(packing, demand, e, rank, weight, z))
                    if after < lowest:
                        lowest = after
                        found_g, found_e, found_place = g, e, place
        if found_g < 0:
            return
        shift_load(packing, demand, found_e, hot, -share_GE[found_g, found_e])
        chosen_GE[found_g, found_e] = slot_P[found_place]
        shift_load(packing, demand, found_e, slot_P[found_place] // slots, share_GE[found_g, found_e])
