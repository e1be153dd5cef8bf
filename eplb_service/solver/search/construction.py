"""Builds a placement greedily: replicas to the hottest experts, then the hottest replica first to the coolest rank.

Replicas are handed out one by one to the expert whose replicas are hottest, as DeepSeek's EPLB does. Placing them is
Graham's longest-processing-time rule, on the risk of a rank with full covariance in place of its load: experts that are
hot together are kept apart. Where every rank with room holds the expert already, room is made on another. An
``Assignment`` keeps the running sums that make a change cheap to judge.

References
----------
R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969 (LPT).
DeepSeek EPLB, https://github.com/deepseek-ai/EPLB.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Demand, Float32, Int32
from eplb_service.solver.search.evaluation import risk


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
def hand_out(replicas_E: Int32, heat_E: Float32, budget: int, ranks: int) -> int:
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
def greedy_replicas(heat_E: Float32, ranks: int, slots: int) -> Int32:
    """Replicas of each expert, int32 ``[E]``, summing to ``ranks*slots``: one each, then to the hottest."""
    experts = heat_E.shape[0]
    replicas_E = np.ones(experts, dtype=np.int32)
    hand_out(replicas_E, heat_E, ranks * slots - experts, ranks)
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
def empty_assignment(replicas_E: Int32, ranks: int, slots: int) -> Assignment:
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
def assignment_of(phy2log_RS: Int32, share_RS: Float32, demand: Demand) -> Assignment:
    """The ``Assignment`` of a complete placement whose slots receive ``share_RS`` of their experts' tokens."""
    ranks, slots = phy2log_RS.shape
    assignment = empty_assignment(replicas_of(phy2log_RS, demand.mean_E.shape[0]), ranks, slots)
    for r in range(ranks):
        for s in range(slots):
            put(assignment, demand, phy2log_RS[r, s], r, share_RS[r, s])
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
def shift_load(assignment: Assignment, demand: Demand, expert: int, rank: int, share: float) -> None:
    """Add to what a rank's replica receives, its slots untouched.

    Parameters
    ----------
    assignment, demand
        A placement, changed in place, and its layer's heat.
    expert, rank
        Whose replica, and where.
    share
        Part of the expert's tokens; may be negative.
    """
    cross_E = assignment.cross_RE[rank]
    gram_E = demand.gram_EE[expert]
    assignment.share_ER[expert, rank] += share
    assignment.load_R[rank] += share * demand.mean_E[expert]
    assignment.variance_R[rank] += share * (np.float32(2.0) * cross_E[expert] + share * gram_E[expert])
    for e in range(cross_E.shape[0]):
        cross_E[e] += share * gram_E[e]


@kernel
def put(assignment: Assignment, demand: Demand, expert: int, rank: int, share: float) -> None:
    """Fill the next free slot of a rank with a replica.

    Parameters
    ----------
    assignment, demand
        A placement, changed in place, and its layer's heat.
    expert, rank
        Of which expert, and where.
    share
        Part of the expert's tokens that it receives.
    """
    assignment.phy2log_RS[rank, assignment.filled_R[rank]] = expert
    assignment.filled_R[rank] += 1
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, demand, expert, rank, share)


@kernel
def clear(assignment: Assignment, demand: Demand, rank: int, slot: int) -> None:
    """Take the expert of one slot off its rank; the slot itself must be filled or given up next."""
    expert = assignment.phy2log_RS[rank, slot]
    shift_load(assignment, demand, expert, rank, -assignment.share_ER[expert, rank])
    assignment.share_ER[expert, rank] = 0
    assignment.holds_ER[expert, rank] = False


@kernel
def replace(assignment: Assignment, demand: Demand, rank: int, slot: int, expert: int, share: float) -> None:
    """Let ``slot`` hold ``expert`` instead, at ``share`` of its tokens.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat; the placement changes in place.
    rank, slot
        Where.
    expert, share
        Which expert is to be there, and the part of its tokens that it receives there.
    """
    clear(assignment, demand, rank, slot)
    assignment.phy2log_RS[rank, slot] = expert
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, demand, expert, rank, share)


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
def place_in_order(assignment: Assignment, demand: Demand, order_E: Int32, z: float) -> None:
    """Place all replicas of the experts of ``order_E``, each on the rank that stays coolest with it."""
    for expert in order_E:
        for _ in range(assignment.replicas_E[expert]):
            rank = _coolest_rank(assignment, demand, expert, z)
            if rank < 0:
                rank = _make_room(assignment, demand, expert)
            put(assignment, demand, expert, rank, share_of(assignment.replicas_E[expert]))


@part
def _coolest_rank(assignment: Assignment, demand: Demand, expert: int, z: float) -> int:
    """Rank with a free slot, without the expert, and with the lowest risk once it holds it; -1 where none is.

    The least loaded rank is judged first: most others then carry more than it would, and need no judging.
    """
    slots = assignment.phy2log_RS.shape[1]
    share = share_of(assignment.replicas_E[expert])
    mean = share * demand.mean_E[expert]
    own = share * share * demand.gram_EE[expert, expert]
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
def _make_room(assignment: Assignment, demand: Demand, expert: int) -> int:
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
                clear(assignment, demand, giver, slot)
                assignment.filled_R[giver] -= 1
                assignment.phy2log_RS[giver, slot] = assignment.phy2log_RS[giver, slots - 1]
                assignment.phy2log_RS[giver, slots - 1] = -1
                put(assignment, demand, passed, roomy, share_of(assignment.replicas_E[passed]))
                return giver
    return -1
