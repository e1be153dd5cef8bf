"""Construction of a placement from scratch: choose replica counts, then place the hottest replicas first.

Replica counts are chosen greedily: each spare replica goes to the expert whose replicas are hottest, as in DeepSeek's
EPLB. Each replica is then placed on the coolest rank, hottest replica first (Graham's longest-processing-time rule).
Ranks are compared by risk with full covariance rather than by load, so experts that are hot at the same time end up on
different ranks. If all ranks with a free slot already hold the expert, a replica of a different expert is moved off a
full rank to make room. An ``Assignment`` keeps running sums, so that judging a change is cheap.

In small layers, a tree search chooses replica counts and placement jointly. This is the first of FlashLB's three ideas.
Experts are sorted by heat and divided into groups. A tree node fixes the replica counts of the experts in the first
groups. Its children give the next group the greedy number of replicas, or a few more or fewer. A child is judged by
look-ahead: its remaining replicas are assigned and placed greedily. Only the most promising nodes, the beam, are
expanded to the next group.

This differs from FlashLB in two ways. First, leaves are judged by the risk of the hottest rank with full covariance, as
in the local search that follows. Second, several leaves, not just the best one, are searched further. FlashLB's other
two ideas are the objective over several episodes (``evaluation``) and layer-wise cherry-picking (``planner.decide``).

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
    """Return the indices that sort ``values`` from largest to smallest, int32. Equal values keep their order."""
    return np.argsort(-values, kind="stable").astype(np.int32)


def largest_first(share_EG: Float32) -> Int32:
    """Return the sources of each expert, largest share first, int32 ``[E, G]``.

    Sources with equal shares keep their order.

    Parameters
    ----------
    share_EG
        float32 ``[E, G]``, fraction of each expert's tokens that comes from each source; non-negative.

    Examples
    --------
    >>> largest_first(np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]], dtype=np.float32)).tolist()
    [[1, 2, 0], [0, 2, 1]]
    """
    # The bit patterns of non-negative floats sort in the same order as the floats. Packing the source into the same
    # integer makes the sort four times as fast as a stable argsort.
    key_EG = (~share_EG.view(np.int32)).astype(np.int64) << 32 | np.arange(share_EG.shape[1])
    key_EG.sort(axis=1)
    return key_EG.astype(np.int32)


@kernel
def _allot_replicas(replicas_E: Int32, heat_E: Float32, budget: int, ranks: int) -> int:
    """Add replicas one by one, each to the expert whose replicas are hottest.

    Experts without heat get replicas last.

    Parameters
    ----------
    replicas_E
        int32 ``[E]``, replica counts, changed in place. No count exceeds ``ranks``.
    heat_E
        float32 ``[E]``, heat of each expert.
    budget
        Number of replicas to add.
    ranks
        Number of ranks.

    Returns
    -------
    int
        Number of replicas that could not be added because every expert already has a replica on every rank.
    """
    experts = replicas_E.shape[0]
    for remaining in range(budget, 0, -1):
        gainer = -1
        for e in range(experts):
            if replicas_E[e] < ranks and (
                gainer < 0 or heat_E[e] * replicas_E[gainer] > heat_E[gainer] * replicas_E[e]
            ):
                gainer = e
        if gainer < 0:
            return remaining
        replicas_E[gainer] += 1
    return 0


@kernel
def _greedy_replicas(heat_E: Float32, ranks: int, slots: int) -> Int32:
    """Return greedy replica counts, int32 ``[E]``: at least one per expert, ``ranks*slots`` in total."""
    experts = heat_E.shape[0]
    replicas_E = np.ones(experts, dtype=np.int32)
    _allot_replicas(replicas_E, heat_E, ranks * slots - experts, ranks)
    return replicas_E


class Assignment(NamedTuple):
    """Placement of one layer with running sums that make it cheap to judge a change.

    All arrays are updated in place.
    """

    phy2log_RS: Int32
    """int32 ``[R, S]``, expert in each slot; -1 if the slot is empty."""
    replicas_E: Int32
    """int32 ``[E]``, target replica count of each expert."""
    share_ER: Float32
    """float32 ``[E, R]``, fraction of the expert's tokens that the rank's replica receives; 0 if it has none."""
    holds_ER: Bool
    """bool ``[E, R]``, True if the rank holds the expert."""
    filled_R: Int32
    """int32 ``[R]``, number of filled slots, which precede the empty ones."""
    load_R: Float32
    """float32 ``[R]``, mean load."""
    variance_R: Float32
    """float32 ``[R]``, variance of the load over the episodes."""
    cross_RE: Float32
    """float32 ``[R, E]``, covariance of the rank's load with each expert's heat."""


@kernel
def _empty_assignment(replicas_E: Int32, ranks: int, slots: int) -> Assignment:
    """Return an empty assignment; ``replicas_E`` contains the target replica counts."""
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
    """Return the assignment of a complete placement.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, the placement.
    share_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.
    heat
        Normalised heat of the layer.
    """
    ranks, slots = phy2log_RS.shape
    assignment = _empty_assignment(replicas_of(phy2log_RS, heat.mean_E.shape[0]), ranks, slots)
    for r in range(ranks):
        for s in range(slots):
            _put(assignment, heat, phy2log_RS[r, s], r, share_RS[r, s])
    return assignment


@kernel
def replicas_of(phy2log_RS: Int32, experts: int) -> Int32:
    """Return the replica count of each expert, int32 ``[E]``."""
    replicas_E = np.zeros(experts, dtype=np.int32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            replicas_E[phy2log_RS[r, s]] += 1
    return replicas_E


@kernel
def even_shares(phy2log_RS: Int32, experts: int) -> Float32:
    """Return each slot's fraction of its expert's tokens under an even split, float32 ``[R, S]``."""
    replicas_E = replicas_of(phy2log_RS, experts)
    share_RS = np.empty(phy2log_RS.shape, dtype=np.float32)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            share_RS[r, s] = share_of(replicas_E[phy2log_RS[r, s]])
    return share_RS


@part
def share_of(replicas: int) -> float:
    """Return each replica's fraction of an expert's tokens under an even split, float32."""
    share: float = np.float32(1.0) / np.float32(replicas)
    return share


@kernel
def shift_load(assignment: Assignment, heat: Heat, expert: int, rank: int, share: float) -> None:
    """Change the fraction of an expert's tokens that a rank receives, without changing its slots.

    Parameters
    ----------
    assignment
        The placement, changed in place.
    heat
        Normalised heat of the layer.
    expert
        The expert.
    rank
        The rank.
    share
        Amount added to the fraction; may be negative.
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
    """Fill the next empty slot of a rank with a replica that receives ``share`` of its expert's tokens."""
    assignment.phy2log_RS[rank, assignment.filled_R[rank]] = expert
    assignment.filled_R[rank] += 1
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, heat, expert, rank, share)


