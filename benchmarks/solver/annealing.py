"""A long search for one layer's best placement, to know how far from it a quick one ends.

Simulated annealing on the ratio itself, even shares: experts trade places between two ranks, or a slot goes from an
expert with several replicas to another expert. It knows nothing of the solver's code.

References
----------
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
"""

from __future__ import annotations

import time

import numba
import numpy as np

from eplb_service.bench.decision import Float64, Int32
from eplb_service.placement import replica_counts

_STEPS_A_BURST = 20_000
_HOTTEST, _COLDEST = 2e-3, 1e-6
"""Temperatures, in peak-to-average ratio."""


def anneal(heat_NE: Float64, placed_RS: Int32, seconds: float, seed: int) -> Int32:
    """The best placement for the episodes ``[N, E]`` that is found within a time, from the one given."""
    scaled_EN = np.ascontiguousarray(
        (heat_NE * placed_RS.shape[0] / heat_NE.sum(axis=1, keepdims=True)).T, dtype=np.float32
    )
    now_RS = placed_RS.astype(np.int32).copy()
    best_RS: Int32 = now_RS.copy()
    _burst(now_RS.copy(), best_RS.copy(), scaled_EN, replica_counts(now_RS, heat_NE.shape[1]), 1.0, 0, seed)
    began = time.monotonic()
    while (spent := (time.monotonic() - began) / seconds) < 1:
        temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** spent
        replicas_E = replica_counts(now_RS, heat_NE.shape[1])
        seed += 1
        _burst(now_RS, best_RS, scaled_EN, replicas_E, temperature, _STEPS_A_BURST, seed)
    return best_RS


@numba.njit(fastmath=True, cache=True)
def _burst(now_RS, best_RS, scaled_EN, replicas_E, temperature, steps, seed):  # type: ignore[no-untyped-def]
    """So many tries at one temperature; changes ``now_RS``, ``replicas_E`` and ``best_RS`` in place."""
    np.random.seed(seed)
    ranks, slots = now_RS.shape
    experts, episodes = scaled_EN.shape
    load_RN = _loads(now_RS, scaled_EN, replicas_E)
    now = _ratio(load_RN)
    best = _ratio(_loads(best_RS, scaled_EN, _replica_counts(best_RS, experts)))
    kept_RN = load_RN.copy()
    for _ in range(steps):
        hot = np.argmax(load_RN[:, np.random.randint(episodes)])
        rank = hot if np.random.random() < 0.7 else np.random.randint(ranks)
        slot = np.random.randint(slots)
        if np.random.random() < 0.5:
            other, place = np.random.randint(ranks), np.random.randint(slots)
            mine, theirs = now_RS[rank, slot], now_RS[other, place]
            if not _trade(load_RN, now_RS, scaled_EN, replicas_E, rank, slot, other, place):
                continue
        else:
            other, place = -1, -1
            theirs = np.random.randint(experts)
            if np.random.random() < 0.7:
                loser = np.random.randint(ranks * slots)
                rank, slot = loser // slots, loser % slots
                theirs = now_RS[hot, np.random.randint(slots)]
            mine = now_RS[rank, slot]
            if not _replicate(load_RN, now_RS, scaled_EN, replicas_E, rank, slot, theirs):
                continue
        found = _ratio(load_RN)
        if found <= now or np.random.random() < np.exp((now - found) / temperature):
            now = found
            _copy_ranks(kept_RN, load_RN, now_RS, mine, theirs, rank, other)
            if now < best - 1e-7:
                best = now
                best_RS[:] = now_RS
            continue
        now_RS[rank, slot] = mine
        if other >= 0:
            now_RS[other, place] = theirs
        else:
            replicas_E[mine] += 1
            replicas_E[theirs] -= 1
        _copy_ranks(load_RN, kept_RN, now_RS, mine, theirs, rank, other)


@numba.njit(fastmath=True, cache=True)
def _trade(load_RN, now_RS, scaled_EN, replicas_E, rank, slot, other, place):  # type: ignore[no-untyped-def]
    """Two experts trade places; whether they may."""
    mine, theirs = now_RS[rank, slot], now_RS[other, place]
    if other == rank or _holds(now_RS[rank], theirs) or _holds(now_RS[other], mine):
        return False
    now_RS[rank, slot], now_RS[other, place] = theirs, mine
    for n in range(scaled_EN.shape[1]):
        more = scaled_EN[theirs, n] / replicas_E[theirs] - scaled_EN[mine, n] / replicas_E[mine]
        load_RN[rank, n] += more
        load_RN[other, n] -= more
    return True


@numba.njit(fastmath=True, cache=True)
def _replicate(load_RN, now_RS, scaled_EN, replicas_E, rank, slot, theirs):  # type: ignore[no-untyped-def]
    """A slot goes from an expert with several replicas to another; whether it may."""
    mine = now_RS[rank, slot]
    if replicas_E[mine] == 1 or theirs == mine or _holds(now_RS[rank], theirs):
        return False
    now_RS[rank, slot] = theirs
    replicas_E[mine] -= 1
    replicas_E[theirs] += 1
    _reload(load_RN, now_RS, scaled_EN, replicas_E, mine, theirs, rank)
    return True


@numba.njit(fastmath=True, cache=True)
def _reload(load_RN, now_RS, scaled_EN, replicas_E, mine, theirs, changed):  # type: ignore[no-untyped-def]
    """Loads afresh of the ranks that hold either expert, and of the one that changed."""
    for rank in range(now_RS.shape[0]):
        if rank != changed and not _holds(now_RS[rank], mine) and not _holds(now_RS[rank], theirs):
            continue
        load_RN[rank] = 0
        for expert in now_RS[rank]:
            load_RN[rank] += scaled_EN[expert] / replicas_E[expert]


@numba.njit(fastmath=True, cache=True)
def _copy_ranks(to_RN, from_RN, now_RS, mine, theirs, rank, other):  # type: ignore[no-untyped-def]
    """Copy the loads of the ranks that a try has touched."""
    if other >= 0:
        to_RN[rank] = from_RN[rank]
        to_RN[other] = from_RN[other]
        return
    for r in range(now_RS.shape[0]):
        if r == rank or _holds(now_RS[r], mine) or _holds(now_RS[r], theirs):
            to_RN[r] = from_RN[r]


@numba.njit(fastmath=True, cache=True)
def _loads(placed_RS, scaled_EN, replicas_E):  # type: ignore[no-untyped-def]
    load_RN = np.zeros((placed_RS.shape[0], scaled_EN.shape[1]), dtype=np.float32)
    for rank in range(placed_RS.shape[0]):
        for expert in placed_RS[rank]:
            load_RN[rank] += scaled_EN[expert] / replicas_E[expert]
    return load_RN


@numba.njit(fastmath=True, cache=True)
def _ratio(load_RN):  # type: ignore[no-untyped-def]
    """Mean over the episodes of the largest load; the mean load is 1."""
    peak_N = load_RN[0].copy()
    for rank in range(1, load_RN.shape[0]):
        for n in range(load_RN.shape[1]):
            peak_N[n] = max(peak_N[n], load_RN[rank, n])
    return peak_N.mean()


@numba.njit(cache=True)
def _replica_counts(placed_RS, experts):  # type: ignore[no-untyped-def]
    replicas_E = np.zeros(experts, dtype=np.int32)
    for expert in placed_RS.ravel():
        replicas_E[expert] += 1
    return replicas_E


@numba.njit(cache=True)
def _holds(placed_S, expert):  # type: ignore[no-untyped-def]
    found = False
    for held in placed_S:
        found |= held == expert
    return found
