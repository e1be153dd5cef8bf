"""Which replica each source's tokens of each expert go to: log2phy as part of the solution.

An expert's tokens arrive unevenly from the source ranks, so a fixed rule splits them unevenly over its replicas.
Here each part (one source, one expert) goes to the replica whose rank stays coolest, largest parts first, and is
moved on while that cools the hottest rank. G sources: ranks that see the same tokens are one, and share one table.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import SMALLEST_GAIN, Demand, expert_heat, risk
from eplb_service.solver.order import descending
from eplb_service.solver.packing import Packing, hottest_rank, packing_of, shift_load
from eplb_service.solver.table_rule import fixed_rule, slots_by_expert, tables_par


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
    sources, experts = share_GE.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    rule_GE = fixed_rule(first_E1, slot_P, sources)
    rule_par = tables_par(phy2log_RS, rule_GE, scaled_EN, share_N, share_GE)
    chosen_GE = rule_GE.copy()
    packing = _spread(phy2log_RS, chosen_GE, first_E1, slot_P, demand, share_GE, z)
    _cool(packing, chosen_GE, first_E1, slot_P, demand, share_GE, z)
    chosen_par = tables_par(phy2log_RS, chosen_GE, scaled_EN, share_N, share_GE)
    if chosen_par < rule_par:
        return chosen_GE, chosen_par
    return rule_GE, rule_par


@kernel
def _spread(
    phy2log_RS: Int32,
    chosen_GE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_GE: Float32,
    z: float,
) -> Packing:
    """Hottest expert first, its largest part first, each to the replica whose rank stays coolest.

    Parts without tokens stay where they are. One expert at a time: its parts change the loads of the few ranks that
    hold it only in one direction, so a part costs a few operations whatever the number of experts.
    """
    slots = phy2log_RS.shape[1]
    experts = share_GE.shape[1]
    copies_E = np.diff(first_E1)
    share_RS = np.zeros(phy2log_RS.shape, dtype=np.float32)
    for e in range(experts):
        if copies_E[e] == 1:
            only = slot_P[first_E1[e]]
            share_RS[only // slots, only % slots] = 1.0
    packing = packing_of(phy2log_RS, share_RS, demand)
    added_R = np.zeros(phy2log_RS.shape[0], dtype=np.float32)
    for e in descending(expert_heat(demand, z)):
        first, after = first_E1[e], first_E1[e + 1]
        if copies_E[e] == 1:
            continue
        for place in range(first, after):
            added_R[slot_P[place] // slots] = 0
        for g in descending(share_GE[:, e].copy()):
            share = share_GE[g, e]
            if share <= 0:
                break
            lowest = np.inf
            for place in range(first, after):
                rank = slot_P[place] // slots
                found = _risk_with(packing, demand, e, rank, added_R[rank] + share, z)
                if found < lowest:
                    lowest = found
                    chosen_GE[g, e] = slot_P[place]
            added_R[chosen_GE[g, e] // slots] += share
        for place in range(first, after):
            rank = slot_P[place] // slots
            shift_load(packing, demand, e, rank, added_R[rank])
    return packing


@kernel
def _risk_with(packing: Packing, demand: Demand, expert: int, rank: int, share: float, z: float) -> float:
    """Risk of a rank once it carries ``share`` more of an expert's tokens."""
    load = packing.load_R[rank] + share * demand.mean_E[expert]
    variance = packing.variance_R[rank] + share * (
        np.float32(2.0) * packing.cross_RE[rank, expert] + share * demand.gram_EE[expert, expert]
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
    """Move parts off the hottest rank while that leaves both ranks touched cooler than it was."""
    ranks, slots = packing.phy2log_RS.shape
    for _ in range(4 * ranks * slots):
        hot, hottest = hottest_rank(packing, z)
        lowest = hottest - SMALLEST_GAIN
        found_g, found_e, found_place = -1, -1, -1
        for slot in range(slots):
            e = packing.phy2log_RS[hot, slot]
            if packing.copies_E[e] == 1:
                continue
            own = hot * slots + slot
            for g in range(share_GE.shape[0]):
                share = share_GE[g, e]
                if chosen_GE[g, e] != own or share <= 0:
                    continue
                here = _risk_with(packing, demand, e, hot, -share, z)
                for place in range(first_E1[e], first_E1[e + 1]):
                    if slot_P[place] == own:
                        continue
                    after = max(here, _risk_with(packing, demand, e, slot_P[place] // slots, share, z))
                    if after < lowest:
                        lowest = after
                        found_g, found_e, found_place = g, e, place
        if found_g < 0:
            return
        share = share_GE[found_g, found_e]
        shift_load(packing, demand, found_e, hot, -share)
        chosen_GE[found_g, found_e] = slot_P[found_place]
        shift_load(packing, demand, found_e, slot_P[found_place] // slots, share)
