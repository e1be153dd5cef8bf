"""Annealing try by try, each judged from scratch."""

from __future__ import annotations

import math

from eplb_service.solver import annealing as module
from eplb_service.solver.annealing import _Move
from tests.solver.slow import changes
from tests.solver.slow.heat import even_shares, mean_of_max, rank_series
from tests.solver.slow.local_search import Closest
from tests.solver.slow.rng import Draws


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
        if not changes.is_legal(phy2log_RS, attempt):
            continue
        if attempt.episode >= 0 and not close.less(0, changes.room(phy2log_RS, attempt, scaled_EN)):
            continue
        found = ratio(changes.after(phy2log_RS, attempt))
        if close.less(now, found):
            loss = -math.log((1 + draws.draw(module._FINE)) / module._FINE)
            if close.less(now + min(loss, module._HOPELESS) * temperature, found):
                continue
        phy2log_RS, now = changes.after(phy2log_RS, attempt), found
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
    return _Move(rank, slot, other, place, mine, theirs, swaps, episode if guided else -1)