@kernel
def _clear(assignment: Assignment, heat: Heat, rank: int, slot: int) -> None:
    """Subtract the contribution of a slot's expert from the rank's sums.

    ``phy2log_RS`` still contains the expert, so the caller must refill or remove the slot next.
    """
    expert = assignment.phy2log_RS[rank, slot]
    shift_load(assignment, heat, expert, rank, -assignment.share_ER[expert, rank])
    assignment.share_ER[expert, rank] = 0
    assignment.holds_ER[expert, rank] = False


@kernel
def replace(assignment: Assignment, heat: Heat, rank: int, slot: int, expert: int, share: float) -> None:
    """Replace the expert of a slot.

    Parameters
    ----------
    assignment
        The placement, changed in place.
    heat
        Normalised heat of the layer.
    rank
        The rank.
    slot
        Slot of ``rank``.
    expert
        New expert, which the rank does not hold yet.
    share
        Fraction of the new expert's tokens that the slot receives.
    """
    _clear(assignment, heat, rank, slot)
    assignment.phy2log_RS[rank, slot] = expert
    assignment.holds_ER[expert, rank] = True
    shift_load(assignment, heat, expert, rank, share)


@kernel
def hottest_rank(assignment: Assignment, z: float) -> tuple[int, float]:
    """Return the rank with the highest risk, and its risk."""
    hot = 0
    hot_risk = np.float32(-1.0)
    for r in range(assignment.load_R.shape[0]):
        rank_risk = risk(assignment.load_R[r], assignment.variance_R[r], z)
        if rank_risk > hot_risk:
            hot = r
            hot_risk = rank_risk
    return hot, hot_risk


