"""Local search: swap two experts, or turn one expert's spare copy into another's, while that lowers the pressure.

The objective is ``smooth_peak``, a function of the ranks' risks alone. Each step takes the hottest rank and the change
that takes most pressure away on the scale of the risks as they are; it stays only if the smooth peak then is lower, so
the search falls monotonically and cannot cycle. From a deployed placement every slot that comes to differ has a price,
and the cheapest point of the whole walk is what counts.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float64, Int32
from eplb_service.solver.exchanges import best_exchange, exchange
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand
from eplb_service.solver.packing import Packing
from eplb_service.solver.pressure import hottest_of, pressures, smooth_peak
from eplb_service.solver.swaps import SCRATCH_ROWS, best_swap, swap

SMALLEST_RELIEF = 1e-3
"""Pressure below which a step is rounding, not progress; the hottest rank's is 1."""

FRUITLESS = 24
"""Steps without a new cheapest placement after which a walk that pays for moves ends."""


@kernel
def risk_search(
    packing: Packing,
    demand: Demand,
    home_ER: Bool,
    z: float,
    price_K: Float64,
    patience: int,
    most_steps: int,
) -> tuple[Int32, Float64]:
    """Walk downhill; returns, for each price, the placement with the lowest smooth peak + price * slots away.

    Parameters
    ----------
    packing, demand
        A complete placement (left at the walk's end) and its heat.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    z
        Weight of the standard deviation.
    price_K
        float64 ``[K]``, peak-to-average ratio per slot away from home; one walk serves them all.
    patience
        Hot ranks in a row that nothing helps before the walk ends.
    most_steps
        Bound on the walk.

    Returns int32 ``[K, R, S]`` and the risks float64 ``[K]``. Where moves have a price, an exchange (one slot) is
    taken before a swap (two) if it wins more for each slot.
    """
    ranks, slots = packing.phy2log_RS.shape
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    frugal = price_K.max() > 0
    away = slots_away(packing.phy2log_RS, home_ER)
    now = pressures(packing, z)
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    best_KRS[:] = packing.phy2log_RS
    risk_K = np.full(price_K.shape[0], now.peak, dtype=np.float64)
    peak = smooth_peak(now)
    cost_K = peak + price_K * away
    stuck = 0
    last_gain = 0
    for step in range(most_steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        hot = hottest_of(now, stuck_R)
        slot, rank, other, won = best_swap(packing, demand, now, hot, z, SMALLEST_RELIEF, scratch)
        gainer, loser = -1, -1
        if frugal or slot < 0:
            # A swap fills two slots, an exchange one.
            enough = max(0.5 * won, SMALLEST_RELIEF)
            gainer, loser_rank, loser_slot, _ = best_exchange(packing, demand, now, hot, z, enough)
        gained_away = 0
        after = now
        if gainer >= 0:
            loser = packing.phy2log_RS[loser_rank, loser_slot]
            expert = packing.phy2log_RS[hot, gainer]
            gained_away = exchange(packing, demand, home_ER, expert, loser_rank, loser_slot)
            after = pressures(packing, z)
        elif slot >= 0:
            gained_away = swap(packing, demand, home_ER, hot, slot, rank, other)
            after = pressures(packing, z)
        if smooth_peak(after) >= peak:
            if gainer >= 0:
                exchange(packing, demand, home_ER, loser, loser_rank, loser_slot)
            elif slot >= 0:
                swap(packing, demand, home_ER, hot, slot, rank, other)
            stuck_R[hot] = True
            stuck += 1
            if stuck == min(patience, ranks):
                break
            continue
        if stuck > 0:
            stuck_R[:] = False
            stuck = 0
        now, peak = after, smooth_peak(after)
        away += gained_away
        for k in range(price_K.shape[0]):
            cost = peak + price_K[k] * away
            if cost < cost_K[k]:
                cost_K[k], risk_K[k] = cost, now.peak
                best_KRS[k] = packing.phy2log_RS
                last_gain = step
    return best_KRS, risk_K


@kernel
def slots_away(phy2log_RS: Int32, home_ER: Bool) -> int:
    """Slots whose expert is not at home on their rank."""
    ranks, slots = phy2log_RS.shape
    away = 0
    for r in range(ranks):
        for s in range(slots):
            if not home_ER[phy2log_RS[r, s], r]:
                away += 1
    return away
