"""Simulated annealing of a placement on ranks with few slots, to lower the realised peak-to-average ratio (PAR).

With two or three slots per rank, the PAR is determined by the replica counts and by the pairing of experts on ranks. A
local search in which every swap and exchange must be an improvement soon gets stuck. Annealing instead makes many cheap
random changes and, early on, also accepts changes that increase the PAR slightly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eplb_core.solver.construction import even_shares, replicas_of, share_of
from eplb_core.solver.evaluation import (
    TopRanks,
    loads_in_episodes,
    peak_of_two_changed,
    top_ranks_of,
    update_loads,
)
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Int32, UInt64, homes, set_placement

_HOTTEST, _COLDEST = 1e-3, 1e-5
"""Temperatures of the first and last tries, in units of the PAR.

Their effect was measured by placing 2 layers x 256 experts from scratch on 256 ranks x 2 slots (the four kinds of heat
in ``make bench-solver``, seeds 1 to 3, mean PAR on the window). A first temperature of 3e-3 raises the PAR by 1.1 %,
and 3e-4 raises it by 0.2 %. Last temperatures of 1e-4 and 1e-6 change it by at most 0.2 %.
"""
_LOOK = 8
"""Number of consecutive tries that target the hottest rank of the same episode. In the measurement described at
``_HOTTEST``, values of 1, 4 and 16 change the PAR by at most 0.2 %."""
_GUIDED = 95
"""Percentage of tries that must cool the episode's hottest rank; the rest may change any rank. In the measurement
described at ``_HOTTEST``, a value of 0 raises the PAR by 1.6 %, and 80 and 99 change it by at most 0.1 %."""
_SWAPS = 68
"""Percentage of tries that swap two experts; the rest pass a replica from one expert to another. In the measurement
described at ``_HOTTEST``, values of 50 and 85 change the PAR by at most 0.2 %."""
_HOPELESS = 12
"""Maximum PAR increase that may be accepted, as a multiple of the temperature."""
_FINE = 1 << 24
"""Number of distinct values that a random fraction can have."""


@kernel
def draw(state_1: UInt64, below: int) -> int:
    """Draw a random integer from 0 to ``below - 1``.

    Parameters
    ----------
    state_1
        uint64 ``[1]``, generator state, advanced in place.
    below
        Exclusive upper bound; at most 2**32 - 1.

    References
    ----------
    G. Steele, D. Lea, C. Flood, *Fast Splittable Pseudorandom Number Generators*, 2014 (SplitMix64).
    """
    state_1[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state_1[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # Scaling the upper half by ``below`` avoids a division. The result is signed because numba promotes arithmetic that
    # mixes signed and unsigned integers to floats.
    drawn: int = np.int64(((mixed >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32))
    return drawn


@kernel
def anneal(phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32, tries: int, seed: int) -> Int32:
    """Anneal a placement by randomly swapping two experts or passing a replica from one expert to another.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement, left unchanged.
    scaled_EN
        float32 ``[E, N]``, normalised heat.
    share_N
        float32 ``[N]``, weights of the episodes.
    tries
        Number of changes to try.
    seed
        Seed for the random numbers.

    Returns
    -------
    Int32
        int32 ``[R, S]``, the best placement found. Under an even split, its PAR is at most that of ``phy2log_RS``,
        apart from rounding.

    References
    ----------
    S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
    """
    ranks = phy2log_RS.shape[0]
    state = _state_at(phy2log_RS, scaled_EN)
    current_RS, replicas_E, holds_ER, holder_EK, top, rank_K, changed_R1, changed_RN = state
    _, load_NR, rank_KN, peak_KN = top
    current = _par_of_changed(load_NR, rank_KN, peak_KN, share_N, rank_K, 0, changed_R1, changed_RN)
    best_RS: Int32 = phy2log_RS.copy()
    best = current
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    episode = 0
    temperature = _HOTTEST
    for k in range(tries if ranks > 1 and current > 0 else 0):
        if k % _LOOK == 0:
            episode = draw(state_1, share_N.shape[0])
            temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        change = _draw_change(current_RS, load_NR, rank_KN, episode, state_1)
        if change.swaps:
            if not _may_swap(load_NR, scaled_EN, replicas_E, holds_ER, change):
                continue
            count = _note_swap(state, scaled_EN, change)
            rank = change.rank
            target = change.target
            par = peak_of_two_changed(top, share_N, rank, target, changed_RN[rank], changed_RN[target])
        else:
            if not _may_pass(load_NR, scaled_EN, replicas_E, holds_ER, holder_EK, change):
                continue
            count = _note_pass(state, scaled_EN, change)
            par = _par_of_changed(load_NR, rank_KN, peak_KN, share_N, rank_K, count, changed_R1, changed_RN)
        if par <= current or par <= current + bearable(temperature, state_1):
            _apply_change(state, change, count)
            current = par
        for j in range(count):
            changed_R1[rank_K[j]] = False
        if current < best:
            best = current
            set_placement(best_RS, current_RS)
    return best_RS


@part
def _draw_change(
    current_RS: Int32, load_NR: Float32, rank_KN: Int32, episode: int, state_1: UInt64
) -> _Change:
    """Draw a random change.

    Most changes are guided: their first rank is the episode's hottest rank. The second rank is the cooler of two
    randomly drawn ranks.
    """
    ranks, slots = current_RS.shape
    guided = draw(state_1, 100) < _GUIDED
    swaps = draw(state_1, 100) < _SWAPS
    rank = np.int64(rank_KN[0, episode]) if guided else draw(state_1, ranks)
    target = draw(state_1, ranks)
    alternative = draw(state_1, ranks)
    target = alternative if load_NR[episode, alternative] < load_NR[episode, target] else target
    slot = draw(state_1, slots)
    target_slot = draw(state_1, slots)
    expert = current_RS[rank, slot]
    target_expert = current_RS[target, target_slot]
    return _Change(rank, slot, target, target_slot, expert, target_expert, swaps, episode if guided else -1)


@part
def bearable(temperature: float, state_1: UInt64) -> float:
    """Draw the maximum PAR increase to accept at this temperature, according to the Metropolis criterion."""
    return min(-math.log((1 + draw(state_1, _FINE)) / _FINE), float(_HOPELESS)) * temperature


class _State(NamedTuple):
    """State of an annealing run: a placement and its loads. All arrays are updated in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, current placement."""
    replicas_E: Int32
    """int32 ``[E]``, replica count of each expert."""
    holds_ER: Bool
    """bool ``[E, R]``, True if the rank holds the expert."""
    holder_EK: Int32
    """int32 ``[E, K]``, the ranks that hold each expert, unordered. In the row of expert ``e``, the first
    ``replicas_E[e]`` entries are valid."""
    top_ranks: TopRanks
    """Rank loads under an even split."""
    rank_K: Int32
    """int32 ``[R]``, ranks whose loads the change under consideration would alter."""
    changed_R1: Bool
    """bool ``[R + 1]``, True for the ranks in ``rank_K``; all False between changes. The last entry is always False."""
    changed_RN: Float32
    """float32 ``[R, N]``, loads of the ranks in ``rank_K`` after the change."""


class _Change(NamedTuple):
    """A random change to the placement, in which rank ``target`` receives an expert from rank ``rank``."""

    rank: int
    """Rank that holds ``expert``."""
    slot: int
    """Slot of ``expert`` on ``rank``."""
    target: int
    """Rank that receives ``expert``."""
    target_slot: int
    """Slot of ``target`` that receives ``expert``."""
    expert: int
    """Expert that ``target`` receives."""
    target_expert: int
    """Expert that ``target_slot`` holds before the change."""
    swaps: bool
    """True if ``rank`` receives ``target_expert`` in exchange. If False, ``rank`` keeps ``expert``, which gains a
    replica, and ``target_expert`` loses one."""
    episode: int
    """Episode in which ``rank`` is the hottest rank, or -1 for an unguided change. In this episode, all ranks that get
    hotter must stay below the current load of ``rank``."""


@kernel
def _state_at(phy2log_RS: Int32, scaled_EN: Float32) -> _State:
    """Return the annealing state for a copy of a complete placement and normalised heat, float32 ``[E, N]``."""
    ranks, slots = phy2log_RS.shape
    experts = scaled_EN.shape[0]
    # Upper bound on the replica count of any expert.
    max_replicas = min(ranks, ranks * slots - experts + 1)
    holder_EK = np.zeros((experts, max_replicas), dtype=np.int32)
    count_E = np.zeros(experts, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            holder_EK[expert, count_E[expert]] = r
            count_E[expert] += 1
    load_RN = loads_in_episodes(phy2log_RS, even_shares(phy2log_RS, experts), scaled_EN)
    return _State(
        phy2log_RS.copy(),
        replicas_of(phy2log_RS, experts),
        homes(phy2log_RS, experts),
        holder_EK,
        top_ranks_of(load_RN),
        np.zeros(ranks, dtype=np.int32),
        np.zeros(ranks + 1, dtype=np.bool_),
        np.zeros_like(load_RN),
    )


@part
def _may_swap(
    load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, change: _Change
) -> bool:
    """Return True if a swap is legal and, if guided, relieves the hottest rank.

    A guided swap must cool ``rank`` in its episode and leave ``target`` below the current load of ``rank``.
    """
    rank = change.rank
    target = change.target
    expert = change.expert
    target_expert = change.target_expert
    n = change.episode
    # Evaluate all conditions without branching, because a mispredicted branch would take longer than the conditions.
    legal = (rank != target) & ~holds_ER[expert, target] & ~holds_ER[target_expert, rank]
    at = max(n, 0)
    added = scaled_EN[target_expert, at] * share_of(replicas_E[target_expert])
    added -= scaled_EN[expert, at] * share_of(replicas_E[expert])
    relieves = (added < 0) & (load_NR[at, target] - added < load_NR[at, rank])
    allowed: bool = legal & (relieves | (n < 0))
    return allowed


@part
def _may_pass(
    load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, holder_EK: Int32, change: _Change
) -> bool:
    """Return True if passing on a replica is legal and, if guided, does not make any rank too hot.

    The ranks that a guided change makes hotter are ``target`` and all ranks that hold ``target_expert``. In the
    change's episode, they must stay below the current load of ``rank``. The test ignores the fact that some of them may
    also hold ``expert``, whose shares become smaller.
    """
    rank = change.rank
    target = change.target
    expert = change.expert
    target_expert = change.target_expert
    n = change.episode
    legal: bool = (rank != target) & ~holds_ER[expert, target] & (replicas_E[target_expert] > 1)
    if legal and n >= 0:
        limit = load_NR[n, rank]
        lost = scaled_EN[target_expert, n] * share_of(replicas_E[target_expert])
        added = scaled_EN[target_expert, n] * share_of(replicas_E[target_expert] - 1) - lost
        legal = load_NR[n, target] + scaled_EN[expert, n] * share_of(replicas_E[expert] + 1) - lost < limit
        for k in range(replicas_E[target_expert]):
            holder = holder_EK[target_expert, k]
            legal = legal and (holder == target or load_NR[n, holder] + added < limit)
    return legal


@part
def _note_swap(state: _State, scaled_EN: Float32, change: _Change) -> int:
    """Compute both ranks' loads after a swap, write them to ``changed_RN``, and return the number of ranks, 2."""
    _, replicas_E, _, _, top, rank_K, changed_R1, changed_RN = state
    load_RN = top.load_RN
    rank = change.rank
    target = change.target
    expert = change.expert
    target_expert = change.target_expert
    expert_share = share_of(replicas_E[expert])
    target_share = share_of(replicas_E[target_expert])
    for n in range(scaled_EN.shape[1]):
        added = target_share * scaled_EN[target_expert, n] - expert_share * scaled_EN[expert, n]
        changed_RN[rank, n] = load_RN[rank, n] + added
        changed_RN[target, n] = load_RN[target, n] - added
    rank_K[0] = rank
    rank_K[1] = target
    changed_R1[rank] = True
    changed_R1[target] = True
    return 2


