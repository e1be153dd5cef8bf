"""Optimal split of one step's tokens over the replicas of their experts: a small max-flow problem, solved exactly.

The algorithm brings all ranks down to a common level. A rank above the level passes tokens of an expert to another rank
that holds the expert. That rank may in turn pass on tokens of a different expert, so tokens move along chains of
replicas. One search from all ranks above the level finds a chain to every rank below it that they can reach.

Sometimes no rank above the level can reach a rank below it. The ranks reached so far, the *tight set*, then hold no
tokens that a rank outside the set could process. The mean load of the tight set is a lower bound on the level, so the
level is raised to it. The final level is the optimum of the linear program ``min max_r load_r`` over all splits, and
the last tight set proves it.

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

_TOLERANCE = 1e-7
"""Maximum excess over the level that counts as a rounding error, as a fraction of the mean rank load."""
_ROUNDING = 1e-6
"""Maximum flow through a slot that counts as zero, as a fraction of the mean rank load. This matters only for
fractional tokens."""
_NO_HOT_RANK = -1
"""Result of ``_pass_on`` if no rank is above the level."""


class Replicas(NamedTuple):
    """Replicas of a placement, with scratch memory for searches."""

    rank_P: Int32
    """int32 ``[P]``, rank of each physical slot."""
    expert_P: Int32
    """int32 ``[P]``, logical expert of each physical slot."""
    first_E1: Int32
    """int32 ``[E + 1]``, start of each expert's slots in ``slot_P``."""
    slot_P: Int32
    """int32 ``[P]``, physical slots ordered by expert."""
    first_R1: Int32
    """int32 ``[R + 1]``, start of each rank's slots in ``shared_P``."""
    shared_P: Int32
    """int32 ``[P]``, slots of experts with at least two replicas, ordered by rank. Only these can pass on tokens.
    Entries from ``first_R1[R]`` on are unused."""
    from_slot_R: Int32
    """int32 ``[R]``, slot through which each reached rank receives tokens."""
    giver_E: Int32
    """int32 ``[E]``, slot that passes on tokens of each reached expert; -1 if the expert was not reached."""
    reached_R: Bool
    """bool ``[R]``, ranks that the search has reached."""
    queue_R: Int32
    """int32 ``[R]``, ranks in the order in which the search reached them."""
    tight_R: Bool
    """bool ``[R]``, tight set that proves the level."""


