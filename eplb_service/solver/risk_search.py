"""Local search on the hottest rank's mean + z*std: swap two experts, or turn one expert's spare copy into another's.

Each step takes the hottest rank and applies the change that leaves the ranks it touches coolest. From a deployed
placement every slot that comes to differ has a price, and the cheapest point of the whole walk is what counts.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float64, Int32
from eplb_service.solver.exchanges import best_exchange, exchange
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import SMALLEST_GAIN, Demand
from eplb_service.solver.packing import Packing, hottest_rank
from eplb_service.solver.swaps import SCRATCH_ROWS, best_swap, swap


@kernel
def risk_search(
    packing: Packing,
    demand: Demand,
    home_ER: Bool,
    z: float,
    price_K: Float64,
    exchanges: bool,
    most_steps: int,
) -> tuple[Int32, Float64]:
    """Walk downhill; returns, for each price, the placement with the lowest risk + price * slots away from home.

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
    exchanges
        Change replica counts too; only swaps leave the shares that tables have set as they are.
    most_steps
        Bound on the walk.

    Returns int32 ``[K, R, S]`` and the risks float64 ``[K]``. Where moves have a price, an exchange (one slot) is
    taken before a swap (two) if it wins more for each slot.
    """
    ranks, slots = packing.phy2log_RS.shape
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    frugal = price_K.max() > 0
    away = slots_away(packing.phy2log_RS, home_ER)
    hot, hottest = hottest_rank(packing, z)
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    best_KRS[:] = packing.phy2log_RS
    risk_K = np.full(price_K.shape[0], hottest, dtype=np.float64)
    cost_K = risk_K + price_K * away
    for _ in range(most_steps):
        bound = hottest - SMALLEST_GAIN
        slot, rank, other, swapped = best_swap(packing, demand, hot, z, bound, scratch)
        if slot < 0 and not exchanges:
            break
        if exchanges and (frugal or slot < 0):
            gainer, loser_rank, loser_slot, exchanged = best_exchange(packing, demand, hot, z, bound)
            if gainer < 0 and slot < 0:
                break
            if gainer >= 0 and (slot < 0 or 2 * (hottest - exchanged) > hottest - swapped):
                expert = packing.phy2log_RS[hot, gainer]
                away += exchange(packing, demand, home_ER, expert, loser_rank, loser_slot)
                slot = -1
        if slot >= 0:
            away += swap(packing, demand, home_ER, hot, slot, rank, other)
        hot, hottest = hottest_rank(packing, z)
        for k in range(price_K.shape[0]):
            cost = hottest + price_K[k] * away
            if cost < cost_K[k]:
                cost_K[k], risk_K[k] = cost, hottest
                best_KRS[k] = packing.phy2log_RS
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
