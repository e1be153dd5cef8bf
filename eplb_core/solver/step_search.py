"""Improves a placement for a host that splits every step's tokens as well as they can be split.

Under such a split it does not matter how evenly experts' means are spread. What counts is which ranks share replicas: a
set of ranks is too hot when its experts have no replica outside it. So each step of a window is a scenario of its own,
whose optimum (``split``) comes with the tight set of ranks that proves it. A change can only help where it takes
heat out of tight sets; most changes do not, and are turned down by that alone, without solving anything.

References
----------
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.annealing import bearable, draw
from eplb_core.solver.jit import kernel
from eplb_core.solver.model import (
    Bool,
    Float32,
    Float64,
    Heat,
    Int32,
    Int64,
    SearchParams,
    UInt64,
    set_placement,
)
from eplb_core.solver.stepwise import Replicas, level, replicas_in, split_evenly

_HOTTEST, _COLDEST = 3e-4, 3e-6
"""Temperatures at the first and the last try, in peak-to-average ratio."""


def searched_for_steps(
    phy2log_RS: Int32, heat: Heat, home_ER: Bool, price_K: Float64, params: SearchParams
) -> Int32:
    """A placement improved for stepwise splits, int32 ``[K, R, S]``, one for each price; see ``_step_search``."""
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
    """So many tries to take heat out of tight sets; returns, for each price, the placement with the lowest cost."""
    ranks, slots = phy2log_RS.shape
    experts = scaled_EN.shape[0]
    here_RS = phy2log_RS.copy()
    replicas = replicas_in(here_RS, experts)
    now = _scenarios_under(replicas, scaled_EN, share_N, ranks)
    tried = _scenarios_under(replicas, scaled_EN, share_N, ranks)
    ratio, away = 0.0, 0
    for n in range(share_N.shape[0]):
        ratio += share_N[n] * now.level_N[n]
    for r in range(ranks):
        for s in range(slots):
            away += not home_ER[here_RS[r, s], r]
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    cost_K = np.empty(price_K.shape[0])
    for k in range(price_K.shape[0]):
        set_placement(best_KRS[k], here_RS)
        cost_K[k] = ratio + price_K[k] * away
    price = price_K[-1]
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    for k in range(tries):
        if ratio <= 1.0 + 1e-6 or ranks < 2:
            break
        change = _drawn_change(here_RS, replicas, now, share_N, state_1)
        if change.other < 0:
            continue
        temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        more = _extra_moves(home_ER, change)
        bound = ratio - price * more + bearable(temperature, state_1)
        if not _may_improve(replicas, now, scaled_EN, share_N, change, bound):
            continue
        _set_slots(here_RS, change, change.mine, change.theirs)
        changed = replicas_in(here_RS, experts)
        found = _solve_changed(replicas, changed, now, tried, share_N, change, bound)
        if found > bound:
            _set_slots(here_RS, change, change.theirs, change.mine)
            continue
        replicas = changed
        now, tried = tried, now
        ratio, away = found, away + more
        for j in range(price_K.shape[0]):
            cost = ratio + price_K[j] * away
            if cost < cost_K[j] - 1e-9:
                cost_K[j] = cost
                set_placement(best_KRS[j], here_RS)
    return best_KRS


@kernel
def _solve_changed(
    before: Replicas,
    after: Replicas,
    now: _Scenarios,
    tried: _Scenarios,
    share_N: Float32,
    change: _Change,
    bound: float,
) -> float:
    """The ratio after a change, each scenario levelled on from its split so far; gives up past ``bound``."""
    ranks = now.load_NR.shape[1]
    left = 0.0
    for n in range(share_N.shape[0]):
        left += share_N[n]
    total = 0.0
    for n in range(share_N.shape[0]):
        left -= share_N[n]
        if share_N[n] > 0:
            for p in range(now.flow_NP.shape[1]):
                tried.flow_NP[n, p] = now.flow_NP[n, p]
            for r in range(ranks):
                tried.load_NR[n, r] = now.load_NR[n, r]
            _carry_over(before, tried.flow_NP[n], tried.load_NR[n], change)
            _level_scenario(after, tried, n)
            total += share_N[n] * tried.level_N[n]
            if total + left > bound:
                return 2.0 + bound
    return total


_PASSES = 50
"""Of 100 tries those that turn a spare replica into another expert's; the others swap two experts."""