@part
def _note_pass(state: _State, scaled_EN: Float32, change: _Change) -> int:
    """Write the new loads of all ranks that hold either expert into ``changed_RN``, and return the number of ranks.

    The loads are those after a replica has passed from one expert to the other.
    """
    _, replicas_E, holds_ER, holder_EK, top, rank_K, changed_R1, changed_RN = state
    load_RN = top.load_RN
    gainer = change.expert
    loser = change.target_expert
    gained = share_of(replicas_E[gainer] + 1)
    thinner = gained - share_of(replicas_E[gainer])
    lost = share_of(replicas_E[loser])
    thicker = share_of(replicas_E[loser] - 1) - lost
    zero = np.float32(0.0)
    count = 0
    for k in range(replicas_E[gainer] + replicas_E[loser]):
        if k < replicas_E[gainer]:
            rank = holder_EK[gainer, k]
            gainer_change = thinner
            loser_change = thicker if holds_ER[loser, rank] else zero
        else:
            rank = holder_EK[loser, k - replicas_E[gainer]]
            gainer_change = gained if rank == change.target else zero
            loser_change = -lost if rank == change.target else thicker
        if not changed_R1[rank]:
            for n in range(scaled_EN.shape[1]):
                changed = load_RN[rank, n] + gainer_change * scaled_EN[gainer, n]
                changed_RN[rank, n] = changed + loser_change * scaled_EN[loser, n]
            rank_K[count] = rank
            changed_R1[rank] = True
            count += 1
    return count


