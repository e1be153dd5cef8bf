"""Slow twin of local search that evaluates every legal swap and exchange from scratch and applies the best one."""

from __future__ import annotations

import numpy as np

from eplb_core.solver.local_search import EXCHANGES, FRUITLESS
from eplb_core.solver.swaps import MIN_RELIEF
from tests.solver.slow.heat import even_shares, rank_risks


def scale_of(risk_R):
    """Return the base and span of the pressures for these risks."""
    mean = risk_R.mean()
    peak = risk_R.max()
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
    """Yield the legal swaps for rank ``hot`` as (slot, second rank, second rank's slot)."""
    for slot, outgoing in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if rank == hot or outgoing in row:
                continue
            for rank_slot, incoming in enumerate(row):
                if incoming not in phy2log_RS[hot]:
                    yield slot, rank, rank_slot


def legal_exchanges(phy2log_RS, hot):
    """Yield the spare replicas that may become replicas of an expert on ``hot``, under the rules for swaps."""
    for slot, gainer in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if gainer in row:
                continue
            for rank_slot, loser in enumerate(row):
                if (phy2log_RS == loser).sum() > 1:
                    yield slot, rank, rank_slot


def swapped(phy2log_RS, share_RS, hot, step):
    """Return the placement and shares after a swap. Each share moves with its replica."""
    slot, rank, rank_slot = step
    phy2log_RS = phy2log_RS.copy()
    share_RS = share_RS.copy()
    for array in (phy2log_RS, share_RS):
        array[hot, slot], array[rank, rank_slot] = array[rank, rank_slot], array[hot, slot]
    return phy2log_RS, share_RS


def exchanged(phy2log_RS, hot, step):
    """Return the placement and shares after an exchange. Both experts are then split evenly."""
    slot, rank, rank_slot = step
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[rank, rank_slot] = phy2log_RS[hot, slot]
    return phy2log_RS, even_shares(phy2log_RS)


def gains(placed, scaled_EN, share_N, z, steps):
    """Return the pressure relief from each step. ``steps`` maps a step to the placement and shares after it."""
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
    """Return the gains of exchanges whose first expert would relieve the hot rank by more than ``relief_over``.

    This relief assumes one more replica of the expert, and ignores the load that it adds to its new rank.
    """
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
    """The smallest margin by which any choice was made so far."""

    def __init__(self) -> None:
        self.margin = np.inf

    def best(self, values, bound):
        """Return the key of the largest value above ``bound``, or ``None``."""
        largest, *rest = sorted([*values.values(), bound], reverse=True)
        self.margin = min(self.margin, largest - rest[0] if rest else np.inf)
        key = max(values, key=values.get, default=None)
        return None if key is None or values[key] <= bound else key

    def less(self, first, second):
        self.margin = min(self.margin, abs(first - second))
        return first < second


def search(phy2log_RS, scaled_EN, share_N, home_ER, z, price_K, most_steps):
    """Return the cheapest placement for each price, and the smallest margin by which any choice was made."""
    closest = Closest()
    frugal = max(price_K) > 0
    peak = smooth_peak(rank_risks(phy2log_RS, even_shares(phy2log_RS), scaled_EN, share_N, z))
    cheapest = [peak + price * slots_away(phy2log_RS, home_ER) for price in price_K]
    best_K = [phy2log_RS for _ in price_K]
    last_gain = 0
    for step in range(most_steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        share_RS = even_shares(phy2log_RS)
        risk_R = rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z)
        hot = closest.best(dict(enumerate(risk_R)), -1.0)
        swaps = swap_gains(phy2log_RS, share_RS, hot, scaled_EN, share_N, z)
        swap = closest.best(swaps, MIN_RELIEF)
        exchange = None
        if (frugal and step % EXCHANGES == 0) or swap is None:
            enough = max(MIN_RELIEF, 0.0 if swap is None else swaps[swap] / 2)
            exchange = closest.best(exchange_gains(phy2log_RS, hot, scaled_EN, share_N, z), enough)
        if exchange is not None:
            phy2log_RS, share_RS = exchanged(phy2log_RS, hot, exchange)
        elif swap is not None:
            phy2log_RS, share_RS = swapped(phy2log_RS, share_RS, hot, swap)
        else:
            break
        peak = smooth_peak(rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z))
        for k, price in enumerate(price_K):
            cost = peak + price * slots_away(phy2log_RS, home_ER)
            if closest.less(cost, cheapest[k]):
                cheapest[k] = cost
                best_K[k] = phy2log_RS
                last_gain = step
    return np.array(best_K), closest.margin


def swapped_through_tables(phy2log_RS, share_RS, scaled_EN, share_N, z, most_steps):
    """Return the slot numbers after the best swaps, in which shares follow slots, and the smallest margin."""
    closest = Closest()
    slot_RS = np.arange(phy2log_RS.size).reshape(phy2log_RS.shape)
    expert_P = phy2log_RS.ravel()
    share_P = share_RS.ravel()
    for _ in range(most_steps):
        placed = expert_P[slot_RS], share_P[slot_RS]
        risk_R = rank_risks(*placed, scaled_EN, share_N, z)
        hot = closest.best(dict(enumerate(risk_R)), -1.0)
        swap = closest.best(swap_gains(*placed, hot, scaled_EN, share_N, z), MIN_RELIEF)
        if swap is None:
            break
        slot_RS, _ = swapped(slot_RS, slot_RS, hot, swap)
    return slot_RS, closest.margin
