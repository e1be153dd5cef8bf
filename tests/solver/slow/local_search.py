"""The local search step by step: every legal swap and exchange judged from scratch, and the best one taken."""

from __future__ import annotations

import numpy as np

from eplb_core.solver.local_search import EXCHANGES, FRUITLESS
from eplb_core.solver.swaps import MIN_RELIEF
from tests.solver.slow.heat import even_shares, rank_risks


def scale_of(risk_R):
    """Base and span of the pressures at these risks."""
    mean, peak = risk_R.mean(), risk_R.max()
    base = mean - 12 * (peak - mean)
    return base, max(peak - base, 1e-6)


def pressure_of(risk_R, base, span):
    return (np.maximum((risk_R - base) / span, 0) ** 8).sum()


def smooth_peak(risk_R):
    base, span = scale_of(risk_R)
    return base + span * pressure_of(risk_R, base, span) ** (1 / 8)


def slots_away(phy2log_RS, home_ER):
    return sum(not home_ER[expert, r] for r, row in enumerate(phy2log_RS) for expert in row)


def legal_swaps(phy2log_RS, hot):
    """Every swap of ``hot`` with another rank that puts no expert twice on a rank: slot, other rank, its slot."""
    for slot, out in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if rank == hot or out in row:
                continue
            for other, come in enumerate(row):
                if come not in phy2log_RS[hot]:
                    yield slot, rank, other


def legal_exchanges(phy2log_RS, hot):
    """Every spare replica that may become one of an expert of ``hot``: slot, other rank, its slot."""
    for slot, gainer in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if gainer in row:
                continue
            for other, loser in enumerate(row):
                if (phy2log_RS == loser).sum() > 1:
                    yield slot, rank, other


def swapped(phy2log_RS, share_RS, hot, step):
    """Placement and shares after a swap, shares going along."""
    slot, rank, other = step
    phy2log_RS, share_RS = phy2log_RS.copy(), share_RS.copy()
    for array in (phy2log_RS, share_RS):
        array[hot, slot], array[rank, other] = array[rank, other], array[hot, slot]
    return phy2log_RS, share_RS


def exchanged(phy2log_RS, hot, step):
    """Placement and shares after an exchange, both experts split evenly afresh."""
    slot, rank, other = step
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[rank, other] = phy2log_RS[hot, slot]
    return phy2log_RS, even_shares(phy2log_RS)


def gains(placed, scaled_EN, share_N, z, steps):
    """Pressure that each step takes away; ``steps`` maps a step to the placement and shares after it."""
    risk_R = rank_risks(*placed, scaled_EN, share_N, z)
    base, span = scale_of(risk_R)
    before = pressure_of(risk_R, base, span)
    return {
        step: before - pressure_of(rank_risks(*after, scaled_EN, share_N, z), base, span)
        for step, after in steps.items()
    }


def swap_gains(phy2log_RS, share_RS, hot, scaled_EN, share_N, z):
    steps = {step: swapped(phy2log_RS, share_RS, hot, step) for step in legal_swaps(phy2log_RS, hot)}
    return gains((phy2log_RS, share_RS), scaled_EN, share_N, z, steps)


def exchange_gains(phy2log_RS, hot, scaled_EN, share_N, z, relief_over=-np.inf):
    """Of the exchanges whose gainer alone, with one more replica that burdens nobody, takes more than so much away."""
    share_RS = even_shares(phy2log_RS)
    thinner = {}
    for slot, gainer in enumerate(phy2log_RS[hot]):
        replicas = (phy2log_RS == gainer).sum()
        thinner[slot] = phy2log_RS, np.where(phy2log_RS == gainer, 1 / (replicas + 1), share_RS)
    relief = gains((phy2log_RS, share_RS), scaled_EN, share_N, z, thinner)
    steps = {
        step: exchanged(phy2log_RS, hot, step)
        for step in legal_exchanges(phy2log_RS, hot)
        if relief[step[0]] > relief_over
    }
    return gains((phy2log_RS, share_RS), scaled_EN, share_N, z, steps)


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
    peak = smooth_peak(rank_risks(phy2log_RS, even_shares(phy2log_RS), scaled_EN, share_N, z))
    cheapest = [peak + price * slots_away(phy2log_RS, home_ER) for price in price_K]
    found = [phy2log_RS for _ in price_K]
    last_gain = 0
    for step in range(most_steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        share_RS = even_shares(phy2log_RS)
        risk_R = rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z)
        hot = close.best(dict(enumerate(risk_R)), -1.0)
        swaps = swap_gains(phy2log_RS, share_RS, hot, scaled_EN, share_N, z)
        swap = close.best(swaps, MIN_RELIEF)
        exchange = None
        if (frugal and step % EXCHANGES == 0) or swap is None:
            enough = max(MIN_RELIEF, 0.0 if swap is None else swaps[swap] / 2)
            exchange = close.best(exchange_gains(phy2log_RS, hot, scaled_EN, share_N, z), enough)
        if exchange is not None:
            phy2log_RS, share_RS = exchanged(phy2log_RS, hot, exchange)
        elif swap is not None:
            phy2log_RS, share_RS = swapped(phy2log_RS, share_RS, hot, swap)
        else:
            break
        peak = smooth_peak(rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z))
        for k, price in enumerate(price_K):
            cost = peak + price * slots_away(phy2log_RS, home_ER)
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
        swap = close.best(swap_gains(*placed, hot, scaled_EN, share_N, z), MIN_RELIEF)
        if swap is None:
            break
        slot_RS, _ = swapped(slot_RS, slot_RS, hot, swap)
    return slot_RS, close.margin
