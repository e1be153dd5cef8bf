"""Simulated annealing of a placement on the realised ratio: how replicas and ranks are found where slots are few.

With two or three slots per rank everything hangs on how many replicas each expert has and on who is paired with whom;
swaps and exchanges that each must win soon find no way on. Annealing takes many cheap random steps instead, at first
also some that lose a little. A budget buys more of them.
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
"""Temperatures at the first and the last try, in peak-to-average ratio.

Placed from scratch, 2 layers x 256 experts on 256 ranks x 2 slots (the four kinds of heat of ``make bench-solver``,
seeds 1 to 3, mean ratio on the window) come out 1.1 % worse with a first one of 3e-3 and 0.2 % with 3e-4; a last one of
1e-4 or 1e-6 is within 0.2 %.
"""
_LOOK = 8
"""Tries at the same episode's hottest rank, one after the other; 1, 4 and 16 are within 0.2 % on that heat."""
_GUIDED = 95
"""Of 100 tries those that must relieve that rank; the others may be anything. With 0 that heat is 1.6 % worse,
with 80 and 99 within 0.1 %."""
_SWAPS = 68
"""Of 100 tries those that swap; the others pass a replica on; 50 and 85 are within 0.2 %."""
_HOPELESS = 12
"""Temperatures of loss that are never taken."""
_FINE = 1 << 24
"""Steps into which a random fraction is cut."""


