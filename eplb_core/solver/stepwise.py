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

from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Float64, Int32, Int64
from eplb_core.solver.tables import slots_by_expert

_FINE = 1e-7
"""Part of a mean rank load below which an excess is rounding."""
_ROUNDING = 1e-6
"""Part of a mean rank load that a slot must have of cut tokens to have any: less is rounding."""
_NONE_HOT, _NONE_COOL = -2, -1


class Replicas(NamedTuple):
    """Replicas of a placement, with working memory for the searches among them."""

    rank_P: Int32
    """int32 ``[P]``, rank of each physical slot."""
    expert_P: Int32
    """int32 ``[P]``, logical expert of each physical slot."""
    first_E1: Int32
    """int32 ``[E + 1]``, where each expert's slots begin in ``slot_P``."""
    slot_P: Int32
    """int32 ``[P]``, physical slots by expert."""
    from_slot_R: Int32
    """int32 ``[R]``, the slot by which tokens come to each rank that was reached."""
    giver_E: Int32
    """int32 ``[E]``, the slot that hands on each expert that was reached, -1 for none."""
    reached_R: Bool
    """bool ``[R]``, ranks that a search has reached."""
    queue_R: Int32
    """int32 ``[R]``, ranks in the order in which they were reached."""
    tight_R: Bool
    """bool ``[R]``, the tight set that proves a level."""


