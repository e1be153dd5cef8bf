"""The local search step by step, every step chosen among all legal ones, judged from scratch."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.local_search import FRUITLESS, SMALLEST_RELIEF
from tests.solver.slow import steps
from tests.solver.slow.heat import even_shares, rank_risks


class Closest:
    """By how little a choice was made, over all choices so far."""

    def __init__(self) -> None:
        self.margin = np.inf

    def best(self, values, bound):
        """The key of the largest value over ``bound``, else ``None``."""
        first, *rest = sorted([*values.values(), bound], reverse=True)
        self.margin = min(self.margin, first - rest[0] if rest else np.inf)
        found = max(values, key=values.get, default=None)
        return None if found is None or values[found] <= bound else found

    def less(self, one, other):
        self.margin = min(self.margin, abs(one - other))
        return one < other


def search(phy2log_RS, scaled_EN, share_N, home_ER, z, price_K, most_steps):
    """The cheapest placement of the search for each price, and by how little the closest choice was made."""
    close, frugal = Closest(), max(price_K) > 0
    peak = steps.smooth_peak(rank_risks(phy2log_RS, even_shares(phy2log_RS), scaled_EN, share_N, z))
    cheapest = [peak + price * steps.slots_away(phy2log_RS, home_ER) for price in price_K]
    found = [phy2log_RS for _ in price_K]
    last_gain = 0
    for step in range(most_steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        share_RS = even_shares(phy2log_RS)
        risk_R = rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z)
        hot = close.best(dict(enumerate(risk_R)), -1.0)
        swaps = steps.swap_gains(phy2log_RS, share_RS, hot, scaled_EN, share_N, z)
        swap = close.best(swaps, SMALLEST_RELIEF)
        exchange = None
        if frugal or swap is None:
            enough = max(SMALLEST_RELIEF, 0.0 if swap is None else swaps[swap] / 2)
            exchange = close.best(steps.exchange_gains(phy2log_RS, hot, scaled_EN, share_N, z), enough)
        if exchange is not None:
            phy2log_RS, share_RS = steps.exchanged(phy2log_RS, hot, exchange)
        elif swap is not None:
            phy2log_RS, share_RS = steps.swapped(phy2log_RS, share_RS, hot, swap)
        else:
            break
        peak = steps.smooth_peak(rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z))
        for k, price in enumerate(price_K):
            cost = peak + price * steps.slots_away(phy2log_RS, home_ER)
            if close.less(cost, cheapest[k]):
                cheapest[k], found[k], last_gain = cost, phy2log_RS, step
    return np.array(found), close.margin


def swapped_through_tables(phy2log_RS, share_RS, scaled_EN, share_N, z, most_steps):
    """Slots by their number after the best swaps, each slot with its share, and by how little a choice was made."""
    close, slot_RS = Closest(), np.arange(phy2log_RS.size).reshape(phy2log_RS.shape)
    expert_P, share_P = phy2log_RS.ravel(), share_RS.ravel()
    for _ in range(most_steps):
        placed = expert_P[slot_RS], share_P[slot_RS]
        risk_R = rank_risks(*placed, scaled_EN, share_N, z)
        hot = close.best(dict(enumerate(risk_R)), -1.0)
        swap = close.best(steps.swap_gains(*placed, hot, scaled_EN, share_N, z), SMALLEST_RELIEF)
        if swap is None:
            break
        slot_RS, _ = steps.swapped(slot_RS, slot_RS, hot, swap)
    return slot_RS, close.margin