class _Change(NamedTuple):
    """The expert ``mine`` comes to a slot of rank ``other``, in place of ``theirs``."""

    mine: int
    theirs: int
    other: int
    """-1 for no change at all."""
    place: int
    """That physical slot."""
    rank: int
    """Rank that gets ``theirs`` for ``mine``; -1 where that replica is given up, and ``mine`` gets one more."""
    slot: int
    """The physical slot of ``rank``."""


@kernel
def _drawn_change(
    here_RS: Int32, replicas: Replicas, now: _Scenarios, share_N: Float32, state_1: UInt64
) -> _Change:
    """A random change that takes an expert out of a random tight set."""
    none = _Change(-1, -1, -1, -1, -1, -1)
    ranks, slots = here_RS.shape
    n = draw(state_1, share_N.shape[0])
    if now.size_N[n] == 0 or now.size_N[n] == ranks:
        return none
    inside, outside = draw(state_1, ranks), draw(state_1, ranks)
    while not now.tight_NR[n, inside]:
        inside = (inside + 1) % ranks
    while now.tight_NR[n, outside]:
        outside = (outside + 1) % ranks
    slot, place = inside * slots + draw(state_1, slots), outside * slots + draw(state_1, slots)
    mine, theirs = np.int64(replicas.expert_P[slot]), np.int64(replicas.expert_P[place])
    passes = draw(state_1, 100) < _PASSES
    if _holds(here_RS, outside, mine):
        return none
    if passes:
        # Anybody's spare replica outside gives way to an expert from inside.
        if replicas.first_E1[theirs + 1] - replicas.first_E1[theirs] < 2:
            return none
        return _Change(mine, theirs, outside, place, -1, -1)
    if _holds(here_RS, inside, theirs):
        return none
    return _Change(mine, theirs, outside, place, inside, slot)


@kernel
def _holds(here_RS: Int32, rank: int, expert: int) -> bool:
    for s in range(here_RS.shape[1]):  # noqa: SIM110 # numba compiles a loop, not any()
        if here_RS[rank, s] == expert:
            return True
    return False


@kernel
def _extra_moves(home_ER: Bool, change: _Change) -> int:
    """Slots that the change takes away from home, less those that it brings back."""
    mine, theirs = change.mine, change.theirs
    more: int = np.int64(home_ER[theirs, change.other]) - np.int64(home_ER[mine, change.other])
    if change.rank >= 0:
        more += np.int64(home_ER[mine, change.rank]) - np.int64(home_ER[theirs, change.rank])
    return more


@kernel
def _may_improve(
    replicas: Replicas,
    now: _Scenarios,
    scaled_EN: Float32,
    share_N: Float32,
    change: _Change,
    bound: float,
) -> bool:
    """Return whether the tight sets as they are leave room for a ratio of ``bound`` after the change."""
    mine, theirs, rank, other = change.mine, change.theirs, change.rank, change.other
    least = 0.0
    for n in range(share_N.shape[0]):
        level_of = 1.0
        if now.size_N[n] > 0:
            tight_R = now.tight_NR[n]
            held = now.level_N[n] * now.size_N[n]
            held -= scaled_EN[mine, n] * _inside(replicas, tight_R, mine, -1, -1)
            held -= scaled_EN[theirs, n] * _inside(replicas, tight_R, theirs, -1, -1)
            held += scaled_EN[mine, n] * _inside(replicas, tight_R, mine, rank, other)
            held += scaled_EN[theirs, n] * _inside(replicas, tight_R, theirs, other, rank)
            level_of = max(level_of, held / now.size_N[n])
        least += share_N[n] * level_of
        if least > bound:
            return False
    return True