@kernel
def replicas_in(phy2log_RS: Int32, experts: int) -> Replicas:
    """Replicas of a complete placement, and room for searches among them."""
    ranks, slots = phy2log_RS.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    rank_P = np.empty(ranks * slots, dtype=np.int32)
    for p in range(rank_P.shape[0]):
        rank_P[p] = p // slots
    return Replicas(
        rank_P,
        phy2log_RS.ravel().copy(),
        first_E1,
        slot_P,
        np.empty(ranks, dtype=np.int32),
        np.empty(experts, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
        np.empty(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
    )


@kernel
def split_evenly(replicas: Replicas, heat_E: Float64, flow_P: Float64, load_R: Float64, whole: bool) -> None:
    """Spread each expert's tokens evenly over its replicas.

    For the arguments see ``model``.
    """
    for r in range(load_R.shape[0]):
        load_R[r] = 0.0
    for e in range(heat_E.shape[0]):
        first, end = replicas.first_E1[e], replicas.first_E1[e + 1]
        left = heat_E[e]
        for k in range(first, end):
            mine = left / (end - k)
            if whole:
                mine = np.floor(mine)
            left -= mine
            slot = replicas.slot_P[k]
            flow_P[slot] = mine
            load_R[replicas.rank_P[slot]] += mine


@kernel
def level(replicas: Replicas, flow_P: Float64, load_R: Float64, whole: bool) -> float:
    """Shift tokens between replicas, in place, until the hottest rank is as cool as any split can make it."""
    ranks = load_R.shape[0]
    slots = flow_P.shape[0] // ranks
    total = 0.0
    for r in range(ranks):
        total += load_R[r]
    target: float = np.ceil(total / ranks) if whole else total / ranks
    fine: float = 0.5 if whole else _FINE * total / ranks
    reached_R, tight_R = replicas.reached_R, replicas.tight_R
    for r in range(ranks):
        tight_R[r] = False
    while True:
        cool = _reach(replicas, flow_P, load_R, target, fine, slots)
        if cool >= 0:
            _push(replicas, flow_P, load_R, cool, target)
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


@part
def _any_above(load_R: Float64, bound: float) -> bool:
    for r in range(load_R.shape[0]):  # noqa: SIM110 # numba compiles a loop, not any()
        if load_R[r] > bound:
            return True
    return False


@kernel
def _reach(
    replicas: Replicas,
    flow_P: Float64,
    load_R: Float64,
    target: float,
    fine: float,
    slots: int,
) -> int:
    """The nearest rank below the target that tokens of the hottest ones can reach; ``_NONE_HOT`` or ``_NONE_COOL``."""
    ranks = load_R.shape[0]
    if not _any_above(load_R, target + fine):
        return _NONE_HOT
    tail = 0
    for e in range(replicas.giver_E.shape[0]):
        replicas.giver_E[e] = -1
    for r in range(ranks):
        replicas.reached_R[r] = load_R[r] > target + fine
        if replicas.reached_R[r]:
            replicas.from_slot_R[r] = -1
            replicas.queue_R[tail] = r
            tail += 1
    head = 0
    while head < tail:
        rank = replicas.queue_R[head]
        head += 1
        for slot in range(rank * slots, (rank + 1) * slots):
            e = replicas.expert_P[slot]
            first, end = replicas.first_E1[e], replicas.first_E1[e + 1]
            if end - first < 2 or flow_P[slot] <= fine or replicas.giver_E[e] >= 0:
                continue
            replicas.giver_E[e] = slot
            for k in range(first, end):
                other = replicas.slot_P[k]
                to: int = replicas.rank_P[other]
                if replicas.reached_R[to]:
                    continue
                replicas.reached_R[to] = True
                replicas.from_slot_R[to] = other
                if load_R[to] < target - fine:
                    return to
                replicas.queue_R[tail] = to
                tail += 1
    return _NONE_COOL


@part
def _push(replicas: Replicas, flow_P: Float64, load_R: Float64, cool: int, target: float) -> None:
    """Hand tokens on along the chain that ends at ``cool``, as many as every link bears."""
    amount = target - load_R[cool]
    rank = cool
    while replicas.from_slot_R[rank] >= 0:
        giver = replicas.giver_E[replicas.expert_P[replicas.from_slot_R[rank]]]
        amount = min(amount, flow_P[giver])
        rank = replicas.rank_P[giver]
    amount = min(amount, load_R[rank] - target)
    load_R[rank] -= amount
    load_R[cool] += amount
    rank = cool
    while replicas.from_slot_R[rank] >= 0:
        taker = replicas.from_slot_R[rank]
        giver = replicas.giver_E[replicas.expert_P[taker]]
        flow_P[taker] += amount
        flow_P[giver] -= amount
        rank = replicas.rank_P[giver]


def levels_of_episodes(phy2log_RS: Int32, scaled_EN: Float32) -> Float32:
    """Load of the hottest rank under the best split of each episode, float32 ``[N]``; 0 without tokens."""
    heat_NLE = np.ascontiguousarray(scaled_EN.T[:, None], dtype=np.float64)
    loads_N1R = loads_by_step(heat_NLE, phy2log_RS[None], False)
    level_N: Float32 = loads_N1R.max(axis=(1, 2)).astype(np.float32)
    return level_N


@kernel
def loads_by_step(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, whole: bool) -> Float64:
    """Tokens that each rank receives where each row's are split as well as can be, float64 ``[N, L, R]``.

    ``whole`` says whether tokens are not to be cut; heat is then whole numbers.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    loads_NLR = np.empty((rows, layers, ranks))
    flow_P, heat_E = np.empty(ranks * slots), np.empty(experts)
    for layer in range(layers):
        replicas = replicas_in(phy2log_LRS[layer], experts)
        for n in range(rows):
            for e in range(experts):
                heat_E[e] = heat_NLE[n, layer, e]
            split_evenly(replicas, heat_E, flow_P, loads_NLR[n, layer], whole)
            level(replicas, flow_P, loads_NLR[n, layer], whole)
    return loads_NLR


@kernel
def slots_by_step(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, whole: bool) -> Float64:
    """Tokens that each slot receives where each row's are split as well as can be, float64 ``[N, L, R*S]``.

    Of all splits that are as good it is one that begins with even shares and takes of the hottest ranks what they must
    hand on; ``loads_by_step`` has the sums of its ranks. ``whole`` as for that.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    tokens_NLP = np.empty((rows, layers, ranks * slots))
    load_R, heat_E = np.empty(ranks), np.empty(experts)
    for layer in range(layers):
        replicas = replicas_in(phy2log_LRS[layer], experts)
        for n in range(rows):
            total = 0.0
            for e in range(experts):
                heat_E[e] = heat_NLE[n, layer, e]
                total += heat_E[e]
            flow_P = tokens_NLP[n, layer]
            split_evenly(replicas, heat_E, flow_P, load_R, whole)
            level(replicas, flow_P, load_R, whole)
            for p in range(ranks * slots):
                if flow_P[p] <= _ROUNDING * total / ranks:
                    flow_P[p] = 0.0
    return tokens_NLP