@kernel
def draw(state_1: UInt64, below: int) -> int:
    """The next number from 0 to ``below - 1``, at most 2**32 - 1; ``state_1`` (uint64 ``[1]``) moves on.

    References
    ----------
    G. Steele, D. Lea, C. Flood, *Fast Splittable Pseudorandom Number Generators*, 2014 (SplitMix64).
    """
    state_1[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state_1[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # The upper half, as a fraction of ``below``: no division. Signed, or numba would go on counting in floats.
    drawn: int = np.int64(((mixed >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32))
    return drawn


@kernel
def anneal(phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32, tries: int, seed: int) -> Int32:
    """Improve a placement by so many tries: swaps of two experts, and replicas that pass from one expert to another.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    scaled_EN, share_N
        Normalised heat and the episodes' weights.
    tries, seed
        How long, and of which random numbers.

    Returns
    -------
    Int32
        int32 ``[R, S]``; its peak-to-average ratio under even shares is no higher, but for rounding.

    References
    ----------
    S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
    """
    ranks = phy2log_RS.shape[0]
    state = _state_at(phy2log_RS, scaled_EN)
    here_RS, replicas_E, holds_ER, holder_EK, top, rank_K, changed_R1, changed_RN = state
    load_RN, load_NR, rank_KN, peak_KN = top
    now = _par_of_changed(load_NR, rank_KN, peak_KN, share_N, rank_K, 0, changed_R1, changed_RN)
    best_RS: Int32 = phy2log_RS.copy()
    best = now
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    episode, temperature = 0, _HOTTEST
    for k in range(tries if ranks > 1 and now > 0 else 0):
        if k % _LOOK == 0:
            episode = draw(state_1, share_N.shape[0])
            temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        attempt = _drawn(here_RS, load_NR, rank_KN, episode, state_1)
        if attempt.swaps:
            if not _may_swap(load_NR, scaled_EN, replicas_E, holds_ER, attempt):
                continue
            count = _swapped_loads(load_RN, scaled_EN, replicas_E, attempt, rank_K, changed_R1, changed_RN)
            rank, other = attempt.rank, attempt.other
            found = peak_of_two_changed(top, share_N, rank, other, changed_RN[rank], changed_RN[other])
        else:
            if not _may_pass(load_NR, scaled_EN, replicas_E, holds_ER, holder_EK, attempt):
                continue
            count = _passed_loads(
                load_RN, scaled_EN, replicas_E, holds_ER, holder_EK, attempt, rank_K, changed_R1, changed_RN
            )
            found = _par_of_changed(load_NR, rank_KN, peak_KN, share_N, rank_K, count, changed_R1, changed_RN)
        if found <= now or found <= now + bearable(temperature, state_1):
            _apply_move(state, attempt, count)
            now = found
        for j in range(count):
            changed_R1[rank_K[j]] = False
        if now < best:
            best = now
            set_placement(best_RS, here_RS)
    return best_RS


@part
def _drawn(here_RS: Int32, load_NR: Float32, rank_KN: Int32, episode: int, state_1: UInt64) -> _Move:
    """A random change, most often one of the hottest rank of an episode and of the cooler of two others."""
    ranks, slots = here_RS.shape
    guided, swaps = draw(state_1, 100) < _GUIDED, draw(state_1, 100) < _SWAPS
    rank = np.int64(rank_KN[0, episode]) if guided else draw(state_1, ranks)
    other, another = draw(state_1, ranks), draw(state_1, ranks)
    other = another if load_NR[episode, another] < load_NR[episode, other] else other
    slot, place = draw(state_1, slots), draw(state_1, slots)
    mine, theirs = here_RS[rank, slot], here_RS[other, place]
    return _Move(rank, slot, other, place, mine, theirs, swaps, episode if guided else -1)


@part
def bearable(temperature: float, state_1: UInt64) -> float:
    """A loss that is taken at this temperature, drawn as Metropolis did."""
    return min(-math.log((1 + draw(state_1, _FINE)) / _FINE), float(_HOPELESS)) * temperature


class _State(NamedTuple):
    """A placement being annealed; all arrays change in place."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    replicas_E: Int32
    """int32 ``[E]``."""
    holds_ER: Bool
    """bool ``[E, R]``, whether a rank holds an expert."""
    holder_EK: Int32
    """int32 ``[E, K]``, the ranks that hold each expert, ``replicas_E`` of them, in no order."""
    top_ranks: TopRanks
    """Rank loads under even shares."""
    rank_K: Int32
    """int32 ``[R]``, ranks that a change being judged would touch."""
    changed_R1: Bool
    """bool ``[R + 1]``, the same as marks; all false between two changes, and the last always."""
    changed_RN: Float32
    """float32 ``[R, N]``, their loads after it."""


class _Move(NamedTuple):
    """A change: ``other`` comes to hold the expert ``mine`` of ``rank``."""

    rank: int
    slot: int
    other: int
    place: int
    """The slot of ``other``."""
    mine: int
    theirs: int
    """The expert in that slot."""
    swaps: bool
    """Whether ``rank`` gets ``theirs`` for it; else that replica is given up, and ``mine`` gets one replica more."""
    episode: int
    """Where every rank that gets hotter must stay below what ``rank`` has now; -1 for in none."""


@kernel
def _state_at(phy2log_RS: Int32, scaled_EN: Float32) -> _State:
    """The state at a complete placement, which is copied; ``scaled_EN`` is normalised heat float32 ``[E, N]``."""
    ranks, slots = phy2log_RS.shape
    experts = scaled_EN.shape[0]
    # No expert can come to have more replicas than this.
    most = min(ranks, ranks * slots - experts + 1)
    holder_EK = np.zeros((experts, most), dtype=np.int32)
    held_E = np.zeros(experts, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            holder_EK[expert, held_E[expert]] = r
            held_E[expert] += 1
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
    load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, attempt: _Move
) -> bool:
    """Return whether a swap is legal, and cools ``rank`` in its episode without making ``other`` as hot."""
    rank, other, mine, theirs, n = attempt.rank, attempt.other, attempt.mine, attempt.theirs, attempt.episode
    # All is looked at: a branch that the processor guesses wrong takes longer.
    legal = (rank != other) & ~holds_ER[mine, other] & ~holds_ER[theirs, rank]
    at = max(n, 0)
    more = scaled_EN[theirs, at] * share_of(replicas_E[theirs])
    more -= scaled_EN[mine, at] * share_of(replicas_E[mine])
    relieves = (more < 0) & (load_NR[at, other] - more < load_NR[at, rank])
    found: bool = legal & (relieves | (n < 0))
    return found


@part
def _may_pass(
    load_NR: Float32, scaled_EN: Float32, replicas_E: Int32, holds_ER: Bool, holder_EK: Int32, attempt: _Move
) -> bool:
    """Return whether a replica may be passed on, and leaves those that pay for it below ``rank`` in its episode.

    These are ``other`` and all that hold ``theirs``; a thinner share of ``mine`` is not set against what they get.
    """
    rank, other, mine, theirs, n = attempt.rank, attempt.other, attempt.mine, attempt.theirs, attempt.episode
    legal: bool = (rank != other) & ~holds_ER[mine, other] & (replicas_E[theirs] > 1)
    if legal and n >= 0:
        limit = load_NR[n, rank]
        lost = scaled_EN[theirs, n] * share_of(replicas_E[theirs])
        more = scaled_EN[theirs, n] * share_of(replicas_E[theirs] - 1) - lost
        legal = load_NR[n, other] + scaled_EN[mine, n] * share_of(replicas_E[mine] + 1) - lost < limit
        for k in range(replicas_E[theirs]):
            holder = holder_EK[theirs, k]
            legal = legal and (holder == other or load_NR[n, holder] + more < limit)
    return legal


@part
def _swapped_loads(
    load_RN: Float32,
    scaled_EN: Float32,
    replicas_E: Int32,
    attempt: _Move,
    rank_K: Int32,
    changed_R1: Bool,
    changed_RN: Float32,
) -> int:
    """Note both ranks' loads after a swap; returns 2."""
    rank, other, mine, theirs = attempt.rank, attempt.other, attempt.mine, attempt.theirs
    mine_share, their_share = share_of(replicas_E[mine]), share_of(replicas_E[theirs])
    for n in range(scaled_EN.shape[1]):
        more = their_share * scaled_EN[theirs, n] - mine_share * scaled_EN[mine, n]
        changed_RN[rank, n] = load_RN[rank, n] + more
        changed_RN[other, n] = load_RN[other, n] - more
    rank_K[0], rank_K[1] = rank, other
    changed_R1[rank] = changed_R1[other] = True
    return 2


@part
def _passed_loads(
    load_RN: Float32,
    scaled_EN: Float32,
    replicas_E: Int32,
    holds_ER: Bool,
    holder_EK: Int32,
    attempt: _Move,
    rank_K: Int32,
    changed_R1: Bool,
    changed_RN: Float32,
) -> int:
    """Note the loads of all ranks that hold either expert once the replica has passed; returns how many these are."""
    gainer, loser = attempt.mine, attempt.theirs
    gained = share_of(replicas_E[gainer] + 1)
    less = gained - share_of(replicas_E[gainer])
    lost = share_of(replicas_E[loser])
    more = share_of(replicas_E[loser] - 1) - lost
    zero = np.float32(0.0)
    count = 0
    for k in range(replicas_E[gainer] + replicas_E[loser]):
        if k < replicas_E[gainer]:
            rank = holder_EK[gainer, k]
            of_gainer, of_loser = less, more if holds_ER[loser, rank] else zero
        else:
            rank = holder_EK[loser, k - replicas_E[gainer]]
            of_gainer, of_loser = (gained, -lost) if rank == attempt.other else (zero, more)
        if not changed_R1[rank]:
            for n in range(scaled_EN.shape[1]):
                changed = load_RN[rank, n] + of_gainer * scaled_EN[gainer, n]
                changed_RN[rank, n] = changed + of_loser * scaled_EN[loser, n]
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
    """The ratio once the first ``count`` ranks of ``rank_K`` have their rows of ``changed_RN`` as loads."""
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
def _apply_move(state: _State, attempt: _Move, count: int) -> None:
    """Make a change whose loads have been noted, of ``count`` ranks."""
    rank, other, mine, theirs = attempt.rank, attempt.other, attempt.mine, attempt.theirs
    state.phy2log_RS[other, attempt.place] = mine
    if attempt.swaps:
        state.phy2log_RS[rank, attempt.slot] = theirs
        _rehouse(state, mine, rank, other)
        _rehouse(state, theirs, other, rank)
    else:
        state.holder_EK[mine, state.replicas_E[mine]] = other
        state.holds_ER[mine, other] = True
        state.replicas_E[mine] += 1
        state.replicas_E[theirs] -= 1
        # The last of the holders takes the place of the one that is no more.
        last = state.holder_EK[theirs, state.replicas_E[theirs]]
        state.holder_EK[theirs, _at(state.holder_EK, theirs, other)] = last
        state.holds_ER[theirs, other] = False
    update_loads(state.top_ranks, state.rank_K, count, state.changed_R1, state.changed_RN)


@kernel
def _rehouse(state: _State, expert: int, rank: int, other: int) -> None:
    """Let ``other`` hold an expert in place of ``rank``."""
    state.holder_EK[expert, _at(state.holder_EK, expert, rank)] = other
    state.holds_ER[expert, rank] = False
    state.holds_ER[expert, other] = True


@kernel
def _at(holder_EK: Int32, expert: int, rank: int) -> int:
    """Where a rank is among an expert's holders."""
    k = 0
    while holder_EK[expert, k] != rank:
        k += 1
    return k