@part
def _par_of_changed(
    load_NR: Float32,
    rank_KN: Int32,
    peak_KN: Float32,
    share_N: Float32,
    rank_K: Int32,
    count: int,
    changed_R1: Bool,
    changed_RN: Float32,
) -> float:
    """Return the PAR if the first ``count`` ranks in ``rank_K`` have the loads in ``changed_RN``."""
    peak_N = np.empty(share_N.shape[0], dtype=np.float32)
    for n in range(peak_N.shape[0]):
        if not changed_R1[rank_KN[0, n]]:
            peak_N[n] = peak_KN[0, n]
        elif not changed_R1[rank_KN[1, n]]:
            peak_N[n] = peak_KN[1, n]
        elif not changed_R1[rank_KN[2, n]]:
            peak_N[n] = peak_KN[2, n]
        else:
            hottest = np.float32(0.0)
            for r in range(load_NR.shape[1]):
                if not changed_R1[r]:
                    hottest = max(hottest, load_NR[n, r])
            peak_N[n] = hottest
    for k in range(count):
        rank = rank_K[k]
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], changed_RN[rank, n])
    total = np.float32(0.0)
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
    return float(total)


@kernel
def _apply_change(state: _State, change: _Change, count: int) -> None:
    """Apply a change that alters the loads of ``count`` ranks; ``state`` must already contain the new loads."""
    rank = change.rank
    target = change.target
    expert = change.expert
    target_expert = change.target_expert
    state.phy2log_RS[target, change.target_slot] = expert
    if change.swaps:
        state.phy2log_RS[rank, change.slot] = target_expert
        _rehouse(state, expert, rank, target)
        _rehouse(state, target_expert, target, rank)
    else:
        state.holder_EK[expert, state.replicas_E[expert]] = target
        state.holds_ER[expert, target] = True
        state.replicas_E[expert] += 1
        state.replicas_E[target_expert] -= 1
        # The last holder replaces the removed one.
        last = state.holder_EK[target_expert, state.replicas_E[target_expert]]
        state.holder_EK[target_expert, _index_of(state.holder_EK, target_expert, target)] = last
        state.holds_ER[target_expert, target] = False
    update_loads(state.top_ranks, state.rank_K, count, state.changed_R1, state.changed_RN)


@kernel
def _rehouse(state: _State, expert: int, source: int, target: int) -> None:
    """Record that an expert has moved from rank ``source`` to rank ``target``."""
    state.holder_EK[expert, _index_of(state.holder_EK, expert, source)] = target
    state.holds_ER[expert, source] = False
    state.holds_ER[expert, target] = True


@kernel
def _index_of(holder_EK: Int32, expert: int, rank: int) -> int:
    """Return the index of a rank among an expert's holders."""
    k = 0
    while holder_EK[expert, k] != rank:
        k += 1
    return k
