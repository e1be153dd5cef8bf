"""Local search on the hottest rank's mean + z*std: swap two experts, or turn one expert's spare copy into another's.

Each step takes the hottest rank and applies the change that leaves the ranks it touches coolest. From a deployed
placement every slot that comes to differ has a price, and the cheapest point of the whole walk is what counts.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Int32
from eplb_service.solver.exchanges import best_exchange, exchange
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import SMALLEST_GAIN, Demand
from eplb_service.solver.packing import Packing, hottest_rank
from eplb_service.solver.swaps import SCRATCH_ROWS, best_swap, swap


@kernel
def risk_search(
    packing: Packing, demand: Demand, home_ER: Bool, z: float, price: float, exchanges: bool, most_steps: int
) -> tuple[Int32, float]:
    """Walk downhill; returns the placement with the lowest risk + ``price`` * slots that differ from home.

    Parameters
    ----------
    packing, demand
        A complete placement (left at the walk's end) and its heat.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    z, price
        Weight of the standard deviation; peak-to-average ratio per slot that differs.
    exchanges
        Change replica counts too; only swaps leave the shares that tables have set as they are.
    most_steps
        Bound on the walk.

    Returns int32 ``[R, S]``, and its risk. With a price, an exchange (one slot) is taken before a swap (two) wherever
    it wins more for each slot.
    """
    ranks, slots = packing.phy2log_RS.shape
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    differing = slots_away(packing.phy2log_RS, home_ER)
    hot, hottest = hottest_rank(packing, z)
    best_RS = packing.phy2log_RS.copy()
    best_risk = hottest
    best_cost = hottest + price * differing
    for _ in range(most_steps):
        bound = hottest - SMALLEST_GAIN
        slot, rank, other, swapped = best_swap(packing, demand, hot, z, bound, scratch)
        if slot < 0 and not exchanges:
            break
        if exchanges and (price > 0 or slot < 0):
            gainer, loser_rank, loser_slot, exchanged = best_exchange(packing, demand, hot, z, bound)
            if gainer < 0 and slot < 0:
                break
            if gainer >= 0 and (slot < 0 or 2 * (hottest - exchanged) > hottest - swapped):
                expert = packing.phy2log_RS[hot, gainer]
                differing += exchange(packing, demand, home_ER, expert, loser_rank, loser_slot)
                slot = -1
        if slot >= 0:
            differing += swap(packing, demand, home_ER, hot, slot, rank, other)
        hot, hottest = hottest_rank(packing, z)
        cost = hottest + price * differing
        if cost < best_cost:
            best_cost, best_risk = cost, hottest
            best_RS[:] = packing.phy2log_RS
    return best_RS, best_risk


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