def place(replicas_E: Int32, heat: Heat, ranks: int, slots: int, z: float) -> Assignment:
    """Place the replicas of all experts greedily, hottest first.

    Parameters
    ----------
    replicas_E
        int32 ``[E]``, replica counts, which sum to ``ranks*slots``.
    heat
        Normalised heat of the layer.
    ranks
        Number of ranks.
    slots
        Slots per rank.
    z
        Weight of the standard deviation in a rank's risk.

    Examples
    --------
    Experts 0 and 1 have two replicas each. Each rank gets one replica of each, plus one of the two cooler experts:

    >>> from eplb_core.solver.model import heat_of
    >>> heat = heat_of(np.array([[6.0, 4.0, 3.0, 3.0]]), ranks=2)
    >>> assignment = place(np.array([2, 2, 1, 1], dtype=np.int32), heat, ranks=2, slots=3, z=0.0)
    >>> assignment.phy2log_RS.tolist()
    [[0, 2, 1], [0, 3, 1]]
    >>> assignment.load_R.tolist()
    [1.0, 1.0]
    """
    order_E = descending(np.divide(expert_heat(heat, z), replicas_E, dtype=np.float32))
    return _place_in_order(replicas_E, heat, ranks, slots, order_E, z)


@kernel
def _place_in_order(
    replicas_E: Int32, heat: Heat, ranks: int, slots: int, order_E: Int32, z: float
) -> Assignment:
    """Place all replicas, expert by expert in the order ``order_E``, each on the rank that would then be coolest."""
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
    """Return the rank that would have the lowest risk after receiving a replica of ``expert``.

    Only ranks that have an empty slot and do not hold the expert yet are considered. If there are none, the result is
    -1.
    """
    slots = assignment.phy2log_RS.shape[1]
    share = share_of(assignment.replicas_E[expert])
    mean = share * heat.mean_E[expert]
    replica_variance = share * share * heat.gram_EE[expert, expert]
    coolest = -1
    lowest = np.float32(np.inf)
    for r in range(assignment.load_R.shape[0]):
        # A rank's risk is at least its mean load.
        if assignment.load_R[r] + mean >= lowest:
            continue
        if assignment.filled_R[r] == slots or assignment.holds_ER[expert, r]:
            continue
        variance = (
            assignment.variance_R[r]
            + np.float32(2.0) * share * assignment.cross_RE[r, expert]
            + replica_variance
        )
        rank_risk = risk(assignment.load_R[r] + mean, variance, z)
        if rank_risk < lowest:
            coolest = r
            lowest = rank_risk
    return coolest


