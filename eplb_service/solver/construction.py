"""Builds a placement from scratch: replica counts greedily or by a tree, then the hottest replica to the coolest rank.

Replicas are handed out one by one to the expert whose replicas are hottest, as DeepSeek's EPLB does. Placing them is
Graham's longest-processing-time rule, on the risk of a rank with full covariance in place of its load: experts that are
hot together are kept apart. Where every rank with room holds the expert already, room is made on another. An
``Assignment`` keeps the running sums that make a change cheap to judge.

The tree searches replica counts and placement jointly over groups of experts: the first of FlashLB's three ideas.
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
R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969 (LPT).
DeepSeek EPLB, https://github.com/deepseek-ai/EPLB.
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.evaluation import expert_heat, risk
from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Float32, Float64, Heat, Int32, Int64, set_row


@kernel
def descending(values: Float32) -> Int32:
    """Indices of ``values`` from largest to smallest, equal ones in order; int32. A bottom-up merge sort."""
    size = values.shape[0]
    order = np.empty(size, dtype=np.int32)
    merged = np.empty(size, dtype=np.int32)
    for at in range(size):
        order[at] = at
    width = 1
    while width < size:
        for first in range(0, size, 2 * width):
            middle, last = min(first + width, size), min(first + 2 * width, size)
            left, right = first, middle
            for at in range(first, last):
                if left < middle and (right == last or values[order[left]] >= values[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


@kernel
def _hand_out(replicas_E: Int32, heat_E: Float32, budget: int, ranks: int) -> int:
    """Give ``budget`` more replicas, each to the expert with the hottest replicas; none gets more than ``ranks``.

    ``replicas_E`` (int32) is changed in place. Experts with zero heat are served last. Returns the replicas that found
    no taker.
    """
    experts = replicas_E.shape[0]
    for left in range(budget, 0, -1):
        taker = -1
        for e in range(experts):
            if replicas_E[e] < ranks and (
                taker < 0 or heat_E[e] * replicas_E[taker] > heat_E[taker] * replicas_E[e]
            ):
                taker = e
        if taker < 0:
            return left
        replicas_E[taker] += 1
    return 0


@kernel
def _greedy_replicas(heat_E: Float32, ranks: int, slots: int) -> Int32:
    """Replicas of each expert, int32 ``[E]``, summing to ``ranks*slots``: one each, then to the hottest."""
    experts = heat_E.shape[0]
    replicas_E = np.ones(experts, dtype=np.int32)
    _hand_out(replicas_E, heat_E, ranks * slots - experts, ranks)
    return replicas_E


class Assignment(NamedTuple):
    """One layer's slots with everything that makes a change cheap to judge; all arrays change in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, expert in each slot, -1 where empty."""
    replicas_E: Int32
    """int32 ``[E]``, slots that hold, or will hold, the expert."""
    share_ER: Float32
    """float32 ``[E, R]``, part of the expert's tokens that the rank's replica receives; 0 where it holds none."""
    holds_ER: Bool
    """bool ``[E, R]``, whether the rank holds the expert."""
    filled_R: Int32
    """int32 ``[R]``, slots in use; they come first."""
    load_R: Float32
    """float32 ``[R]``, mean load."""
    variance_R: Float32
    """float32 ``[R]``, variance of the load over episodes."""
    cross_RE: Float32
    """float32 ``[R, E]``, covariance of the rank's load with each expert's heat."""


