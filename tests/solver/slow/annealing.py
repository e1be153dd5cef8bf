"""Slow twin of annealing: plain SplitMix64 random numbers, and every change evaluated from scratch."""

from __future__ import annotations

import math

import numpy as np

from eplb_core.solver import annealing as module
from eplb_core.solver.annealing import _Change
from tests.solver.slow.heat import even_shares, mean_of_max, rank_series
from tests.solver.slow.local_search import Closest


def anneal(phy2log_RS, scaled_EN, share_N, tries, seed):
    """Return the best placement, and the smallest margin by which any choice was made."""
    draws = Draws(seed)
    closest = Closest()

    def ratio(placed_RS):
        return mean_of_max(scaled_EN, share_N, placed_RS, even_shares(placed_RS))

    best_RS = phy2log_RS
    now = ratio(phy2log_RS)
    best = now
    for k in range(tries):
        if k % module._LOOK == 0:
            episode = draws.draw(len(share_N))
            cooled = math.log(module._COLDEST / module._HOTTEST) * k / tries
            temperature = module._HOTTEST * math.exp(cooled)
        attempt = _drawn(phy2log_RS, scaled_EN, episode, draws, closest)
        if not is_legal(phy2log_RS, attempt):
            continue
        if attempt.episode >= 0 and not closest.less(0, load_margin(phy2log_RS, attempt, scaled_EN)):
            continue
        attempt_ratio = ratio(after(phy2log_RS, attempt))
        if closest.less(now, attempt_ratio):
            loss = -math.log((1 + draws.draw(module._FINE)) / module._FINE)
            if closest.less(now + min(loss, module._HOPELESS) * temperature, attempt_ratio):
                continue
        phy2log_RS = after(phy2log_RS, attempt)
        now = attempt_ratio
        if closest.less(now, best):
            best_RS = phy2log_RS
            best = now
    return best_RS, closest.margin


def _drawn(phy2log_RS, scaled_EN, episode, draws, closest):
    ranks, slots = phy2log_RS.shape
    load_R = rank_series(phy2log_RS, even_shares(phy2log_RS), scaled_EN)[:, episode]
    guided = draws.draw(100) < module._GUIDED
    swaps = draws.draw(100) < module._SWAPS
    rank = closest.best(dict(enumerate(load_R)), -1.0) if guided else draws.draw(ranks)
    target = draws.draw(ranks)
    alternative = draws.draw(ranks)
    if target != alternative and closest.less(load_R[alternative], load_R[target]):
        target = alternative
    slot = draws.draw(slots)
    target_slot = draws.draw(slots)
    expert = int(phy2log_RS[rank, slot])
    target_expert = int(phy2log_RS[target, target_slot])
    return _Change(rank, slot, target, target_slot, expert, target_expert, swaps, episode if guided else -1)


def after(phy2log_RS, attempt):
    """Return the placement after a change."""
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[attempt.target, attempt.target_slot] = attempt.expert
    if attempt.swaps:
        phy2log_RS[attempt.rank, attempt.slot] = attempt.target_expert
    return phy2log_RS


def is_legal(phy2log_RS, attempt):
    """Return True if the change keeps every expert placed, with at most one replica per rank."""
    after_RS = after(phy2log_RS, attempt)
    apart = attempt.rank != attempt.target and attempt.expert != attempt.target_expert
    whole = set(after_RS.flat) == set(phy2log_RS.flat)
    return apart and whole and all(len(set(row)) == len(row) for row in after_RS.tolist())


def load_margin(phy2log_RS, attempt, scaled_EN):
    """Return how far the new loads of the affected ranks stay below the current load of ``rank`` in the episode.

    A swap affects both ranks, so ``rank`` itself must get cooler. A copied replica adds load to its new rank and to the
    ranks that still hold the replaced expert. The load that it takes off the copied expert's older replicas is not
    counted.
    """
    after_RS = after(phy2log_RS, attempt)
    share_RS = even_shares(phy2log_RS)
    heat_E = scaled_EN[:, attempt.episode]
    limit = (share_RS * heat_E[phy2log_RS])[attempt.rank].sum()
    if attempt.swaps:
        burdened = [attempt.rank, attempt.target]
        after_share_RS = even_shares(after_RS)
    else:
        burdened = (phy2log_RS == attempt.target_expert).any(axis=1)
        after_share_RS = np.where(phy2log_RS == attempt.expert, share_RS, even_shares(after_RS))
    load_R = (after_share_RS * heat_E[after_RS]).sum(axis=1)
    return (limit - load_R[burdened]).min()


_WORD = 2**64 - 1


def splitmix(state):
    """Return the generator's next state and its random number."""
    state = state + 0x9E3779B97F4A7C15 & _WORD
    mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return state, mixed ^ mixed >> 31


class Draws:
    """Sequence of random draws."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def draw(self, below):
        self.state, number = splitmix(self.state)
        return number // 2**32 * below // 2**32
