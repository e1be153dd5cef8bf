"""Joint search of replica counts and placement over groups of experts (FlashLB's first idea).

Experts stand in order of heat and are cut into groups. A node of the tree has fixed the copies of the experts of
the first groups and placed them. Its children give the next group a little more or less of what is left than a
greedy allotment would. Look-ahead judges a child by completing it greedily; pruning drops children that cannot beat
the best leaf. A beam of the most promising nodes goes on to the next group.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32, Int64
from eplb_service.solver.greedy import pack
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, expert_heat
from eplb_service.solver.packing import Packing, empty_packing, hottest_rank
from eplb_service.solver.replicas import greedy_copies, hand_out


@kernel
def tree_search(
    demand: Demand, ranks: int, slots: int, z: float, groups: int, spread: int, beam: int
) -> tuple[Packing, float]:
    """Search replica counts; returns the best complete ``Packing`` and its risk.

    Parameters
    ----------
    demand, ranks, slots, z
        The layer's heat, the shape, and the weight of the standard deviation.
    groups
        Groups that the experts are cut into; 0 takes the greedy counts as they are.
    spread
        A group gets up to this many copies more or less than the greedy allotment gives it.
    beam
        Nodes that go on from each level.
    """
    heat_E = expert_heat(demand, z)
    experts = heat_E.shape[0]
    copies_E = greedy_copies(heat_E, ranks, slots)
    best = empty_packing(copies_E, ranks, slots)
    pack(best, demand, _hottest_copies_first(heat_E, copies_E), z)
    _, best_risk = hottest_rank(best, z)
    spare = ranks * slots - experts
    if groups == 0 or spare == 0:
        return best, best_risk
    by_heat_E = np.argsort(-heat_E, kind="mergesort")
    first_G = group_bounds(copies_E, by_heat_E, groups)
    frontier_BE = np.ones((1, experts), dtype=np.int32)
    for group in range(first_G.shape[0] - 1):
        low, high = first_G[group], first_G[group + 1]
        children_CE = np.empty((frontier_BE.shape[0] * (2 * spread + 1), experts), dtype=np.int32)
        risk_C = np.full(children_CE.shape[0], np.inf)
        found = 0
        for node_E in frontier_BE:
            left = spare - (node_E[by_heat_E[:low]] - 1).sum()
            greedy_E = _complete(node_E, heat_E, by_heat_E, low, left, ranks)
            usual = (greedy_E[by_heat_E[low:high]] - 1).sum()
            for given in range(max(0, usual - spread), min(left, usual + spread) + 1):
                child_E = node_E.copy()
                unplaced = _hand_out_to(child_E, heat_E, by_heat_E[low:high], given, ranks)
                if unplaced > 0 or floor_of(child_E, heat_E, by_heat_E[:high]) >= best_risk:
                    continue
                leaf_E = _complete(child_E, heat_E, by_heat_E, high, left - given, ranks)
                if leaf_E.sum() < ranks * slots or _stands_in(child_E, children_CE[:found]):
                    continue
                leaf = empty_packing(leaf_E, ranks, slots)
                pack(leaf, demand, _hottest_copies_first(heat_E, leaf_E), z)
                _, leaf_risk = hottest_rank(leaf, z)
                children_CE[found] = child_E
                risk_C[found] = leaf_risk
                found += 1
                if leaf_risk < best_risk:
                    best, best_risk = leaf, leaf_risk
        if found == 0:
            break
        frontier_BE = children_CE[np.argsort(risk_C[:found], kind="mergesort")[:beam]]
    return best, best_risk


@kernel
def group_bounds(copies_E: Int32, by_heat_E: Int64, groups: int) -> Int64:
    """Cut the experts, hottest first, into groups with about equal numbers of copies; int64 ``[groups + 1]``."""
    experts = copies_E.shape[0]
    groups = min(groups, experts)
    first_G: Int64 = np.zeros(groups + 1, dtype=np.int64)
    total = copies_E.sum()
    seen = 0
    group = 1
    for place in range(experts):
        seen += copies_E[by_heat_E[place]]
        if group < groups and seen * groups >= total * group:
            first_G[group] = place + 1
            group += 1
    first_G[group:] = experts
    return first_G


@kernel
def floor_of(copies_E: Int32, heat_E: Float32, fixed: Int64) -> float:
    """No completion is cooler than the hottest copy already fixed."""
    floor = 0.0
    for e in fixed:
        floor = max(floor, heat_E[e] / copies_E[e])
    return floor


@kernel
def _complete(copies_E: Int32, heat_E: Float32, by_heat_E: Int64, first: int, left: int, ranks: int) -> Int32:
    """Hand ``left`` copies greedily to the experts from place ``first`` on."""
    done_E: Int32 = copies_E.copy()
    _hand_out_to(done_E, heat_E, by_heat_E[first:], left, ranks)
    return done_E


@kernel
def _hand_out_to(copies_E: Int32, heat_E: Float32, members: Int64, budget: int, ranks: int) -> int:
    """Hand ``budget`` copies greedily to ``members`` only; returns those that found no taker."""
    if members.shape[0] == 0:
        return budget
    own_M = copies_E[members]
    unplaced = hand_out(own_M, heat_E[members], budget, ranks)
    for m in range(members.shape[0]):
        copies_E[members[m]] = own_M[m]
    return unplaced


@kernel
def _hottest_copies_first(heat_E: Float32, copies_E: Int32) -> Int64:
    return np.argsort(-heat_E / copies_E, kind="mergesort")


@kernel
def _stands_in(copies_E: Int32, seen_CE: Int32) -> bool:
    """Whether these counts were tried already."""
    for known_E in seen_CE:  # noqa: SIM110 (numba compiles no generator expression)
        if np.array_equal(known_E, copies_E):
            return True
    return False
