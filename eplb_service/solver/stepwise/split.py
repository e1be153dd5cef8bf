"""The best split of one step's tokens over the replicas of their experts: a small max-flow problem, solved exactly.

Ranks are pushed down to a common level along chains of replicas: a rank above the level hands tokens of an expert to
another rank that holds it, which may hand on tokens of another expert. Where no rank above the level can reach one
below it any more, the ranks that were reached (the *tight set*) hold nothing that could be served elsewhere: their mean
is a lower bound, and the level is raised to it. The level that is left is the optimum of the linear program
``min max_r load_r`` over all splits, and the last tight set proves it.

References
----------
W. Dinkelbach, *On Nonlinear Fractional Programming*, 1967 (raising the level to the mean of a set that exceeds it).
L. R. Ford, D. R. Fulkerson, *Maximal Flow through a Network*, 1956 (augmenting paths).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Float32, Float64, Int32, Int64

_FINE = 1e-7
"""Part of a mean rank load below which an excess is rounding."""


class Sharing(NamedTuple):
    """Which ranks can hand tokens to which: the slots of the experts that have several replicas."""

    rank_P: Int32
    """int32 ``[P]``, rank of each physical slot."""
    expert_P: Int32
    """int32 ``[P]``, its logical expert."""
    first_E1: Int32
    """int32 ``[E + 1]``, where each expert's slots begin in ``slot_P``."""
    slot_P: Int32
    """int32 ``[P]``, physical slots by expert."""


