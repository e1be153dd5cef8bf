"""Simulated annealing of a placement for hosts that split every step's tokens optimally (``STEPWISE``).

Under an optimal split, it does not matter how evenly the experts' mean heat is spread over the ranks. What matters is
which ranks share replicas: a set of ranks can be overloaded by experts that have no replica outside the set. The search
therefore treats each step of the window as a scenario, and keeps a split of every scenario under its placement.

Computing optimal splits (``stepwise``) for every change would take up nearly all of a decision's time. The search
*relaxes* the splits instead: two ranks that share an expert exchange its tokens until both ranks are equally loaded or
one of them has no more tokens of the expert. Repeated for all experts, this approaches the split with the smallest sum
of squared loads, which is an optimal one. A change disturbs few ranks, so a few repetitions are enough. All scenarios
are relaxed at the same time, in SIMD lanes. With 256 experts on 32 ranks x 9 slots, a change is evaluated in 3 us
instead of 100 us.

A relaxed split is a valid split, so its load is an upper bound on the optimal load. The difference is largest if tokens
have to move along a long chain of replicas. Candidates are therefore compared by their optimal splits.

References
----------
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
S. J. Wright, *Coordinate Descent Algorithms*, 2015 (relaxation of two ranks at a time).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.annealing import bearable, draw
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.local_search import nothing_visited, record_visit, slots_away
from eplb_core.solver.model import Bool, Float32, Float64, Heat, Int32, SearchParams, UInt64, set_row

_HOTTEST, _COLDEST = 3e-4, 1e-5
"""Temperatures of the first and last tries, in units of the peak-to-average ratio (PAR)."""
_GUIDED = 90
"""Percentage of tries that move an expert away from the hottest rank of a scenario; the rest draw any rank."""
_REPLACE = 50
"""Percentage of tries that replace a spare replica with a different expert; the rest swap two experts."""
_SWEEPS = 4
"""Number of times that a change relaxes all shared experts. With 2 sweeps, the PAR on the next window of recorded
decode steps (8 ranks x 5 slots) is 0.4 % higher. With 8 sweeps, the PAR in a replay of these steps is 0.2 % lower,
which may be chance."""
_FIRST_SWEEPS = 32
"""Number of times that the initial split, which is even, is relaxed."""
_MAX_SCENARIOS = 64
"""Maximum number of steps used as scenarios. With 32, the PAR in a replay of recorded decode steps is 0.2 % higher, and
decisions take 0.92 times as long."""
_STRESS = 1.5
"""Factor by which a scenario's deviation from the mean heat is amplified. A placement that is perfect for the observed
steps has no headroom for other steps: with a factor of 1, the PAR on the next window of recorded routing is up to 1 %
higher."""
_MIN_SAVING = 1e-6
"""Minimum cost reduction that is not a rounding error."""


class _Change(NamedTuple):
    """A change to one slot, or a swap of two slots on different ranks."""

    incoming: int
    """Expert that the target slot receives."""
    outgoing: int
    """Expert that the target slot loses."""
    target: int
    """Physical id of the target slot; -1 if there is no change."""
    origin: int
    """Physical id of the slot that receives ``outgoing`` in exchange for ``incoming``.

    It is -1 if the replica of ``outgoing`` is dropped and ``incoming`` gets an additional replica.
    """


class _Replicas(NamedTuple):
    """Slots of each expert under the current placement. All arrays are updated in place."""

    count_E: Int32
    """int32 ``[E]``, replica count of each expert."""
    slot_EK: Int32
    """int32 ``[E, K]``, physical slots of each expert, unordered. In the row of expert ``e``, the first ``count_E[e]``
    entries are valid."""


class _Tokens(NamedTuple):
    """A split of every scenario's tokens, scaled to a mean rank load of 1. All arrays are updated in place."""

    flow_PN: Float32
    """float32 ``[P, N]``, tokens of each slot."""
    load_RN: Float32
    """float32 ``[R, N]``, load of each rank."""


def search_for_steps(
    phy2log_RS: Int32, heat: Heat, home_ER: Bool, price_K: Float64, params: SearchParams
) -> Int32:
    """Improve a placement for stepwise splits.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement to start from.
    heat
        Heat of the layer.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the current layout.
    price_K
        float64 ``[K]``, minimum PAR improvement per moved slot, highest price first.
    params
        Search parameters. Only ``step_tries`` and ``seed`` are used.

    Returns
    -------
    Int32
        int32 ``[K, R, S]``, the best placement for each price.
    """
    scaled_EN, share_N = _scenarios_of(heat)
    begin_RS = np.ascontiguousarray(phy2log_RS)
    return _step_search(begin_RS, scaled_EN, share_N, home_ER, price_K, params.step_tries, params.seed)


