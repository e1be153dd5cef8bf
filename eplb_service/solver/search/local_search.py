"""Local search: swap two experts, or turn a spare replica of one expert into one of another, to cool the hottest rank.

The objective is the smooth peak of ``evaluation``, a function of the ranks' risks alone, plus the price of the slots
that differ from the deployed placement. Each step takes the hottest rank and the change that takes most pressure away
on the scale of the risks as they are. That scale follows the risks, so a single step may lift the smooth peak, and
going on from there pays: with such steps undone, placements of 256 experts on 32 ranks x 9 slots were up to 1.1 %
hotter (phased and bursty heat, seeds 1 and 2). What is returned is the lowest point of the whole search, so it is never
above the start.

The search is this project's own, of a well-known kind.

References
----------
E. Aarts, J. K. Lenstra (editors), *Local Search in Combinatorial Optimization*, 1997.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Demand, Float64, Int32, SearchParams, set_row
from eplb_service.solver.search.construction import Assignment
from eplb_service.solver.search.evaluation import hottest_of, smooth_max_of, smooth_peak
from eplb_service.solver.search.exchanges import best_exchange, exchange
from eplb_service.solver.search.neighbourhood import SCRATCH_ROWS, best_swap, swap

SMALLEST_RELIEF = 1e-3
"""Pressure below which a step is rounding, not progress; the hottest rank's is 1.

In closed loops of 3 layers x 256 experts on 32 ranks x 9 slots (the four kinds of heat of ``make bench-solver``, seeds
1 and 2, two decisions after the first placement) 1e-4 and 1e-2 decide alike; 0.1 realises up to 0.8 % more.
"""
FRUITLESS = 24
"""Steps without a new cheapest placement after which a search that pays for moves ends. In the same loops 12
and 48 decide alike; 3 realises 1.9 % more on drift."""


@kernel
def local_search(
    assignment: Assignment,
    demand: Demand,
    home_ER: Bool,
    params: SearchParams,
    price_K: Float64,
) -> tuple[Int32, Float64]:
    """Go downhill; returns, for each price, the placement with the lowest smooth peak + price * slots away.

    Parameters
    ----------
    assignment, demand
        A complete placement (left where the search ends) and its heat.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    params
        ``z``, ``swaps``, ``exchanges``, ``local_search_steps`` and ``local_search_patience``.
    price_K
        float64 ``[K]``, peak-to-average ratio per slot away from home; one search serves them all.

    Returns
    -------
    best_KRS, risk_K
        int32 ``[K, R, S]`` and the risks of their hottest ranks, float64 ``[K]``. Where moves have a price, an exchange
        (one slot) is taken before a swap (two) if it wins more for each slot.
    """
    ranks, slots = assignment.phy2log_RS.shape
    z = params.z
    scratch = np.empty((SCRATCH_ROWS, ranks * slots), dtype=np.float32)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    frugal = False
    for price in price_K:
        frugal = frugal or price > 0
    away = slots_away(assignment.phy2log_RS, home_ER)
    now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    risk_K = np.empty(price_K.shape[0], dtype=np.float64)
    cost_K = np.empty(price_K.shape[0], dtype=np.float64)
    for k in range(price_K.shape[0]):
        _keep(best_KRS[k], assignment.phy2log_RS)
        cost_K[k], risk_K[k] = smooth_peak(now) + price_K[k] * away, now.peak
    stuck = 0
    last_gain = 0
    for step in range(params.local_search_steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        hot = hottest_of(now, stuck_R)
        slot, rank, other, won = -1, -1, -1, 0.0
        if params.swaps:
            slot, rank, other, won = best_swap(assignment, demand, now, hot, z, SMALLEST_RELIEF, scratch)
        gainer = -1
        if params.exchanges and (frugal or slot < 0):
            # A swap fills two slots, an exchange one.
            enough = max(0.5 * won, SMALLEST_RELIEF)
            gainer, loser_rank, loser_slot, _ = best_exchange(assignment, demand, now, hot, z, enough)
        if gainer >= 0:
            expert = assignment.phy2log_RS[hot, gainer]
            away += exchange(assignment, demand, home_ER, expert, loser_rank, loser_slot)
        elif slot >= 0:
            away += swap(assignment, demand, home_ER, hot, slot, rank, other)
        else:
            stuck_R[hot] = True
            stuck += 1
            if stuck == min(params.local_search_patience, ranks):
                break
            continue
        if stuck > 0:
            stuck_R[:] = False
            stuck = 0
        now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
        peak = smooth_peak(now)
        for k in range(price_K.shape[0]):
            cost = peak + price_K[k] * away
            if cost < cost_K[k]:
                cost_K[k], risk_K[k] = cost, now.peak
                _keep(best_KRS[k], assignment.phy2log_RS)
                last_gain = step
    return best_KRS, risk_K


@part
def _keep(best_RS: Int32, phy2log_RS: Int32) -> None:
    """Note a placement as the best so far."""
    for r in range(best_RS.shape[0]):
        set_row(best_RS[r], phy2log_RS[r])


@part
def slots_away(phy2log_RS: Int32, home_ER: Bool) -> int:
    """Slots whose expert is not at home on their rank."""
    ranks, slots = phy2log_RS.shape
    away = 0
    for r in range(ranks):
        for s in range(slots):
            if not home_ER[phy2log_RS[r, s], r]:
                away += 1
    return away
