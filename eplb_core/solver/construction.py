"""Builds a placement from scratch: replica counts greedily or by a tree, then the hottest replica to the coolest rank.

Replicas are handed out one by one to the expert whose replicas are hottest, as DeepSeek's EPLB does. Placing them is
Graham's longest-processing-time rule, on the risk of a rank with full covariance in place of its load: experts that are
hot together are kept apart. Where every rank with room holds the expert already, room is made on another. An
``Assignment`` keeps the running sums that make a change cheap to judge.

The tree searches replica counts and placement jointly over groups of experts: the first of FlashLB's three ideas.
Experts are sorted by heat and cut into groups. A node of the tree has fixed the replicas of the experts of the first
groups. Its children give the next group a little more or less of what is left than a greedy allotment would.
Look-ahead judges a child by completing and placing it greedily. A beam of the most promising nodes goes on to the next
group.

Ours departs from FlashLB in two ways. A leaf is judged by the risk of its hottest rank with full covariance, the same
figure that the local search goes on from; and several leaves are searched further, not the best one alone. The other
two ideas are the multi-episode objective (``evaluation``) and layer-wise cherry-picking (``planner.decide``).

References
----------
R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969 (LPT).
DeepSeek EPLB, https://github.com/deepseek-ai/EPLB.
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eplb_core.solver.evaluation import expert_heat, risk
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Float64, Heat, Int32


def descending(values: Float32) -> Int32:
    """Indices of ``values`` from largest to smallest, equal ones in order; int32."""
    return np.argsort(-values, kind="stable").astype(np.int32)


def largest_first(share_EG: Float32) -> Int32:
    """Sources of each expert from its largest part to its smallest, equal ones in order, int32 ``[E, G]``.

    No part is negative.
    """
    # Bits of such floats are in their order; with the source in the same integer they sort in a quarter of the time.
    key_EG = (~share_EG.view(np.int32)).astype(np.int64) << 32 | np.arange(share_EG.shape[1])
    key_EG.sort(axis=1)
    return key_EG.astype(np.int32)


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


def place(replicas_E: Int32, heat: Heat, ranks: int, slots: int, z: float) -> Assignment:
    """Place these replicas greedily, hottest first.

    For the arguments see ``model``.
    """
    order_E = descending(np.divide(expert_heat(heat, z), replicas_E, dtype=np.float32))
    return _place_in_order(replicas_E, heat, ranks, slots, order_E, z)


@kernel
def _place_in_order(
    replicas_E: Int32, heat: Heat, ranks: int, slots: int, order_E: Int32, z: float
) -> Assignment:
    """Place all replicas of the experts of ``order_E``, each on the rank that stays coolest with it."""
    assignment = _empty_assignment(replicas_E, ranks, slots)
    for expert in order_E:
        for _ in range(replicas_E[expert]):
            rank = _coolest_rank(assignment, heat, expert, z)
            if rank < 0:
                rank = _make_room(assignment, heat, expert)
            _put(assignment, heat, expert, rank, share_of(replicas_E[expert]))
    return assignment


@part
def _coolest_rank(assignment: Assignment, heat: Heat, expert: int, z: float) -> int:
    """Rank with a free slot, without the expert, and with the lowest risk once it holds it; -1 where none is."""
    slots = assignment.phy2log_RS.shape[1]
    share = share_of(assignment.replicas_E[expert])
    mean = share * heat.mean_E[expert]
    own = share * share * heat.gram_EE[expert, expert]
    chosen, lowest = -1, np.float32(np.inf)
    for r in range(assignment.load_R.shape[0]):
        # No risk is below the mean load.
        if assignment.load_R[r] + mean >= lowest:
            continue
        if assignment.filled_R[r] == slots or assignment.holds_ER[expert, r]:
            continue
        variance = assignment.variance_R[r] + np.float32(2.0) * share * assignment.cross_RE[r, expert] + own
        found = risk(assignment.load_R[r] + mean, variance, z)
        if found < lowest:
            chosen, lowest = r, found
    return chosen


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
    greedy_E = _greedy_replicas(heat_E, ranks, slots)
    spare = ranks * slots - greedy_E.size
    if leaves == 0 or spare == 0:
        return greedy_E[None, :], np.array([np.inf])
    risk_of: dict[bytes, float] = {}

    def judged(leaf_E: Int32) -> float:
        key = leaf_E.tobytes()
        if key not in risk_of:
            order_E = descending(np.divide(heat_E, leaf_E, dtype=np.float32))
            risk_of[key] = _risk_once_placed(leaf_E, heat, ranks, slots, order_E, z)
        return risk_of[key]

    judged(greedy_E)
    by_heat_E = descending(heat_E)
    frontier = [np.ones_like(greedy_E)]
    for group_M, rest_M in _cut_into_groups(greedy_E, by_heat_E, groups):
        children: dict[bytes, tuple[float, Int32]] = {}
        for node_E in frontier:
            left = ranks * slots - int(node_E.sum())
            greedily_E, _ = _with_more(node_E, heat_E, np.concatenate([group_M, rest_M]), left, ranks)
            usual = int((greedily_E - node_E)[group_M].sum())
            for given in range(max(0, usual - spread), min(left, usual + spread) + 1):
                child_E, unplaced = _with_more(node_E, heat_E, group_M, given, ranks)
                leaf_E, left_over = _with_more(child_E, heat_E, rest_M, left - given, ranks)
                if unplaced == 0 == left_over:
                    children[child_E.tobytes()] = judged(leaf_E), child_E
        coolest = sorted(children.values(), key=lambda child: child[0])[:beam]
        frontier = [child_E for _, child_E in coolest]
    best = sorted(risk_of.items(), key=lambda leaf: leaf[1])[:leaves]
    best_KE = np.array([np.frombuffer(key, dtype=np.int32) for key, _ in best])
    return best_KE, np.array([found for _, found in best])


@kernel
def _risk_once_placed(
    replicas_E: Int32, heat: Heat, ranks: int, slots: int, order_E: Int32, z: float
) -> float:
    """Risk of the hottest rank where these replicas are placed in this order."""
    found: float = hottest_rank(_place_in_order(replicas_E, heat, ranks, slots, order_E, z), z)[1]
    return found


def _cut_into_groups(replicas_E: Int32, by_heat_E: Int32, groups: int) -> Iterator[tuple[Int32, Int32]]:
    """Groups of experts with about equal numbers of replicas, hottest first, each with all experts after it."""
    seen_E = replicas_E[by_heat_E].cumsum()
    groups = min(groups, seen_E.size)
    bounds = [0, *(np.searchsorted(seen_E * groups, seen_E[-1] * np.arange(1, groups)) + 1), seen_E.size]
    for low, high in pairwise(bounds):
        yield by_heat_E[low:high], by_heat_E[high:]


def _with_more(
    replicas_E: Int32, heat_E: Float32, member_M: Int32, budget: int, ranks: int
) -> tuple[Int32, int]:
    """Hand ``budget`` replicas greedily to some experts; and how many found no taker."""
    done_E, done_M = replicas_E.copy(), replicas_E[member_M]
    unplaced = _hand_out(done_M, heat_E[member_M], budget, ranks)
    done_E[member_M] = done_M
    return done_E, unplaced
