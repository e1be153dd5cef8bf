"""Simulated annealing of a placement on the realised ratio: how replicas and ranks are found where slots are few.

With two or three slots per rank everything hangs on how many replicas each expert has and on who is paired with whom;
swaps and exchanges that each must win soon find no way on. Annealing takes many cheap random steps instead, at first
also some that lose a little. A budget buys more of them.
"""

from __future__ import annotations

import math

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Float32, Int32, UInt64, set_row
from eplb_service.solver.search.annealing_state import (
    Move,
    apply_move,
    may_pass,
    may_swap,
    passed_loads,
    resum,
    start,
    swapped_loads,
)
from eplb_service.solver.search.construction import share_of
from eplb_service.solver.search.top_ranks import mean_peak, peak_of_changed, peak_of_two

_HOTTEST, _COLDEST = 1e-3, 1e-5
"""Temperatures at the first and the last try, in peak-to-average ratio.

Placed from scratch, 2 layers x 256 experts on 256 ranks x 2 slots (the four kinds of heat of ``make bench-solver``,
seeds 1 to 3, mean ratio on the window) come out 1.1 % worse with a first one of 3e-3 and 0.2 % with 3e-4; a last one of
1e-4 or 1e-6 is within 0.2 %.
"""
_REFRESH = 512
"""Steps taken after which rank loads are summed afresh, so that rounding does not pile up."""
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
def anneal(
    phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32, tries: int, seed: int
) -> tuple[Int32, float]:
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
    best_RS, best
        int32 ``[R, S]`` and its peak-to-average ratio under even shares, never above that of ``phy2log_RS``.

    References
    ----------
    S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
    """
    ranks = phy2log_RS.shape[0]
    if share_N.sum() <= 0:
        return phy2log_RS.copy(), 1.0
    state = start(phy2log_RS, scaled_EN)
    here_RS, replicas_E, holds_ER, holder_EK, top, rank_K, changed_R1, changed_RN = state
    load_RN, load_NR, rank_KN, peak_KN = top
    now = mean_peak(peak_KN, share_N)
    best_RS, best = phy2log_RS.copy(), now
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    taken = 0
    episode, temperature = 0, _HOTTEST
    for k in range(tries if ranks > 1 else 0):
        if k % _LOOK == 0:
            episode = draw(state_1, share_N.shape[0])
            temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        attempt = _drawn(here_RS, load_NR, rank_KN, episode, state_1)
        count = 0
        if attempt.swaps:
            if not may_swap(load_NR, scaled_EN, replicas_E, holds_ER, attempt):
                continue
            found = peak_of_two(
                load_RN,
                rank_KN,
                peak_KN,
                share_N,
                attempt.rank,
                attempt.other,
                share_of(replicas_E[attempt.mine]),
                scaled_EN[attempt.mine],
                share_of(replicas_E[attempt.theirs]),
                scaled_EN[attempt.theirs],
            )
        else:
            if not may_pass(load_NR, scaled_EN, replicas_E, holds_ER, holder_EK, attempt):
                continue
            count = passed_loads(
                load_RN, scaled_EN, replicas_E, holds_ER, holder_EK, attempt, rank_K, changed_R1, changed_RN
            )
            found = peak_of_changed(load_NR, rank_KN, peak_KN, share_N, rank_K, count, changed_R1, changed_RN)
        if found <= now or found <= now + bearable(temperature, state_1):
            if attempt.swaps:
                count = swapped_loads(load_RN, scaled_EN, replicas_E, attempt, rank_K, changed_R1, changed_RN)
            apply_move(state, attempt, count)
            now = found
            taken += 1
        for j in range(count):
            changed_R1[rank_K[j]] = False
        if taken == _REFRESH:
            resum(state, scaled_EN)
            now = mean_peak(peak_KN, share_N)
            taken = 0
        if now < best:
            best = now
            for r in range(ranks):
                set_row(best_RS[r], here_RS[r])
    return best_RS, best


@part
def _drawn(here_RS: Int32, load_NR: Float32, rank_KN: Int32, episode: int, state_1: UInt64) -> Move:
    """A random change, most often one of the hottest rank of an episode and of the cooler of two others."""
    ranks, slots = here_RS.shape
    guided, swaps = draw(state_1, 100) < _GUIDED, draw(state_1, 100) < _SWAPS
    rank = np.int64(rank_KN[0, episode]) if guided else draw(state_1, ranks)
    other, another = draw(state_1, ranks), draw(state_1, ranks)
    if load_NR[episode, another] < load_NR[episode, other]:
        other = another
    slot, place = draw(state_1, slots), draw(state_1, slots)
    mine, theirs = here_RS[rank, slot], here_RS[other, place]
    return Move(rank, slot, other, place, mine, theirs, swaps, episode if guided else -1)


@part
def bearable(temperature: float, state_1: UInt64) -> float:
    """A loss that is taken at this temperature, drawn as Metropolis did."""
    return min(-math.log((1 + draw(state_1, _FINE)) / _FINE), float(_HOPELESS)) * temperature