@kernel
def sharing_of(phy2log_RS: Int32, experts: int) -> Sharing:
    """The slots of a placement by rank and by expert."""
    ranks, slots = phy2log_RS.shape
    rank_P = np.empty(ranks * slots, dtype=np.int32)
    expert_P = np.empty(ranks * slots, dtype=np.int32)
    first_E1 = np.zeros(experts + 1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            rank_P[r * slots + s] = r
            expert_P[r * slots + s] = phy2log_RS[r, s]
            first_E1[phy2log_RS[r, s] + 1] += 1
    for e in range(experts):
        first_E1[e + 1] += first_E1[e]
    slot_P = np.empty(ranks * slots, dtype=np.int32)
    filled_E = first_E1[:-1].copy()
    for p in range(ranks * slots):
        slot_P[filled_E[expert_P[p]]] = p
        filled_E[expert_P[p]] += 1
    return Sharing(rank_P, expert_P, first_E1, slot_P)


@kernel
def split_evenly(sharing: Sharing, heat_E: Float64, flow_P: Float64, load_R: Float64, whole: bool) -> None:
    """Spread each expert's tokens evenly over its replicas.

    Parameters
    ----------
    sharing
        The replicas.
    heat_E
        float64 ``[E]``, tokens of each expert.
    flow_P, load_R
        float64 ``[R*S]`` and ``[R]``, where tokens of each slot and rank are put.
    whole
        Whether in whole tokens.
    """
    for r in range(load_R.shape[0]):
        load_R[r] = 0.0
    for e in range(heat_E.shape[0]):
        first, end = sharing.first_E1[e], sharing.first_E1[e + 1]
        left = heat_E[e]
        for k in range(first, end):
            mine = left / (end - k)
            if whole:
                mine = np.floor(mine)
            left -= mine
            slot = sharing.slot_P[k]
            flow_P[slot] = mine
            load_R[sharing.rank_P[slot]] += mine


class Search(NamedTuple):
    """Memory of the breadth-first searches."""

    from_slot_R: Int32
    """int32 ``[R]``, the slot by which tokens come to each rank that was reached."""
    giver_E: Int32
    """int32 ``[E]``, the slot that hands on each expert that was reached, -1 for none."""
    reached_R: Bool
    queue_R: Int32
    tight_R: Bool
    """bool ``[R]``, the tight set that proves a level."""


@kernel
def search_memory(ranks: int, experts: int) -> Search:
    """Room for searches among so many ranks and experts."""
    return Search(
        np.empty(ranks, dtype=np.int32),
        np.empty(experts, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
        np.empty(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
    )


@kernel
def level(sharing: Sharing, flow_P: Float64, load_R: Float64, memory: Search, whole: bool) -> float:
    """Shift tokens between replicas, in place, until the hottest rank is as cool as any split can make it.

    Parameters
    ----------
    sharing
        Of the placement.
    flow_P, load_R
        float64 ``[P]`` and ``[R]``, any split of the step's tokens: tokens of each slot, and of each rank.
    memory
        ``memory.tight_R`` is left as the tight set: no tokens of its ranks can be served outside it. Empty where all
        ranks are at the mean.
    whole
        Whether tokens are not to be cut; ``flow_P`` then holds whole numbers.

    Returns
    -------
    float
        The optimum: the load of the hottest rank.
    """
    ranks = load_R.shape[0]
    slots = flow_P.shape[0] // ranks
    total = 0.0
    for r in range(ranks):
        total += load_R[r]
    target: float = np.ceil(total / ranks) if whole else total / ranks
    fine: float = 0.5 if whole else _FINE * total / ranks
    reached_R, tight_R = memory.reached_R, memory.tight_R
    for r in range(ranks):
        tight_R[r] = False
    while True:
        cool = _reach(sharing, flow_P, load_R, memory, target, fine, slots)
        if cool >= 0:
            _push(sharing, flow_P, load_R, memory, cool, target)
        elif cool == _NONE_HOT:
            return target
        else:
            held, count = 0.0, 0
            for r in range(ranks):
                if reached_R[r]:
                    held += load_R[r]
                    count += 1
            raised = np.ceil(held / count - 1e-9) if whole else held / count
            # What was reached is at the target but for rounding.
            if raised <= target:
                return target
            target = raised
            for r in range(ranks):
                tight_R[r] = reached_R[r]
            if not _any_above(load_R, target + fine):
                return target


_NONE_HOT, _NONE_COOL = -2, -1


@part
def _any_above(load_R: Float64, bound: float) -> bool:
    for r in range(load_R.shape[0]):  # noqa: SIM110 # numba compiles a loop, not any()
        if load_R[r] > bound:
            return True
    return False


@kernel
def _reach(
    sharing: Sharing,
    flow_P: Float64,
    load_R: Float64,
    memory: Search,
    target: float,
    fine: float,
    slots: int,
) -> int:
    """The nearest rank below the target that tokens of the hottest ones can reach; ``_NONE_HOT`` or ``_NONE_COOL``."""
    ranks = load_R.shape[0]
    if not _any_above(load_R, target + fine):
        return _NONE_HOT
    tail = 0
    for e in range(memory.giver_E.shape[0]):
        memory.giver_E[e] = -1
    for r in range(ranks):
        memory.reached_R[r] = load_R[r] > target + fine
        if memory.reached_R[r]:
            memory.from_slot_R[r] = -1
            memory.queue_R[tail] = r
            tail += 1
    head = 0
    while head < tail:
        rank = memory.queue_R[head]
        head += 1
        for slot in range(rank * slots, (rank + 1) * slots):
            e = sharing.expert_P[slot]
            first, end = sharing.first_E1[e], sharing.first_E1[e + 1]
            if end - first < 2 or flow_P[slot] <= fine or memory.giver_E[e] >= 0:
                continue
            memory.giver_E[e] = slot
            for k in range(first, end):
                other = sharing.slot_P[k]
                to: int = sharing.rank_P[other]
                if memory.reached_R[to]:
                    continue
                memory.reached_R[to] = True
                memory.from_slot_R[to] = other
                if load_R[to] < target - fine:
                    return to
                memory.queue_R[tail] = to
                tail += 1
    return _NONE_COOL


@part
def _push(
    sharing: Sharing, flow_P: Float64, load_R: Float64, memory: Search, cool: int, target: float
) -> None:
    """Hand tokens on along the chain that ends at ``cool``, as many as every link bears."""
    amount = target - load_R[cool]
    rank = cool
    while memory.from_slot_R[rank] >= 0:
        giver = memory.giver_E[sharing.expert_P[memory.from_slot_R[rank]]]
        amount = min(amount, flow_P[giver])
        rank = sharing.rank_P[giver]
    amount = min(amount, load_R[rank] - target)
    load_R[rank] -= amount
    load_R[cool] += amount
    rank = cool
    while memory.from_slot_R[rank] >= 0:
        taker = memory.from_slot_R[rank]
        giver = memory.giver_E[sharing.expert_P[taker]]
        flow_P[taker] += amount
        flow_P[giver] -= amount
        rank = sharing.rank_P[giver]


@kernel
def levels_of_episodes(phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32) -> Float32:
    """Load of the hottest rank under the best split of each episode, float32 ``[N]``; 0 in those without weight."""
    ranks, slots = phy2log_RS.shape
    experts, episodes = scaled_EN.shape
    sharing, memory = sharing_of(phy2log_RS, experts), search_memory(ranks, experts)
    flow_P, load_R, heat_E = np.empty(ranks * slots), np.empty(ranks), np.empty(experts)
    level_N = np.zeros(episodes, dtype=np.float32)
    for n in range(episodes):
        if share_N[n] <= 0:
            continue
        for e in range(experts):
            heat_E[e] = scaled_EN[e, n]
        split_evenly(sharing, heat_E, flow_P, load_R, False)
        level_N[n] = level(sharing, flow_P, load_R, memory, False)
    return level_N


@kernel
def expected_level(phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32) -> float:
    """Peak-to-average ratio under the best split of each episode, by the episodes' weights; 1.0 without tokens."""
    level_N = levels_of_episodes(phy2log_RS, scaled_EN, share_N)
    total, weights = 0.0, 0.0
    for n in range(share_N.shape[0]):
        total += share_N[n] * level_N[n]
        weights += share_N[n]
    mean: float = total / weights if weights > 0 else 1.0
    return mean


@kernel
def loads_by_step(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, whole: bool) -> Float64:
    """Tokens that each rank receives where each row's are split as well as can be, float64 ``[N, L, R]``.

    ``whole`` says whether tokens are not to be cut; heat is then whole numbers.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    loads_NLR = np.empty((rows, layers, ranks))
    flow_P, heat_E = np.empty(ranks * slots), np.empty(experts)
    memory = search_memory(ranks, experts)
    for layer in range(layers):
        sharing = sharing_of(phy2log_LRS[layer], experts)
        for n in range(rows):
            for e in range(experts):
                heat_E[e] = heat_NLE[n, layer, e]
            split_evenly(sharing, heat_E, flow_P, loads_NLR[n, layer], whole)
            level(sharing, flow_P, loads_NLR[n, layer], memory, whole)
    return loads_NLR
