"""Simulated annealing of a placement for hosts that split every step's tokens optimally (``STEPWISE``).

Under an optimal split, it does not matter how evenly the experts' mean heat is spread over the ranks. What matters is
which ranks share replicas: a set of ranks can be overloaded by experts that have no replica outside the set. The search
therefore treats each step of the window as a scenario. For every scenario, it maintains the optimal split
(``stepwise``) and the tight set of ranks that proves its optimality. A change can lower the objective only if it moves
heat out of tight sets. Checking the tight sets therefore suffices to reject most changes, without solving any scenario.

References
----------
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.annealing import bearable, draw
from eplb_core.solver.jit import kernel
from eplb_core.solver.local_search import nothing_visited, record_visit, slots_away
from eplb_core.solver.model import (
    Bool,
    Float32,
    Float64,
    Heat,
    Int32,
    Int64,
    SearchParams,
    UInt64,
)
from eplb_core.solver.stepwise import Replicas, level, replicas_in, split_evenly

_FIRST_TEMPERATURE = 3e-4
"""Temperature of the first try, in units of the peak-to-average ratio (PAR)."""
_LAST_TEMPERATURE = 3e-6
"""Temperature of the last try, in units of the PAR."""
_REPLACE_PERCENT = 50
"""Percentage of tries that replace a spare replica with a different expert; the rest swap two experts."""
_MAX_SCENARIOS = 32
"""Maximum number of steps used as scenarios. With 256 experts, 64 steps lower the PAR on the next window by 0.3 %, but
the search takes twice as long."""
_STRESS = 1.5
"""Factor by which a scenario's deviation from the mean heat is amplified. A placement that is perfect for the observed
steps has no headroom for other steps: with a factor of 1, the PAR on the next window of recorded routing is up to 1 %
higher."""
_MIN_SAVING = 1e-9
"""Minimum cost reduction that is not a rounding error."""


class _Change(NamedTuple):
    """A change to one slot, or a swap of two slots on different ranks."""

    incoming: int
    """Expert that the target slot receives."""
    outgoing: int
    """Expert that the target slot loses."""
    target_rank: int
    """Rank of the target slot; -1 if there is no change."""
    target_slot: int
    """Physical id of the target slot."""
    swap_rank: int
    """Rank that receives ``outgoing`` in exchange for ``incoming``.

    It is -1 if the replica of ``outgoing`` is dropped and ``incoming`` gets an additional replica.
    """
    swap_slot: int
    """Physical id of the slot on ``swap_rank``."""


class _Scenarios(NamedTuple):
    """Optimal split of every scenario under one placement, with its proof."""

    flow_NP: Float64
    """float64 ``[N, P]``, tokens of each slot, scaled to a mean rank load of 1."""
    load_NR: Float64
    """float64 ``[N, R]``, load of each rank."""
    level_N: Float64
    """float64 ``[N]``, load of the hottest rank."""
    tight_NR: Bool
    """bool ``[N, R]``, the tight set: ranks whose load cannot be moved out of the set.

    It is empty if every rank has the mean load.
    """
    size_N: Int64
    """int64 ``[N]``, number of ranks in each tight set."""


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
    """Anneal at the last price and return the cheapest placement visited for each price, int32 ``[K, R, S]``."""
    ranks = phy2log_RS.shape[0]
    experts = scaled_EN.shape[0]
    current_RS = phy2log_RS.copy()
    replicas = replicas_in(current_RS, experts)
    current = _scenarios_under(replicas, scaled_EN, share_N, ranks)
    trial = _scenarios_under(replicas, scaled_EN, share_N, ranks)
    ratio = 0.0
    for n in range(share_N.shape[0]):
        ratio += share_N[n] * current.level_N[n]
    moves = slots_away(current_RS, home_ER)
    cheapest = nothing_visited(price_K, current_RS)
    record_visit(cheapest, current_RS, ratio, moves, _MIN_SAVING)
    price = price_K[-1]
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    for k in range(tries):
        if ratio <= 1.0 + 1e-6 or ranks < 2:
            break
        change = _draw_change(current_RS, replicas, current, share_N, state_1)
        if change.target_rank < 0:
            continue
        temperature = _FIRST_TEMPERATURE * (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** (k / tries)
        extra_moves = _extra_moves(home_ER, change)
        bound = ratio - price * extra_moves + bearable(temperature, state_1)
        if not _may_improve(replicas, current, scaled_EN, share_N, change, bound):
            continue
        _set_slots(current_RS, change, change.incoming, change.outgoing)
        changed = replicas_in(current_RS, experts)
        trial_ratio = _solve_changed(replicas, changed, current, trial, share_N, change, bound)
        if trial_ratio > bound:
            _set_slots(current_RS, change, change.outgoing, change.incoming)
            continue
        replicas = changed
        current, trial = trial, current
        ratio = trial_ratio
        moves += extra_moves
        record_visit(cheapest, current_RS, ratio, moves, _MIN_SAVING)
    return cheapest.placement_KRS


@kernel
def _solve_changed(
    before: Replicas,
    after: Replicas,
    current: _Scenarios,
    trial: _Scenarios,
    share_N: Float32,
    change: _Change,
    bound: float,
) -> float:
    """Return the PAR after a change and write the new splits into ``trial``.

    Each scenario starts from its current split. As soon as the result is certain to exceed ``bound``, the function
    stops and returns a value above ``bound``.
    """
    ranks = current.load_NR.shape[1]
    # A level is at least 1, so the weight of the unsolved scenarios is a lower bound on their contribution to the PAR.
    unsolved = 0.0
    for n in range(share_N.shape[0]):
        unsolved += share_N[n]
    total = 0.0
    for n in range(share_N.shape[0]):
        unsolved -= share_N[n]
        if share_N[n] > 0:
            for p in range(current.flow_NP.shape[1]):
                trial.flow_NP[n, p] = current.flow_NP[n, p]
            for r in range(ranks):
                trial.load_NR[n, r] = current.load_NR[n, r]
            _carry_over(before, trial.flow_NP[n], trial.load_NR[n], change)
            _level_scenario(after, trial, n)
            total += share_N[n] * trial.level_N[n]
            if total + unsolved > bound:
                return 2.0 + bound
    return total


@kernel
def _draw_change(
    current_RS: Int32, replicas: Replicas, current: _Scenarios, share_N: Float32, state_1: UInt64
) -> _Change:
    """Draw a change that moves an expert out of the tight set of a random scenario."""
    no_change = _Change(-1, -1, -1, -1, -1, -1)
    ranks, slots = current_RS.shape
    n = draw(state_1, share_N.shape[0])
    if current.size_N[n] == 0 or current.size_N[n] == ranks:
        return no_change
    inside = draw(state_1, ranks)
    outside = draw(state_1, ranks)
    while not current.tight_NR[n, inside]:
        inside = (inside + 1) % ranks
    while current.tight_NR[n, outside]:
        outside = (outside + 1) % ranks
    inside_slot = inside * slots + draw(state_1, slots)
    outside_slot = outside * slots + draw(state_1, slots)
    incoming = np.int64(replicas.expert_P[inside_slot])
    outgoing = np.int64(replicas.expert_P[outside_slot])
    replaces = draw(state_1, 100) < _REPLACE_PERCENT
    if _holds(current_RS, outside, incoming):
        return no_change
    if replaces:
        # The outgoing expert must keep at least one replica.
        if replicas.first_E1[outgoing + 1] - replicas.first_E1[outgoing] < 2:
            return no_change
        return _Change(incoming, outgoing, outside, outside_slot, -1, -1)
    if _holds(current_RS, inside, outgoing):
        return no_change
    return _Change(incoming, outgoing, outside, outside_slot, inside, inside_slot)


@kernel
def _holds(phy2log_RS: Int32, rank: int, expert: int) -> bool:
    """Return True if the rank holds a replica of the expert."""
    for s in range(phy2log_RS.shape[1]):  # noqa: SIM110 # numba compiles a loop, not any()
        if phy2log_RS[rank, s] == expert:
            return True
    return False


@kernel
def _extra_moves(home_ER: Bool, change: _Change) -> int:
    """Return the number of moves that a change adds, minus the number that it makes unnecessary."""
    incoming = change.incoming
    outgoing = change.outgoing
    moves: int = np.int64(home_ER[outgoing, change.target_rank]) - np.int64(
        home_ER[incoming, change.target_rank]
    )
    if change.swap_rank >= 0:
        moves += np.int64(home_ER[incoming, change.swap_rank]) - np.int64(home_ER[outgoing, change.swap_rank])
    return moves


@kernel
def _may_improve(
    replicas: Replicas,
    current: _Scenarios,
    scaled_EN: Float32,
    share_N: Float32,
    change: _Change,
    bound: float,
) -> bool:
    """Return False if the current tight sets prove that the PAR after the change exceeds ``bound``."""
    incoming = change.incoming
    outgoing = change.outgoing
    target_rank = change.target_rank
    swap_rank = change.swap_rank
    lowest_ratio = 0.0
    for n in range(share_N.shape[0]):
        lowest_level = 1.0
        if current.size_N[n] > 0:
            tight_R = current.tight_NR[n]
            # Heat of the experts that have all their replicas inside the tight set, before and after the change.
            confined = current.level_N[n] * current.size_N[n]
            confined -= scaled_EN[incoming, n] * _is_confined(replicas, tight_R, incoming, -1, -1)
            confined -= scaled_EN[outgoing, n] * _is_confined(replicas, tight_R, outgoing, -1, -1)
            confined += scaled_EN[incoming, n] * _is_confined(
                replicas, tight_R, incoming, swap_rank, target_rank
            )
            confined += scaled_EN[outgoing, n] * _is_confined(
                replicas, tight_R, outgoing, target_rank, swap_rank
            )
            lowest_level = max(lowest_level, confined / current.size_N[n])
        lowest_ratio += share_N[n] * lowest_level
        if lowest_ratio > bound:
            return False
    return True


@kernel
def _is_confined(replicas: Replicas, tight_R: Bool, expert: int, from_rank: int, to_rank: int) -> bool:
    """Return True if all replicas of an expert are in a set of ranks after one of them moves.

    The move is from ``from_rank`` to ``to_rank``. Either may be -1 if a replica is only added or only removed.
    """
    if to_rank >= 0 and not tight_R[to_rank]:
        return False
    for k in range(replicas.first_E1[expert], replicas.first_E1[expert + 1]):
        rank = replicas.rank_P[replicas.slot_P[k]]
        if rank != from_rank and not tight_R[rank]:
            return False
    return True


@kernel
def _set_slots(current_RS: Int32, change: _Change, target_expert: int, swap_expert: int) -> None:
    """Write one expert into the target slot and, in a swap, the other expert into the swap slot."""
    slots = current_RS.shape[1]
    current_RS[change.target_rank, change.target_slot % slots] = target_expert
    if change.swap_rank >= 0:
        current_RS[change.swap_rank, change.swap_slot % slots] = swap_expert


@kernel
def _carry_over(before: Replicas, flow_P: Float64, load_R: Float64, change: _Change) -> None:
    """Adapt the pre-change split, in place, so that it is valid after the change."""
    receiving_slot = change.swap_slot
    new_flow = 0.0
    if change.swap_rank >= 0:
        new_flow = flow_P[receiving_slot]
    else:
        # The dropped replica's tokens go to the first of the expert's remaining replicas.
        receiving_slot = np.int64(before.slot_P[before.first_E1[change.outgoing]])
        if receiving_slot == change.target_slot:
            receiving_slot = np.int64(before.slot_P[before.first_E1[change.outgoing] + 1])
    shifted = flow_P[change.target_slot] - new_flow
    flow_P[receiving_slot] += shifted
    flow_P[change.target_slot] -= shifted
    load_R[before.rank_P[receiving_slot]] += shifted
    load_R[change.target_rank] -= shifted


def _scenarios_of(heat: Heat) -> tuple[Float32, Float32]:
    """Select up to 32 evenly spaced steps and amplify their deviation from the mean heat.

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
def _scenarios_under(replicas: Replicas, scaled_EN: Float32, share_N: Float32, ranks: int) -> _Scenarios:
    """Solve every scenario under a placement, starting from even splits."""
    experts, episodes = scaled_EN.shape
    scenarios = _Scenarios(
        np.zeros((episodes, replicas.rank_P.shape[0])),
        np.zeros((episodes, ranks)),
        np.ones(episodes),
        np.zeros((episodes, ranks), dtype=np.bool_),
        np.zeros(episodes, dtype=np.int64),
    )
    heat_E = np.empty(experts)
    for n in range(episodes):
        if share_N[n] > 0:
            for e in range(experts):
                heat_E[e] = scaled_EN[e, n]
            split_evenly(replicas, heat_E, scenarios.flow_NP[n], scenarios.load_NR[n], False)
            _level_scenario(replicas, scenarios, n)
    return scenarios


@kernel
def _level_scenario(replicas: Replicas, scenarios: _Scenarios, n: int) -> None:
    """Make the split of scenario ``n`` optimal and store its level and tight set."""
    scenarios.level_N[n] = level(replicas, scenarios.flow_NP[n], scenarios.load_NR[n], False)
    size = 0
    for r in range(replicas.tight_R.shape[0]):
        scenarios.tight_NR[n, r] = replicas.tight_R[r]
        size += replicas.tight_R[r]
    scenarios.size_N[n] = size