@kernel
def replicas_in(phy2log_RS: Int32, experts: int) -> Replicas:
    """Return the replicas of a complete placement, with scratch memory for searches."""
    ranks, slots = phy2log_RS.shape
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    rank_P = np.empty(ranks * slots, dtype=np.int32)
    first_R1 = np.zeros(ranks + 1, dtype=np.int32)
    shared_P = np.zeros(ranks * slots, dtype=np.int32)
    shared = 0
    for r in range(ranks):
        for s in range(slots):
            rank_P[r * slots + s] = r
            expert = phy2log_RS[r, s]
            if first_E1[expert + 1] - first_E1[expert] > 1:
                shared_P[shared] = r * slots + s
                shared += 1
        first_R1[r + 1] = shared
    return Replicas(
        rank_P,
        phy2log_RS.ravel().copy(),
        first_E1,
        slot_P,
        first_R1,
        shared_P,
        np.empty(ranks, dtype=np.int32),
        np.empty(experts, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
        np.empty(ranks, dtype=np.int32),
        np.zeros(ranks, dtype=np.bool_),
    )


@kernel
def split_evenly(replicas: Replicas, heat_E: Float64, flow_P: Float64, load_R: Float64, whole: bool) -> None:
    """Split each expert's tokens evenly over its replicas.

    Parameters
    ----------
    replicas
        Replicas of the placement.
    heat_E
        float64 ``[E]``, tokens of each expert.
    flow_P
        float64 ``[P]``, output: tokens of each slot.
    load_R
        float64 ``[R]``, output: tokens of each rank.
    whole
        True to keep tokens whole. An expert's slots then differ by at most one token.
    """
    for r in range(load_R.shape[0]):
        load_R[r] = 0.0
    for e in range(heat_E.shape[0]):
        first = replicas.first_E1[e]
        end = replicas.first_E1[e + 1]
        remaining = heat_E[e]
        for k in range(first, end):
            tokens = remaining / (end - k)
            if whole:
                tokens = np.floor(tokens)
            remaining -= tokens
            slot = replicas.slot_P[k]
            flow_P[slot] = tokens
            load_R[replicas.rank_P[slot]] += tokens


@kernel
def level(replicas: Replicas, flow_P: Float64, load_R: Float64, whole: bool) -> float:
    """Make a split optimal, in place, and return the load of its hottest rank.

    Parameters
    ----------
    replicas
        Replicas of the placement. ``tight_R`` is set to the tight set that proves the result.
    flow_P
        float64 ``[P]``, tokens of each slot: any valid split, changed in place.
    load_R
        float64 ``[R]``, tokens of each rank, changed in place.
    whole
        True if tokens are whole numbers and must remain so.
    """
    ranks = load_R.shape[0]
    total = 0.0
    for r in range(ranks):
        total += load_R[r]
    target: float = np.ceil(total / ranks) if whole else total / ranks
    tolerance: float = 0.5 if whole else _TOLERANCE * total / ranks
    reached_R = replicas.reached_R
    tight_R = replicas.tight_R
    for r in range(ranks):
        tight_R[r] = False
    while True:
        chains = _pass_on(replicas, flow_P, load_R, target, tolerance)
        if chains == _NO_HOT_RANK:
            return target
        if chains == 0:
            held = 0.0
            count = 0
            for r in range(ranks):
                if reached_R[r]:
                    held += load_R[r]
                    count += 1
            raised = np.ceil(held / count - 1e-9) if whole else held / count
            # If the mean does not exceed the target, the reached ranks are above it only because of rounding.
            if raised <= target:
                return target
            target = raised
            for r in range(ranks):
                tight_R[r] = reached_R[r]
            if not _any_above(load_R, target + tolerance):
                return target


@part
def _any_above(load_R: Float64, bound: float) -> bool:
    """Return True if a rank's load exceeds ``bound``."""
    for r in range(load_R.shape[0]):  # noqa: SIM110 # numba compiles a loop, not any()
        if load_R[r] > bound:
            return True
    return False


@kernel
def _pass_on(replicas: Replicas, flow_P: Float64, load_R: Float64, target: float, tolerance: float) -> int:
    """Search breadth-first from all ranks above the target, and move tokens to every rank below it that is reached.

    Returns
    -------
    int
        Number of ranks below the target that were reached; ``_NO_HOT_RANK`` if no rank is above the target.
    """
    ranks = load_R.shape[0]
    if not _any_above(load_R, target + tolerance):
        return _NO_HOT_RANK
    tail = 0
    for e in range(replicas.giver_E.shape[0]):
        replicas.giver_E[e] = -1
    for r in range(ranks):
        replicas.reached_R[r] = load_R[r] > target + tolerance
        if replicas.reached_R[r]:
            replicas.from_slot_R[r] = -1
            replicas.queue_R[tail] = r
            tail += 1
    chains = 0
    head = 0
    while head < tail:
        rank = replicas.queue_R[head]
        head += 1
        for j in range(replicas.first_R1[rank], replicas.first_R1[rank + 1]):
            slot = replicas.shared_P[j]
            e = replicas.expert_P[slot]
            if flow_P[slot] <= tolerance or replicas.giver_E[e] >= 0:
                continue
            replicas.giver_E[e] = slot
            for k in range(replicas.first_E1[e], replicas.first_E1[e + 1]):
                next_slot = replicas.slot_P[k]
                next_rank = replicas.rank_P[next_slot]
                if replicas.reached_R[next_rank]:
                    continue
                replicas.reached_R[next_rank] = True
                replicas.from_slot_R[next_rank] = next_slot
                if load_R[next_rank] < target - tolerance:
                    _push(replicas, flow_P, load_R, next_rank, target)
                    chains += 1
                replicas.queue_R[tail] = next_rank
                tail += 1
    return chains


@part
def _push(replicas: Replicas, flow_P: Float64, load_R: Float64, cool_rank: int, target: float) -> None:
    """Move tokens along the chain that ends at ``cool_rank``, limited by the smallest flow on the chain.

    Nothing moves if chains that were found earlier have used up the tokens above the target.
    """
    amount = target - load_R[cool_rank]
    rank = cool_rank
    while replicas.from_slot_R[rank] >= 0:
        giver = replicas.giver_E[replicas.expert_P[replicas.from_slot_R[rank]]]
        amount = min(amount, flow_P[giver])
        rank = replicas.rank_P[giver]
    amount = max(min(amount, load_R[rank] - target), 0.0)
    load_R[rank] -= amount
    load_R[cool_rank] += amount
    rank = cool_rank
    while replicas.from_slot_R[rank] >= 0:
        receiver = replicas.from_slot_R[rank]
        giver = replicas.giver_E[replicas.expert_P[receiver]]
        flow_P[receiver] += amount
        flow_P[giver] -= amount
        rank = replicas.rank_P[giver]


def optimal_peaks(phy2log_RS: Int32, scaled_EN: Float32) -> Float32:
    """Return the load of the hottest rank under each episode's optimal split, float32 ``[N]``.

    An episode without tokens has a load of 0.

    Examples
    --------
    Expert 0 has a replica on each rank. All 4 of its tokens go to rank 1, so that each rank processes 6:

    >>> phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    >>> optimal_peaks(phy2log_RS, np.array([[4], [6], [2]], dtype=np.float32))
    array([6.], dtype=float32)
    """
    heat_NLE = np.ascontiguousarray(scaled_EN.T[:, None], dtype=np.float64)
    loads_N1R = loads_by_step(heat_NLE, phy2log_RS[None], False)
    level_N: Float32 = loads_N1R.max(axis=(1, 2)).astype(np.float32)
    return level_N


@kernel
def loads_by_step(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, whole: bool) -> Float64:
    """Return each rank's tokens under the optimal split of each step, float64 ``[N, L, R]``.

    Parameters
    ----------
    heat_NLE
        ``[N, L, E]``, tokens of each expert in each step.
    phy2log_LRS
        int32 ``[L, R, S]``, placement.
    whole
        True to keep tokens whole; ``heat_NLE`` must then contain whole numbers.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    loads_NLR = np.empty((rows, layers, ranks))
    flow_P = np.empty(ranks * slots)
    heat_E = np.empty(experts)
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
    """Return each slot's tokens under the optimal split of each step, float64 ``[N, L, R*S]``.

    Several splits can be optimal. This one starts from even splits and moves only the tokens that the hottest ranks
    must pass on. Its per-rank sums equal the result of ``loads_by_step``.

    Parameters
    ----------
    heat_NLE
        ``[N, L, E]``, tokens of each expert in each step.
    phy2log_LRS
        int32 ``[L, R, S]``, placement.
    whole
        True to keep tokens whole; ``heat_NLE`` must then contain whole numbers.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    tokens_NLP = np.empty((rows, layers, ranks * slots))
    load_R = np.empty(ranks)
    heat_E = np.empty(experts)
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