@part
def _make_room(assignment: Assignment, heat: Heat, expert: int) -> int:
    """Free a slot for ``expert`` on a full rank and return that rank.

    This is needed if all ranks with an empty slot already hold the expert.

    A full rank without the expert moves one of its replicas to a rank with an empty slot. Such a replica exists as long
    as the expert has fewer replicas than there are ranks. Not counting ``expert``, the full rank then holds more
    experts than the rank with the empty slot, which therefore lacks at least one of them.
    """
    ranks, slots = assignment.phy2log_RS.shape
    roomy = 0
    while assignment.filled_R[roomy] == slots:
        roomy += 1
    for giver in range(ranks):
        if assignment.holds_ER[expert, giver]:
            continue
        for slot in range(slots):
            evicted = assignment.phy2log_RS[giver, slot]
            if not assignment.holds_ER[evicted, roomy]:
                _clear(assignment, heat, giver, slot)
                assignment.filled_R[giver] -= 1
                assignment.phy2log_RS[giver, slot] = assignment.phy2log_RS[giver, slots - 1]
                assignment.phy2log_RS[giver, slots - 1] = -1
                _put(assignment, heat, evicted, roomy, share_of(assignment.replicas_E[evicted]))
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
    """Search for replica counts, judge each candidate by greedy placement, and return the best ones.

    Parameters
    ----------
    heat
        Normalised heat of the layer.
    ranks
        Number of ranks.
    slots
        Slots per rank.
    z
        Weight of the standard deviation in a rank's risk.
    leaves
        Maximum number of results. With 0, the greedy counts are returned without a search.
    groups
        Number of expert groups, which is the depth of the tree.
    spread
        Maximum difference between a group's number of replicas and the greedy choice.
    beam
        Number of nodes kept at each level.

    Returns
    -------
    replicas_KE : Int32
        int32 ``[K, E]``, replica counts, lowest risk first.
    risk_K : Float64
        float64 ``[K]``, risk of the hottest rank after greedy placement; infinite if there was no search.

    Examples
    --------
    Six slots hold four experts. The two spare replicas go to the hottest experts:

    >>> from eplb_core.solver.model import heat_of
    >>> heat = heat_of(np.array([[6.0, 4.0, 3.0, 3.0]]), ranks=2)
    >>> replicas_KE, risk_K = tree_search(heat, ranks=2, slots=3, z=0.0, leaves=2)
    >>> replicas_KE.tolist()
    [[2, 2, 1, 1], [2, 1, 2, 1]]
    >>> risk_K.round(4).tolist()
    [1.0, 1.0625]
    """
    heat_E = expert_heat(heat, z)
    greedy_E = _greedy_replicas(heat_E, ranks, slots)
    spare = ranks * slots - greedy_E.size
    if leaves == 0 or spare == 0:
        return greedy_E[None, :], np.array([np.inf])
    risk_of: dict[bytes, float] = {}

    def judge(leaf_E: Int32) -> float:
        key = leaf_E.tobytes()
        if key not in risk_of:
            order_E = descending(np.divide(heat_E, leaf_E, dtype=np.float32))
            risk_of[key] = _risk_once_placed(leaf_E, heat, ranks, slots, order_E, z)
        return risk_of[key]

    judge(greedy_E)
    by_heat_E = descending(heat_E)
    frontier = [np.ones_like(greedy_E)]
    for group_M, rest_M in _cut_into_groups(greedy_E, by_heat_E, groups):
        children: dict[bytes, tuple[float, Int32]] = {}
        for node_E in frontier:
            budget = ranks * slots - int(node_E.sum())
            greedy_child_E, _ = _allot_among(node_E, heat_E, np.concatenate([group_M, rest_M]), budget, ranks)
            greedy_budget = int((greedy_child_E - node_E)[group_M].sum())
            for group_budget in range(
                max(0, greedy_budget - spread), min(budget, greedy_budget + spread) + 1
            ):
                child_E, group_surplus = _allot_among(node_E, heat_E, group_M, group_budget, ranks)
                leaf_E, rest_surplus = _allot_among(child_E, heat_E, rest_M, budget - group_budget, ranks)
                if group_surplus == 0 and rest_surplus == 0:
                    children[child_E.tobytes()] = judge(leaf_E), child_E
        coolest = sorted(children.values(), key=lambda child: child[0])[:beam]
        frontier = [child_E for _, child_E in coolest]
    best = sorted(risk_of.items(), key=lambda leaf: leaf[1])[:leaves]
    best_KE = np.array([np.frombuffer(key, dtype=np.int32) for key, _ in best])
    return best_KE, np.array([leaf_risk for _, leaf_risk in best])


@kernel
def _risk_once_placed(
    replicas_E: Int32, heat: Heat, ranks: int, slots: int, order_E: Int32, z: float
) -> float:
    """Return the risk of the hottest rank after placing all replicas in the order of ``order_E``."""
    hot_risk: float = hottest_rank(_place_in_order(replicas_E, heat, ranks, slots, order_E, z), z)[1]
    return hot_risk


def _cut_into_groups(replicas_E: Int32, by_heat_E: Int32, groups: int) -> Iterator[tuple[Int32, Int32]]:
    """Divide the experts into groups with about equal numbers of replicas, hottest first.

    Yields the experts in each group and the experts in all later groups.
    """
    total_E = replicas_E[by_heat_E].cumsum()
    groups = min(groups, total_E.size)
    bounds = [0, *(np.searchsorted(total_E * groups, total_E[-1] * np.arange(1, groups)) + 1), total_E.size]
    for low, high in pairwise(bounds):
        yield by_heat_E[low:high], by_heat_E[high:]


def _allot_among(
    replicas_E: Int32, heat_E: Float32, member_M: Int32, budget: int, ranks: int
) -> tuple[Int32, int]:
    """Add ``budget`` replicas greedily to the experts in ``member_M``.

    Returns the new counts, int32 ``[E]``, and the number of replicas that could not be added.
    """
    allotted_E = replicas_E.copy()
    allotted_M = replicas_E[member_M]
    surplus = _allot_replicas(allotted_M, heat_E[member_M], budget, ranks)
    allotted_E[member_M] = allotted_M
    return allotted_E, surplus
