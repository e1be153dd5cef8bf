"""Simulated annealing of a placement on the realised ratio: what a budget buys.

With two or three slots a rank everything hangs on how many copies each expert has and on who is paired with whom;
swaps and exchanges that each must win soon find no way on. Annealing takes many cheap random steps instead, at first
also some that lose a little.
"""

from __future__ import annotations

import math

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Int32
from eplb_service.solver.chance import draw
from eplb_service.solver.episode_loads import loads_in_episodes
from eplb_service.solver.jit import kernel
from eplb_service.solver.packing import copies_of, even_shares
from eplb_service.solver.problem import homes

_HOTTEST, _COLDEST = 2e-3, 2e-6
"""Temperatures at the first and the last try, in peak-to-average ratio."""
_REFRESH = 512
"""Steps taken after which rank loads are summed anew, so that rounding does not pile up."""
_LOOK = 8
"""Tries between two looks for a hot rank."""
_FINE = 1 << 24
"""Steps into which a random fraction is cut."""


@kernel
def anneal(
    phy2log_RS: Int32, scaled_EN: Float32, share_N: Float32, tries: int, seed: int
) -> tuple[Int32, float]:
    """Improve a placement by so many tries: swaps of two experts, and copies that pass from one expert to another.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    scaled_EN, share_N
        Normalised heat and the episodes' weights.
    tries, seed
        How long, and of which random numbers.

    Returns int32 ``[R, S]`` and its peak-to-average ratio under even shares, never above that of ``phy2log_RS``.

    References
    ----------
    S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
    """
    ranks, slots = phy2log_RS.shape
    experts, episodes = scaled_EN.shape
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    here_RS = phy2log_RS.copy()
    copies_E = copies_of(here_RS, experts)
    holds_ER = homes(here_RS, experts)
    load_RN = loads_in_episodes(here_RS, even_shares(here_RS, experts), scaled_EN)
    changed_RN = np.empty_like(load_RN)
    touched_R = np.zeros(ranks, dtype=np.bool_)
    now = _mean_peak(load_RN, share_N)
    best_RS, best = here_RS.copy(), now
    taken = 0
    hot, temperature = 0, _HOTTEST
    for k in range(tries if ranks > 1 and share_N.sum() > 0 else 0):
        if k % _LOOK == 0:
            hot = _hottest(load_RN, draw(state_1, episodes))
            temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        limit = now - temperature * math.log((1 + draw(state_1, _FINE)) / _FINE)
        rank = hot if draw(state_1, 4) > 0 else draw(state_1, ranks)
        slot, other, place = draw(state_1, slots), draw(state_1, ranks), draw(state_1, slots)
        mine, theirs = here_RS[rank, slot], here_RS[other, place]
        if other == rank or holds_ER[mine, other]:
            continue
        touched_R[:] = False
        swaps = draw(state_1, 2) == 0
        if swaps:
            if holds_ER[theirs, rank]:
                continue
            _swap_loads(load_RN, changed_RN, scaled_EN, copies_E, rank, mine, other, theirs)
            touched_R[rank] = touched_R[other] = True
        else:
            if copies_E[theirs] == 1:
                continue
            _pass_loads(load_RN, changed_RN, touched_R, scaled_EN, copies_E, holds_ER, other, theirs, mine)
        found = _peak_after(load_RN, changed_RN, touched_R, share_N, limit)
        if found > limit:
            continue
        for r in range(ranks):
            if touched_R[r]:
                load_RN[r] = changed_RN[r]
        if swaps:
            here_RS[rank, slot] = theirs
            holds_ER[mine, rank], holds_ER[theirs, rank] = False, True
        else:
            copies_E[mine] += 1
            copies_E[theirs] -= 1
        here_RS[other, place] = mine
        holds_ER[mine, other], holds_ER[theirs, other] = True, False
        now = found
        taken += 1
        if taken % _REFRESH == 0:
            load_RN = loads_in_episodes(here_RS, even_shares(here_RS, experts), scaled_EN)
            now = _mean_peak(load_RN, share_N)
        if now < best:
            best = now
            best_RS[:] = here_RS
    return best_RS, best


@kernel
def _hottest(load_RN: Float32, episode: int) -> int:
    """The hottest rank of one episode."""
    hot = 0
    for r in range(load_RN.shape[0]):
        if load_RN[r, episode] > load_RN[hot, episode]:
            hot = r
    return hot


@kernel
def _mean_peak(load_RN: Float32, share_N: Float32) -> float:
    """Mean of the episodes' peaks; 1.0 where there are no tokens."""
    peak_N = np.zeros(share_N.shape[0], dtype=np.float32)
    for r in range(load_RN.shape[0]):
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], load_RN[r, n])
    total = 0.0
    weights = 0.0
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
        weights += share_N[n]
    return total if weights > 0 else 1.0


@kernel
def _swap_loads(
    load_RN: Float32,
    changed_RN: Float32,
    scaled_EN: Float32,
    copies_E: Int32,
    rank: int,
    mine: int,
    other: int,
    theirs: int,
) -> None:
    """Loads of two ranks once ``mine`` and ``theirs`` have changed places."""
    mine_share = np.float32(1.0) / np.float32(copies_E[mine])
    their_share = np.float32(1.0) / np.float32(copies_E[theirs])
    for n in range(scaled_EN.shape[1]):
        more = their_share * scaled_EN[theirs, n] - mine_share * scaled_EN[mine, n]
        changed_RN[rank, n] = load_RN[rank, n] + more
        changed_RN[other, n] = load_RN[other, n] - more


@kernel
def _pass_loads(
    load_RN: Float32,
    changed_RN: Float32,
    touched_R: Bool,
    scaled_EN: Float32,
    copies_E: Int32,
    holds_ER: Bool,
    rank: int,
    loser: int,
    gainer: int,
) -> None:
    """Loads of all ranks that hold either expert once the copy of ``loser`` on ``rank`` is one of ``gainer``."""
    gained = np.float32(1.0) / np.float32(copies_E[gainer] + 1)
    less = gained - np.float32(1.0) / np.float32(copies_E[gainer])
    lost = np.float32(1.0) / np.float32(copies_E[loser])
    more = np.float32(1.0) / np.float32(copies_E[loser] - 1) - lost
    for r in range(load_RN.shape[0]):
        of_gainer = less if holds_ER[gainer, r] else np.float32(0.0)
        of_loser = more if holds_ER[loser, r] else np.float32(0.0)
        if r == rank:
            of_gainer, of_loser = gained, -lost
        if of_gainer == 0 and of_loser == 0:
            continue
        touched_R[r] = True
        for n in range(scaled_EN.shape[1]):
            changed_RN[r, n] = (
                load_RN[r, n] + of_gainer * scaled_EN[gainer, n] + of_loser * scaled_EN[loser, n]
            )


@kernel
def _peak_after(
    load_RN: Float32, changed_RN: Float32, touched_R: Bool, share_N: Float32, limit: float
) -> float:
    """Mean of the episodes' peaks with the touched ranks' loads changed; stops where these alone are past ``limit``."""
    peak_N = np.zeros(share_N.shape[0], dtype=np.float32)
    for r in range(touched_R.shape[0]):
        if touched_R[r]:
            for n in range(peak_N.shape[0]):
                peak_N[n] = max(peak_N[n], changed_RN[r, n])
    total = np.float32(0.0)
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
    if total > limit:
        return float(total)
    for r in range(touched_R.shape[0]):
        if not touched_R[r]:
            for n in range(peak_N.shape[0]):
                peak_N[n] = max(peak_N[n], load_RN[r, n])
    total = np.float32(0.0)
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
    return float(total)
