"""Annealing try by try: numbers drawn as published, each change judged from scratch."""

from __future__ import annotations

import math

import numpy as np

from eplb_core.solver import annealing as module
from eplb_core.solver.annealing import _Change
from tests.solver.slow.heat import even_shares, mean_of_max, rank_series
from tests.solver.slow.local_search import Closest


def anneal(phy2log_RS, scaled_EN, share_N, tries, seed):
    """The best placement found, and by how little the closest choice was made."""
    draws, close = Draws(seed), Closest()

    def ratio(placed_RS):
        return mean_of_max(scaled_EN, share_N, placed_RS, even_shares(placed_RS))

    best_RS, now = phy2log_RS, ratio(phy2log_RS)
    best = now
    for k in range(tries):
        if k % module._LOOK == 0:
            episode = draws.draw(len(share_N))
            cooled = math.log(module._COLDEST / module._HOTTEST) * k / tries
            temperature = module._HOTTEST * math.exp(cooled)
        attempt = _drawn(phy2log_RS, scaled_EN, episode, draws, close)
        if not is_legal(phy2log_RS, attempt):
            continue
        if attempt.episode >= 0 and not close.less(0, room(phy2log_RS, attempt, scaled_EN)):
            continue
        found = ratio(after(phy2log_RS, attempt))
        if close.less(now, found):
            loss = -math.log((1 + draws.draw(module._FINE)) / module._FINE)
            if close.less(now + min(loss, module._HOPELESS) * temperature, found):
                continue
        phy2log_RS, now = after(phy2log_RS, attempt), found
        if close.less(now, best):
            best_RS, best = phy2log_RS, now
    return best_RS, close.margin


def _drawn(phy2log_RS, scaled_EN, episode, draws, close):
    ranks, slots = phy2log_RS.shape
    load_R = rank_series(phy2log_RS, even_shares(phy2log_RS), scaled_EN)[:, episode]
    guided, swaps = draws.draw(100) < module._GUIDED, draws.draw(100) < module._SWAPS
    rank = close.best(dict(enumerate(load_R)), -1.0) if guided else draws.draw(ranks)
    other, another = draws.draw(ranks), draws.draw(ranks)
    if other != another and close.less(load_R[another], load_R[other]):
        other = another
    slot, place = draws.draw(slots), draws.draw(slots)
    mine, theirs = int(phy2log_RS[rank, slot]), int(phy2log_RS[other, place])
    return _Change(rank, slot, other, place, mine, theirs, swaps, episode if guided else -1)


def after(phy2log_RS, attempt):
    """The placement once a change is made."""
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[attempt.target, attempt.target_slot] = attempt.expert
    if attempt.swaps:
        phy2log_RS[attempt.rank, attempt.slot] = attempt.target_expert
    return phy2log_RS


def is_legal(phy2log_RS, attempt):
    """Two ranks and two experts, of which none ends up twice on a rank, and none nowhere."""
    after_RS = after(phy2log_RS, attempt)
    apart = attempt.rank != attempt.target and attempt.expert != attempt.target_expert
    whole = set(after_RS.flat) == set(phy2log_RS.flat)
    return apart and whole and all(len(set(row)) == len(row) for row in after_RS.tolist())


def room(phy2log_RS, attempt, scaled_EN):
    """How far the ranks that a change may burden stay below what ``rank`` has in the episode now.

    A swap has ``rank`` itself among them: it must get cooler. A replica that passes on burdens who gets it and who
    still holds the expert that gave it up; that older replicas of the other get thinner is not counted.
    """
    after_RS = after(phy2log_RS, attempt)
    share_RS, heat_E = even_shares(phy2log_RS), scaled_EN[:, attempt.episode]
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
    """Next state and its number."""
    state = state + 0x9E3779B97F4A7C15 & _WORD
    mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return state, mixed ^ mixed >> 31


class Draws:
    """One sequence of draws."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def draw(self, below):
        self.state, number = splitmix(self.state)
        return number // 2**32 * below // 2**32