@kernel
def _empty_assignment(replicas_E: Int32, ranks: int, slots: int) -> Assignment:
    """No slot filled; ``replicas_E`` is what each expert will have."""
    experts = replicas_E.shape[0]
    return Assignment(
        np.full((ranks, slots), -1, dtype=np.int32),
        replicas_E.copy(),
        np.zeros((experts, ranks), dtype=np.float32),
        np.zeros((experts, ranks), dtype=np.bool_),
        np.zeros(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros(ranks, dtype=np.float32),
        np.zeros((ranks, experts), dtype=np.float32),
    )


@kernel
def assignment_of(phy2log_RS: Int32, share_RS: Float32, heat: Heat) -> Assignment:
    """The ``Assignment`` of a complete placement whose slots receive ``share_RS`` of their experts' tokens."""
    ranks, slots = phy2log_RS.shape
    assignment = _empty_assignment(replicas_of(phy2log_RS, heat.mean_E.shape[0]), ranks, slots)
    for r in range(ranks):
        for s in range(slots):
            _put(assignment, heat, phy2log_RS[r, s], r, share_RS[r, s])
    return assignment


@kernel
def replicas_of(phy2log_RS: Int32, experts: int) -> Int32:
    """Replicas of each expert, int32 ``[E]``."""
    replicas_E = np.zeros(experts, dtype=np.int32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            replicas_E[phy2log_RS[r, s]] += 1
    return replicas_E


@kernel
def even_shares(phy2log_RS: Int32, experts: int) -> Float32:
    """Each expert's tokens split evenly over its replicas, float32 ``[R, S]``."""
    replicas_E = replicas_of(phy2log_RS, experts)
    share_RS = np.empty(phy2log_RS.shape, dtype=np.float32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            share_RS[r, s] = share_of(replicas_E[phy2log_RS[r, s]])
    return share_RS


@part
def share_of(replicas: int) -> float:
    """The part of an expert's tokens that one of so many replicas gets, float32."""
    share: float = np.float32(1.0) / np.float32(replicas)
    return share


@kernel
def shift_load(assignment: Assignment, heat: Heat, expert: int, rank: int, share: float) -> None:
    """Add to what a rank's replica receives, its slots untouched.

    For the arguments see ``model``.
    """
    cross_E = assignment.cross_RE[rank]
    gram_E = heat.gram_EE[expert]
    assignment.share_ER[expert, rank] += share
    assignment.load_R[rank] += share * heat.mean_E[expert]
    assignment.variance_R[rank] += share * (np.float32(2.0) * cross_E[expert] + share * gram_E[expert])
    for e in range(cross_E.shape[0]):
        cross_E[e] += share * gram_E[e]


@kernel
def _put(assignment: Assignment, heat: Heat, expert: int, rank: int, share: float) -> None:
    """Fill the next free slot of a rank with a replica."""
    assignment.phy2log_RS[rank, assignment.filled_R[rank]] = expert
    assignment.filled_R[rank] += 1
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, heat, expert, rank, share)


@kernel
def _clear(assignment: Assignment, heat: Heat, rank: int, slot: int) -> None:
    """Take the expert of one slot off its rank; the slot itself must be filled or given up next."""
    expert = assignment.phy2log_RS[rank, slot]
    shift_load(assignment, heat, expert, rank, -assignment.share_ER[expert, rank])
    assignment.share_ER[expert, rank] = 0
    assignment.holds_ER[expert, rank] = False


@kernel
def replace(assignment: Assignment, heat: Heat, rank: int, slot: int, expert: int, share: float) -> None:
    """Let ``slot`` hold ``expert`` instead, at ``share`` of its tokens.

    For the arguments see ``model``.
    """
    _clear(assignment, heat, rank, slot)
    assignment.phy2log_RS[rank, slot] = expert
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, heat, expert, rank, share)


@kernel
def hottest_rank(assignment: Assignment, z: float) -> tuple[int, float]:
    """Rank with the highest risk, and that risk."""
    worst = 0
    worst_risk = np.float32(-1.0)
    for r in range(assignment.load_R.shape[0]):
        found = risk(assignment.load_R[r], assignment.variance_R[r], z)
        if found > worst_risk:
            worst, worst_risk = r, found
    return worst, worst_risk


@kernel
def _place_in_order(assignment: Assignment, heat: Heat, order_E: Int32, z: float) -> None:
    """Place all replicas of the experts of ``order_E``, each on the rank that stays coolest with it."""
    for expert in order_E:
        for _ in range(assignment.replicas_E[expert]):
            rank = _coolest_rank(assignment, heat, expert, z)
            if rank < 0:
                rank = _make_room(assignment, heat, expert)
            _put(assignment, heat, expert, rank, share_of(assignment.replicas_E[expert]))


@part
def _coolest_rank(assignment: Assignment, heat: Heat, expert: int, z: float) -> int:
    """Rank with a free slot, without the expert, and with the lowest risk once it holds it; -1 where none is.

    The least loaded rank is judged first: most others then carry more than it would, and need no judging.
    """
    slots = assignment.phy2log_RS.shape[1]
    share = share_of(assignment.replicas_E[expert])
    mean = share * heat.mean_E[expert]
    own = share * share * heat.gram_EE[expert, expert]
    ranks: int = assignment.load_R.shape[0]
    least = ranks
    for r in range(ranks):
        if assignment.filled_R[r] == slots or assignment.holds_ER[expert, r]:
            continue
        if least == ranks or assignment.load_R[r] < assignment.load_R[least]:
            least = r
    if least == ranks:
        return -1
    chosen = least
    lowest = _risk_with(assignment, least, expert, share, mean, own, z)
    for r in range(ranks):
        if (
            assignment.load_R[r] + mean >= lowest
            or assignment.filled_R[r] == slots
            or assignment.holds_ER[expert, r]
        ):
            continue
        # Empty ranks are alike, and the first of them has been judged.
        if assignment.filled_R[r] == 0 and assignment.filled_R[least] == 0:
            continue
        found = _risk_with(assignment, r, expert, share, mean, own, z)
        if found < lowest:
            chosen, lowest = r, found
    return chosen


@part
def _risk_with(
    assignment: Assignment, rank: int, expert: int, share: float, mean: float, own: float, z: float
) -> float:
    """Risk of a rank once it holds a replica with this share, mean load and variance."""
    variance = assignment.variance_R[rank] + np.float32(2.0) * share * assignment.cross_RE[rank, expert] + own
    return risk(assignment.load_R[rank] + mean, variance, z)


@part
def _make_room(assignment: Assignment, heat: Heat, expert: int) -> int:
    """Free a slot for ``expert`` where every rank with room holds it already; returns the rank.

    A full rank without the expert passes one of its own to a rank with room that lacks it. Such a pair exists while
    the expert has fewer replicas placed than there are ranks: the full rank has more other experts than the one with
    room.
    """
    ranks, slots = assignment.phy2log_RS.shape
    roomy = 0
    while assignment.filled_R[roomy] == slots:
        roomy += 1
    for giver in range(ranks):
        if assignment.holds_ER[expert, giver]:
            continue
        for slot in range(slots):
            passed = assignment.phy2log_RS[giver, slot]
            if not assignment.holds_ER[passed, roomy]:
                _clear(assignment, heat, giver, slot)
                assignment.filled_R[giver] -= 1
                assignment.phy2log_RS[giver, slot] = assignment.phy2log_RS[giver, slots - 1]
                assignment.phy2log_RS[giver, slots - 1] = -1
                _put(assignment, heat, passed, roomy, share_of(assignment.replicas_E[passed]))
                return giver
    return -1


def tree_search(
    heat: Heat,
    ranks: int,
    slots: int,
    z: float,
    leaves: int,
    groups: int = 4,
    spread: int = 2,
    beam: int = 4,
) -> tuple[Int32, Float64]:
    """Search replica counts; returns those of the best leaves, int32 ``[K, E]``, and their risks, coolest first.

    Parameters
    ----------
    heat, ranks, slots
        The layer's heat, and the shape.
    z
        Weight of the standard deviation.
    leaves
        Best leaves that are returned, at most; with 0 the greedy counts as they are, unjudged (risk infinite).
    groups
        Expert groups of the tree.
    spread
        Replicas that a group may get beside its greedy number.
    beam
        Nodes that go on from each level.
    """
    heat_E = expert_heat(heat, z)
    replicas_E = _greedy_replicas(heat_E, ranks, slots)
    if leaves == 0 or ranks * slots == replicas_E.size:
        return replicas_E[None, :], np.array([np.inf])
    return _search_counts(replicas_E, heat_E, heat, ranks, slots, z, groups, spread, beam, leaves)


@kernel
def _search_counts(
    replicas_E: Int32,
    heat_E: Float32,
    heat: Heat,
    ranks: int,
    slots: int,
    z: float,
    groups: int,
    spread: int,
    beam: int,
    leaves: int,
) -> tuple[Int32, Float64]:
    """``tree_search`` where there is a choice."""
    experts = heat_E.shape[0]
    best_KE = np.empty((leaves, experts), dtype=np.int32)
    risk_K = np.full(leaves, np.inf)
    spare = ranks * slots - experts
    _, greedy_risk = hottest_rank(place(replicas_E, heat, ranks, slots, z), z)
    _remember(best_KE, risk_K, replicas_E, greedy_risk)
    by_heat_E = descending(heat_E)
    first_G = _group_bounds(replicas_E, by_heat_E, groups)
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
                if unplaced > 0 or _floor_of(child_E, heat.mean_E, by_heat_E[:high]) >= risk_K[-1]:
                    continue
                leaf_E = _complete(child_E, heat_E, by_heat_E, high, left - given, ranks)
                if _spare_of(leaf_E, by_heat_E) < spare or _is_known(child_E, children_CE[:found]):
                    continue
                _, leaf_risk = hottest_rank(place(leaf_E, heat, ranks, slots, z), z)
                set_row(children_CE[found], child_E)
                cool_C[found] = -leaf_risk
                found += 1
                _remember(best_KE, risk_K, leaf_E, leaf_risk)
        if found == 0:
            break
        frontier_BE = np.empty((min(found, beam), experts), dtype=np.int32)
        hottest_last_C = descending(cool_C[:found])
        for b in range(frontier_BE.shape[0]):
            set_row(frontier_BE[b], children_CE[hottest_last_C[b]])
    kept = _known(risk_K)
    return best_KE[:kept], risk_K[:kept]


@kernel
def place(replicas_E: Int32, heat: Heat, ranks: int, slots: int, z: float) -> Assignment:
    """Place these replicas greedily, hottest first.

    For the arguments see ``model``.
    """
    assignment = _empty_assignment(replicas_E, ranks, slots)
    _place_in_order(assignment, heat, descending(_heat_per_replica(heat, replicas_E, z)), z)
    return assignment


@part
def _heat_per_replica(heat: Heat, replicas_E: Int32, z: float) -> Float32:
    """Mean + z*std of each expert over its replicas, float32 ``[E]``."""
    heat_E = expert_heat(heat, z)
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
def _group_bounds(replicas_E: Int32, by_heat_E: Int32, groups: int) -> Int64:
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
def _floor_of(replicas_E: Int32, mean_E: Float32, fixed: Int32) -> float:
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
    unplaced = _hand_out(own_M, heat_M, budget, ranks)
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
    """Return whether these counts were tried already."""
    for c in range(seen_CE.shape[0]):
        same = True
        for e in range(replicas_E.shape[0]):
            same = same and seen_CE[c, e] == replicas_E[e]
        if same:
            return True
    return False