@kernel
def _inside(replicas: Replicas, tight_R: Bool, expert: int, leaves: int, comes: int) -> bool:
    """Return whether all replicas of an expert are in a set of ranks, once it has left one rank and come to another."""
    if comes >= 0 and not tight_R[comes]:
        return False
    for k in range(replicas.first_E1[expert], replicas.first_E1[expert + 1]):
        at = replicas.rank_P[replicas.slot_P[k]]
        if at != leaves and not tight_R[at]:
            return False
    return True


@kernel
def _set_slots(here_RS: Int32, change: _Change, comes: int, leaves: int) -> None:
    """Put one expert into the slot of ``other``, and in a swap the other one into that of ``rank``."""
    slots = here_RS.shape[1]
    here_RS[change.other, change.place % slots] = comes
    if change.rank >= 0:
        here_RS[change.rank, change.slot % slots] = leaves


@kernel
def _carry_over(before: Replicas, flow_P: Float64, load_R: Float64, change: _Change) -> None:
    """A split that the changed placement allows, close to the one before."""
    to, kept = change.slot, 0.0
    if change.rank >= 0:
        kept = flow_P[to]
    else:
        # The tokens of the slot that gives way go to the first other replica.
        to = np.int64(before.slot_P[before.first_E1[change.theirs]])
        if to == change.place:
            to = np.int64(before.slot_P[before.first_E1[change.theirs] + 1])
    moved = flow_P[change.place] - kept
    flow_P[to] += moved
    flow_P[change.place] -= moved
    load_R[before.rank_P[to]] += moved
    load_R[change.other] -= moved


_MAX_SCENARIOS = 32
"""Steps looked at: 64 instead won 0.3 % on the next window of 256 experts and took twice as long."""
_STRESS = 1.5
"""What a scenario's departure from the mean is multiplied by. A placement that is perfect on the steps seen has no room
for others; with 1 the next window of recorded routing was up to 1 % worse."""


def _scenarios_of(heat: Heat) -> tuple[Float32, Float32]:
    """At most 32 steps, evenly chosen, each farther from the mean than it was."""
    busy_N = np.flatnonzero(heat.share_N > 0)
    count = min(len(busy_N), _MAX_SCENARIOS)
    chosen_N = busy_N[np.arange(count) * len(busy_N) // max(count, 1)]
    seen_EN = heat.scaled_EN[:, chosen_N]
    mean_E1 = heat.mean_E[:, None]
    stressed_EN = np.maximum(mean_E1 + np.float32(_STRESS) * (seen_EN - mean_E1), np.float32(0.0))
    stressed_EN *= seen_EN.sum(axis=0) / np.maximum(stressed_EN.sum(axis=0), np.float32(1e-30))
    share_N = heat.share_N[chosen_N]
    total = share_N.sum()
    return np.ascontiguousarray(stressed_EN), share_N / total if total > 0 else share_N


class _Scenarios(NamedTuple):
    """Every scenario's optimal split under a placement, and what proves it."""

    flow_NP: Float64
    """float64 ``[N, P]``, tokens of each slot; the mean rank load is 1."""
    load_NR: Float64
    level_N: Float64
    """float64 ``[N]``, the hottest rank."""
    tight_NR: Bool
    """bool ``[N, R]``, ranks whose experts have no replica outside; none where all ranks are at the mean."""
    size_N: Int64
    """int64 ``[N]``, the ranks in each tight set."""


@kernel
def _scenarios_under(replicas: Replicas, scaled_EN: Float32, share_N: Float32, ranks: int) -> _Scenarios:
    """The optimum of each scenario, found from even shares."""
    experts, episodes = scaled_EN.shape
    found = _Scenarios(
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
            split_evenly(replicas, heat_E, found.flow_NP[n], found.load_NR[n], False)
            _level_scenario(replicas, found, n)
    return found


@kernel
def _level_scenario(replicas: Replicas, found: _Scenarios, n: int) -> None:
    """Level one scenario, and keep its tight set."""
    found.level_N[n] = level(replicas, found.flow_NP[n], found.load_NR[n], False)
    size = 0
    for r in range(replicas.tight_R.shape[0]):
        found.tight_NR[n, r] = replicas.tight_R[r]
        size += replicas.tight_R[r]
    found.size_N[n] = size
