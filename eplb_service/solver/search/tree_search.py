"""Joint search of replica counts and placement over groups of experts: the first of FlashLB's three ideas.

Experts are sorted by heat and cut into groups. A node of the tree has fixed the replicas of the experts of the first
groups. Its children give the next group a little more or less of what is left than a greedy allotment would.
Look-ahead judges a child by completing and placing it greedily; pruning drops children that cannot beat the best leaf.
A beam of the most promising nodes goes on to the next group.

Ours departs from FlashLB in three ways. A leaf is judged by the risk of its hottest rank with full covariance, the same
figure that the local search goes on from. The bound that prunes is of the means alone, because two experts that
alternate may share a rank at less risk than one has by itself. And several leaves are searched further, not the best
one alone. The other two ideas are the multi-episode objective (``evaluation``) and layer-wise cherry-picking
(``planner.decide``).

References
----------
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Demand, Float32, Float64, Int32, Int64, SearchParams, set_row
from eplb_service.solver.search.construction import (
    Assignment,
    descending,
    empty_assignment,
    greedy_replicas,
    hand_out,
    hottest_rank,
    place_in_order,
)
from eplb_service.solver.search.evaluation import expert_heat


def tree_search(demand: Demand, ranks: int, slots: int, params: SearchParams) -> tuple[Int32, Float64]:
    """Search replica counts; returns those of the best leaves, int32 ``[K, E]``, and their risks, coolest first.

    Parameters
    ----------
    demand, ranks, slots
        The layer's heat, and the shape.
    params
        ``z`` and those whose names begin with ``tree``. Without groups the greedy counts are returned as they are,
        unjudged (risk infinite).
    """
    heat_E = expert_heat(demand, params.z)
    replicas_E = greedy_replicas(heat_E, ranks, slots)
    if params.tree_groups == 0 or ranks * slots == replicas_E.size:
        return replicas_E[None, :], np.array([np.inf])
    return search_counts(replicas_E, heat_E, demand, ranks, slots, params)


@kernel
def search_counts(
    replicas_E: Int32, heat_E: Float32, demand: Demand, ranks: int, slots: int, params: SearchParams
) -> tuple[Int32, Float64]:
    """``tree_search`` where there is a choice.

    Parameters
    ----------
    replicas_E, heat_E
        The greedy counts, and what they were made for.
    demand, ranks, slots, params
        As for ``tree_search``.
    """
    z, groups, spread, leaves = params.z, params.tree_groups, params.tree_spread, params.tree_leaves
    experts = heat_E.shape[0]
    best_KE = np.empty((leaves, experts), dtype=np.int32)
    risk_K = np.full(leaves, np.inf)
    spare = ranks * slots - experts
    _, greedy_risk = hottest_rank(place(replicas_E, demand, ranks, slots, z), z)
    _remember(best_KE, risk_K, replicas_E, greedy_risk)
    by_heat_E = descending(heat_E)
    first_G = group_bounds(replicas_E, by_heat_E, groups)
    frontier_BE = np.ones((1, experts), dtype=np.int32)
    for group in range(first_G.shape[0] - 1):
        low, high = first_G[group], first_G[group + 1]
        children_CE = np.empty((frontier_BE.shape[0] * (2 * spread + 1), experts), dtype=np.int32)
        cool_C = np.empty(children_CE.shape[0], dtype=np.float32)
        found = 0
        for b in range(frontier_BE.shape[0]):
            node_E = frontier_BE[b]
            left = spare - _spare_of(node_E, by_heat_E[:low])
            greedy_E = _complete(node_E, heat_E, by_heat_E, low, left, ranks)
            usual = _spare_of(greedy_E, by_heat_E[low:high])
            for given in range(max(0, usual - spread), min(left, usual + spread) + 1):
                child_E = node_E.copy()
                unplaced = _hand_out_to(child_E, heat_E, by_heat_E[low:high], given, ranks)
                if unplaced > 0 or floor_of(child_E, demand.mean_E, by_heat_E[:high]) >= risk_K[-1]:
                    continue
                leaf_E = _complete(child_E, heat_E, by_heat_E, high, left - given, ranks)
                if _spare_of(leaf_E, by_heat_E) < spare or _is_known(child_E, children_CE[:found]):
                    continue
                _, leaf_risk = hottest_rank(place(leaf_E, demand, ranks, slots, z), z)
                set_row(children_CE[found], child_E)
                cool_C[found] = -leaf_risk
                found += 1
                _remember(best_KE, risk_K, leaf_E, leaf_risk)
        if found == 0:
            break
        frontier_BE = np.empty((min(found, params.tree_beam), experts), dtype=np.int32)
        hottest_last_C = descending(cool_C[:found])
        for b in range(frontier_BE.shape[0]):
            set_row(frontier_BE[b], children_CE[hottest_last_C[b]])
    kept = _known(risk_K)
    return best_KE[:kept], risk_K[:kept]


@kernel
def place(replicas_E: Int32, demand: Demand, ranks: int, slots: int, z: float) -> Assignment:
    """Place these replicas greedily, hottest first.

    Parameters
    ----------
    replicas_E
        int32 ``[E]``, replicas of each expert, summing to ``ranks * slots``.
    demand
        The layer's heat.
    ranks, slots
        R and S.
    z
        Weight of the standard deviation.
    """
    assignment = empty_assignment(replicas_E, ranks, slots)
    place_in_order(assignment, demand, descending(heat_per_replica(demand, replicas_E, z)), z)
    return assignment


@part
def heat_per_replica(demand: Demand, replicas_E: Int32, z: float) -> Float32:
    """Mean + z*std of each expert over its replicas, float32 ``[E]``."""
    heat_E = expert_heat(demand, z)
    for e in range(heat_E.shape[0]):
        heat_E[e] /= np.float32(replicas_E[e])
    return heat_E


@kernel
def _remember(best_KE: Int32, risk_K: Float64, replicas_E: Int32, risk: float) -> None:
    """Sort a leaf into the best ones unless its counts are there already."""
    if risk >= risk_K[-1] or _is_known(replicas_E, best_KE[: _known(risk_K)]):
        return
    at = risk_K.shape[0] - 1
    while at > 0 and risk < risk_K[at - 1]:
        risk_K[at] = risk_K[at - 1]
        set_row(best_KE[at], best_KE[at - 1])
        at -= 1
    risk_K[at] = risk
    set_row(best_KE[at], replicas_E)


@kernel
def group_bounds(replicas_E: Int32, by_heat_E: Int32, groups: int) -> Int64:
    """Cut the experts, hottest first, into groups with about equal numbers of replicas; int64 ``[groups + 1]``."""
    experts = replicas_E.shape[0]
    groups = min(groups, experts)
    first_G: Int64 = np.zeros(groups + 1, dtype=np.int64)
    total = experts + _spare_of(replicas_E, by_heat_E)
    seen = 0
    group = 1
    for place in range(experts):
        seen += replicas_E[by_heat_E[place]]
        if group < groups and seen * groups >= total * group:
            first_G[group] = place + 1
            group += 1
    first_G[group:] = experts
    return first_G


@kernel
def floor_of(replicas_E: Int32, mean_E: Float32, fixed: Int32) -> float:
    """No completion is cooler than the hottest replica already fixed: what else a rank holds only adds to its mean.

    Of the means alone, because two experts that alternate may have less risk together than one by itself.
    """
    floor = 0.0
    for e in fixed:
        floor = max(floor, mean_E[e] / replicas_E[e])
    return floor


@kernel
def _complete(
    replicas_E: Int32, heat_E: Float32, by_heat_E: Int32, first: int, left: int, ranks: int
) -> Int32:
    """Hand ``left`` replicas greedily to the experts from place ``first`` on."""
    done_E: Int32 = replicas_E.copy()
    _hand_out_to(done_E, heat_E, by_heat_E[first:], left, ranks)
    return done_E


@kernel
def _hand_out_to(replicas_E: Int32, heat_E: Float32, members: Int32, budget: int, ranks: int) -> int:
    """Hand ``budget`` replicas greedily to ``members`` only; returns those that found no taker."""
    if members.shape[0] == 0:
        return budget
    own_M = np.empty(members.shape[0], dtype=np.int32)
    heat_M = np.empty(members.shape[0], dtype=np.float32)
    for m in range(members.shape[0]):
        own_M[m], heat_M[m] = replicas_E[members[m]], heat_E[members[m]]
    unplaced = hand_out(own_M, heat_M, budget, ranks)
    for m in range(members.shape[0]):
        replicas_E[members[m]] = own_M[m]
    return unplaced


@kernel
def _spare_of(replicas_E: Int32, members: Int32) -> int:
    """Replicas that these experts have beside their first."""
    spare = 0
    for e in members:
        spare += replicas_E[e] - 1
    return spare


@kernel
def _known(risk_K: Float64) -> int:
    """Leaves that there are so far."""
    known = 0
    while known < risk_K.shape[0] and risk_K[known] < np.inf:
        known += 1
    return known


@kernel
def _is_known(replicas_E: Int32, seen_CE: Int32) -> bool:
    """Whether these counts were tried already."""
    for c in range(seen_CE.shape[0]):
        same = True
        for e in range(replicas_E.shape[0]):
            same = same and seen_CE[c, e] == replicas_E[e]
        if same:
            return True
    return False