def _scenarios_of(heat: Heat) -> tuple[Float32, Float32]:
    """Select up to 64 evenly spaced steps and amplify their deviation from the mean heat.

    Returns
    -------
    tuple of Float32 and Float32
        Heat of each scenario, ``[E, N]``, with the step's total unchanged, and the weights, ``[N]``.
    """
    busy_N = np.flatnonzero(heat.share_N > 0)
    count = min(len(busy_N), _MAX_SCENARIOS)
    selected_N = busy_N[np.arange(count) * len(busy_N) // max(count, 1)]
    selected_EN = heat.scaled_EN[:, selected_N]
    mean_E1 = heat.mean_E[:, None]
    stressed_EN = np.maximum(mean_E1 + np.float32(_STRESS) * (selected_EN - mean_E1), np.float32(0.0))
    stressed_EN *= selected_EN.sum(axis=0) / np.maximum(stressed_EN.sum(axis=0), np.float32(1e-30))
    share_N = heat.share_N[selected_N]
    total = share_N.sum()
    return np.ascontiguousarray(stressed_EN), share_N / total if total > 0 else share_N


@kernel
def _step_search(
    phy2log_RS: Int32,
    scaled_EN: Float32,
    share_N: Float32,
    home_ER: Bool,
    price_K: Float64,
    tries: int,
    seed: int,
) -> Int32:
    """Anneal at the last price and return the cheapest placement visited for each price, int32 ``[K, R, S]``.

    Costs are those of relaxed splits.
    """
    current_RS = phy2log_RS.copy()
    slots = current_RS.shape[1]
    replicas = _replicas_in(current_RS, scaled_EN.shape[0])
    tokens = _split_evenly(current_RS, replicas, scaled_EN)
    trial = _Tokens(tokens.flow_PN.copy(), tokens.load_RN.copy())
    shared_E = np.zeros(scaled_EN.shape[0], dtype=np.int32)
    shared = _list_shared(replicas, shared_E)
    for _ in range(_FIRST_SWEEPS):
        _relax(replicas, shared_E, shared, tokens, slots)
    ratio = _ratio_of(tokens.load_RN, share_N)
    moves = slots_away(current_RS, home_ER)
    cheapest = nothing_visited(price_K, current_RS)
    record_visit(cheapest, current_RS, ratio, moves, _MIN_SAVING)
    price = price_K[-1]
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    for k in range(tries):
        if ratio <= 1.0 + 1e-6 or current_RS.shape[0] < 2:
            break
        change = _draw_change(current_RS, replicas, tokens.load_RN, state_1)
        if change.target < 0:
            continue
        temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        extra_moves = _extra_moves(home_ER, change, slots)
        bound = ratio - price * extra_moves + bearable(temperature, state_1)
        _copy_split(tokens, trial, replicas, shared_E, shared, change)
        trial_ratio = _ratio_after(replicas, trial, shared_E, shared, share_N, change, slots)
        if trial_ratio > bound:
            _undo_change(replicas, change)
            continue
        _copy_split(trial, tokens, replicas, shared_E, shared, change)
        current_RS[change.target // slots, change.target % slots] = change.incoming
        if change.origin >= 0:
            current_RS[change.origin // slots, change.origin % slots] = change.outgoing
        shared = _list_shared(replicas, shared_E)
        ratio = trial_ratio
        moves += extra_moves
        record_visit(cheapest, current_RS, ratio, moves, _MIN_SAVING)
    return cheapest.placement_KRS


@kernel
def _ratio_after(
    replicas: _Replicas,
    tokens: _Tokens,
    shared_E: Int32,
    shared: int,
    share_N: Float32,
    change: _Change,
    slots: int,
) -> float:
    """Apply a change, relax the splits and return the PAR. ``shared_E`` has room for one more expert."""
    if change.origin < 0 and replicas.count_E[change.incoming] == 1:
        shared_E[shared] = change.incoming
        shared += 1
    _apply_change(replicas, tokens, change, slots)
    for _ in range(_SWEEPS):
        _relax(replicas, shared_E, shared, tokens, slots)
    return _ratio_of(tokens.load_RN, share_N)


@kernel
def _replicas_in(phy2log_RS: Int32, experts: int) -> _Replicas:
    """Return the slots of each expert of a complete placement."""
    ranks, slots = phy2log_RS.shape
    count_E = np.zeros(experts, dtype=np.int32)
    # No expert can have more replicas than this, even if a rank holds an expert twice.
    slot_EK = np.zeros((experts, ranks * slots - experts + 1), dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            slot_EK[expert, count_E[expert]] = r * slots + s
            count_E[expert] += 1
    return _Replicas(count_E, slot_EK)


@kernel
def _split_evenly(phy2log_RS: Int32, replicas: _Replicas, scaled_EN: Float32) -> _Tokens:
    """Split each expert's tokens evenly over its replicas in every scenario."""
    ranks, slots = phy2log_RS.shape
    episodes = scaled_EN.shape[1]
    tokens = _Tokens(
        np.zeros((ranks * slots, episodes), dtype=np.float32), np.zeros((ranks, episodes), dtype=np.float32)
    )
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            share = np.float32(1.0) / np.float32(replicas.count_E[expert])
            for n in range(episodes):
                flow = share * scaled_EN[expert, n]
                tokens.flow_PN[r * slots + s, n] = flow
                tokens.load_RN[r, n] += flow
    return tokens


@kernel
def _list_shared(replicas: _Replicas, shared_E: Int32) -> int:
    """Write the experts with at least two replicas to the front of ``shared_E`` and return their number."""
    shared = 0
    for e in range(shared_E.shape[0]):
        if replicas.count_E[e] > 1:
            shared_E[shared] = e
            shared += 1
    return shared


@kernel
def _relax(replicas: _Replicas, shared_E: Int32, shared: int, tokens: _Tokens, slots: int) -> None:
    """Let all pairs of ranks with consecutive replicas of an expert exchange its tokens, once."""
    flow_PN, load_RN = tokens
    count_E, slot_EK = replicas
    for j in range(shared):
        e = shared_E[j]
        last = count_E[e] - 1
        for k in range(last):
            _balance(flow_PN, load_RN, slot_EK[e, k], slot_EK[e, k + 1], slots)
        if last > 1:
            _balance(flow_PN, load_RN, slot_EK[e, last], slot_EK[e, 0], slots)


@kernel
def _balance(flow_PN: Float32, load_RN: Float32, slot_a: int, slot_b: int, slots: int) -> None:
    """Move an expert's tokens between two slots to bring the loads of their ranks as close as possible."""
    rank_a = slot_a // slots
    rank_b = slot_b // slots
    half = np.float32(0.5)
    for n in range(load_RN.shape[1]):
        moved = half * (load_RN[rank_a, n] - load_RN[rank_b, n])
        moved = min(max(moved, -flow_PN[slot_b, n]), flow_PN[slot_a, n])
        flow_PN[slot_a, n] -= moved
        flow_PN[slot_b, n] += moved
        load_RN[rank_a, n] -= moved
        load_RN[rank_b, n] += moved


@kernel
def _ratio_of(load_RN: Float32, share_N: Float32) -> float:
    """Return the PAR: the weighted mean of the scenarios' peak loads."""
    peak_N = np.empty(share_N.shape[0], dtype=np.float32)
    set_row(peak_N, load_RN[0])
    for r in range(1, load_RN.shape[0]):
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], load_RN[r, n])
    total = np.float32(0.0)
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
    return float(total)


@kernel
def _draw_change(current_RS: Int32, replicas: _Replicas, load_RN: Float32, state_1: UInt64) -> _Change:
    """Draw a change that moves an expert from a hot rank of a random scenario to the cooler of two random ranks."""
    no_change = _Change(-1, -1, -1, -1)
    ranks, slots = current_RS.shape
    n = draw(state_1, load_RN.shape[1])
    guided = draw(state_1, 100) < _GUIDED
    replaces = draw(state_1, 100) < _REPLACE
    hot = draw(state_1, ranks)
    cool = draw(state_1, ranks)
    alternative = draw(state_1, ranks)
    hot_slot = draw(state_1, slots)
    cool_slot = draw(state_1, slots)
    if guided:
        for r in range(ranks):
            if load_RN[r, n] > load_RN[hot, n]:
                hot = r
    if load_RN[alternative, n] < load_RN[cool, n]:
        cool = alternative
    incoming = np.int64(current_RS[hot, hot_slot])
    outgoing = np.int64(current_RS[cool, cool_slot])
    if _holds(current_RS, cool, incoming):
        return no_change
    target = cool * slots + cool_slot
    if replaces:
        # The outgoing expert must keep at least one replica.
        if replicas.count_E[outgoing] < 2:
            return no_change
        return _Change(incoming, outgoing, target, -1)
    if _holds(current_RS, hot, outgoing):
        return no_change
    return _Change(incoming, outgoing, target, hot * slots + hot_slot)


@part
def _holds(phy2log_RS: Int32, rank: int, expert: int) -> bool:
    """Return True if the rank holds a replica of the expert."""
    for s in range(phy2log_RS.shape[1]):  # noqa: SIM110 # numba compiles a loop, not any()
        if phy2log_RS[rank, s] == expert:
            return True
    return False


@kernel
def _extra_moves(home_ER: Bool, change: _Change, slots: int) -> int:
    """Return the number of moves that a change adds, minus the number that it makes unnecessary."""
    incoming = change.incoming
    outgoing = change.outgoing
    target_rank = change.target // slots
    moves: int = np.int64(home_ER[outgoing, target_rank]) - np.int64(home_ER[incoming, target_rank])
    if change.origin >= 0:
        origin_rank = change.origin // slots
        moves += np.int64(home_ER[incoming, origin_rank]) - np.int64(home_ER[outgoing, origin_rank])
    return moves


@kernel
def _copy_split(
    source: _Tokens, target: _Tokens, replicas: _Replicas, shared_E: Int32, shared: int, change: _Change
) -> None:
    """Copy the loads, and the tokens of the slots that a change or its relaxation can alter."""
    for r in range(source.load_RN.shape[0]):
        set_row(target.load_RN[r], source.load_RN[r])
    for j in range(shared):
        _copy_expert(source.flow_PN, target.flow_PN, replicas, np.int64(shared_E[j]))
    _copy_expert(source.flow_PN, target.flow_PN, replicas, change.incoming)
    _copy_expert(source.flow_PN, target.flow_PN, replicas, change.outgoing)


@kernel
def _copy_expert(source_PN: Float32, target_PN: Float32, replicas: _Replicas, expert: int) -> None:
    """Copy the tokens of all slots of an expert."""
    for k in range(replicas.count_E[expert]):
        slot = replicas.slot_EK[expert, k]
        set_row(target_PN[slot], source_PN[slot])


@kernel
def _apply_change(replicas: _Replicas, tokens: _Tokens, change: _Change, slots: int) -> None:
    """Change the replicas, and adapt the tokens so that they are a valid split after the change."""
    flow_PN = tokens.flow_PN
    load_RN = tokens.load_RN
    target = change.target
    target_rank = target // slots
    if change.origin >= 0:
        origin = change.origin
        origin_rank = origin // slots
        for n in range(flow_PN.shape[1]):
            outgoing_flow = flow_PN[target, n]
            incoming_flow = flow_PN[origin, n]
            flow_PN[target, n] = incoming_flow
            flow_PN[origin, n] = outgoing_flow
            load_RN[target_rank, n] += incoming_flow - outgoing_flow
            load_RN[origin_rank, n] += outgoing_flow - incoming_flow
        _rehouse(replicas, change.incoming, origin, target)
        _rehouse(replicas, change.outgoing, target, origin)
        return
    _drop(replicas, change.outgoing, target)
    # The dropped replica's tokens go to the first of the expert's remaining replicas.
    receiver = replicas.slot_EK[change.outgoing, 0]
    receiver_rank = receiver // slots
    for n in range(flow_PN.shape[1]):
        flow = flow_PN[target, n]
        flow_PN[receiver, n] += flow
        load_RN[receiver_rank, n] += flow
        load_RN[target_rank, n] -= flow
        flow_PN[target, n] = np.float32(0.0)
    _add(replicas, change.incoming, target)


@kernel
def _undo_change(replicas: _Replicas, change: _Change) -> None:
    """Restore the replicas before a change."""
    if change.origin >= 0:
        _rehouse(replicas, change.incoming, change.target, change.origin)
        _rehouse(replicas, change.outgoing, change.origin, change.target)
    else:
        _drop(replicas, change.incoming, change.target)
        _add(replicas, change.outgoing, change.target)


@kernel
def _index_of(replicas: _Replicas, expert: int, slot: int) -> int:
    """Return the index of a slot among an expert's slots."""
    k = 0
    while replicas.slot_EK[expert, k] != slot:
        k += 1
    return k


@kernel
def _rehouse(replicas: _Replicas, expert: int, source: int, target: int) -> None:
    """Record that an expert's replica has moved from slot ``source`` to slot ``target``."""
    replicas.slot_EK[expert, _index_of(replicas, expert, source)] = target


@kernel
def _drop(replicas: _Replicas, expert: int, slot: int) -> None:
    """Record that an expert has lost its replica in a slot."""
    k = _index_of(replicas, expert, slot)
    last = replicas.count_E[expert] - 1
    replicas.slot_EK[expert, k] = replicas.slot_EK[expert, last]
    replicas.count_E[expert] = last


@kernel
def _add(replicas: _Replicas, expert: int, slot: int) -> None:
    """Record that an expert has a replica in one more slot."""
    replicas.slot_EK[expert, replicas.count_E[expert]] = slot
    replicas.count_E[expert] += 1
