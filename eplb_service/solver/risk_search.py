"""Local search on the hottest rank's mean + z*std: swap two experts, or turn one expert's spare copy into another's.

Each step takes the hottest rank and applies the change that leaves the ranks it touches coolest. From a deployed
placement every slot that comes to differ has a price, and the cheapest point of the whole walk is what counts.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk
from eplb_service.solver.packing import Packing, hottest_rank, replace, shift_load

SMALLEST_GAIN = 1e-5
"""Peak-to-average ratio below which a step is rounding, not progress."""


@kernel
def risk_search(
    packing: Packing, demand: Demand, home_ER: Bool, z: float, price: float, most_steps: int
) -> tuple[Int32, float]:
    """Walk downhill; returns the placement with the lowest risk + ``price`` * slots that differ from home.

    Parameters
    ----------
    packing, demand
        A complete placement (left at the walk's end) and its heat.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    z, price, most_steps
        Weight of the standard deviation; peak-to-average ratio per slot that differs; bound on the walk.

    Returns int32 ``[R, S]``, and its risk.
    """
    ranks, slots = packing.phy2log_RS.shape
    differing = 0
    for r in range(ranks):
        for s in range(slots):
            if not home_ER[packing.phy2log_RS[r, s], r]:
                differing += 1
    hot, hottest = hottest_rank(packing, z)
    best_RS = packing.phy2log_RS.copy()
    best_risk = hottest
    best_cost = hottest + price * differing
    for _ in range(most_steps):
        bound = hottest - SMALLEST_GAIN
        slot, rank, other = best_swap(packing, demand, hot, z, bound)
        if slot >= 0:
            differing += _swap(packing, demand, home_ER, hot, slot, rank, other)
        else:
            slot, rank, other = best_exchange(packing, demand, hot, z, bound)
            if slot < 0:
                break
            differing += _exchange(packing, demand, home_ER, packing.phy2log_RS[hot, slot], rank, other)
        hot, hottest = hottest_rank(packing, z)
        cost = hottest + price * differing
        if cost < best_cost:
            best_cost, best_risk = cost, hottest
            best_RS[:] = packing.phy2log_RS
    return best_RS, best_risk


@kernel
def best_swap(packing: Packing, demand: Demand, hot: int, z: float, bound: float) -> tuple[int, int, int]:
    """The swap between ``hot`` and another rank that leaves the hotter of the two coolest, below ``bound``.

    Returns slot of ``hot``, other rank, its slot; -1 three times where no swap stays below.
    """
    ranks, slots = packing.phy2log_RS.shape
    mean_E = demand.mean_E
    found = (-1, -1, -1)
    lowest = np.float32(bound)
    cross_E = packing.cross_RE[hot]
    load, variance = packing.load_R[hot], packing.variance_R[hot]
    for s in range(slots):
        out = packing.phy2log_RS[hot, s]
        out_weight = np.float32(1.0) / np.float32(packing.copies_E[out])
        out_mean = out_weight * mean_E[out]
        out_own = out_weight * out_weight * demand.gram_EE[out, out]
        gram_E = demand.gram_EE[out]
        for r in range(ranks):
            if r == hot or packing.holds_ER[out, r]:
                continue
            other_load, other_variance = packing.load_R[r], packing.variance_R[r]
            for t in range(slots):
                come = packing.phy2log_RS[r, t]
                weight = np.float32(1.0) / np.float32(packing.copies_E[come])
                change = weight * mean_E[come] - out_mean
                if load + change >= lowest or other_load - change >= lowest or packing.holds_ER[come, hot]:
                    continue
                own = (
                    out_own
                    + weight * weight * demand.gram_EE[come, come]
                    - np.float32(2.0) * out_weight * weight * gram_E[come]
                )
                here = variance + own + np.float32(2.0) * (weight * cross_E[come] - out_weight * cross_E[out])
                after = risk(load + change, here, z)
                if after >= lowest:
                    continue
                there = other_variance + own
                there += np.float32(2.0) * (
                    out_weight * packing.cross_RE[r, out] - weight * packing.cross_RE[r, come]
                )
                after = max(after, risk(other_load - change, there, z))
                if after < lowest:
                    lowest = after
                    found = (s, r, t)
    return found


@kernel
def best_exchange(packing: Packing, demand: Demand, hot: int, z: float, bound: float) -> tuple[int, int, int]:
    """The spare copy elsewhere that, as a copy of one of ``hot``'s experts, leaves the ranks it touches coolest.

    Returns slot of ``hot`` whose expert gains a copy, rank and slot of the copy given up; -1 three times where none
    is.
    """
    ranks, slots = packing.phy2log_RS.shape
    found = (-1, -1, -1)
    lowest = np.float32(bound)
    for s in range(slots):
        gainer = packing.phy2log_RS[hot, s]
        if packing.copies_E[gainer] == ranks:
            continue
        for r in range(ranks):
            if packing.holds_ER[gainer, r]:
                continue
            for t in range(slots):
                loser = packing.phy2log_RS[r, t]
                if packing.copies_E[loser] == 1:
                    continue
                after = _exchange_peak(packing, demand, gainer, loser, r, z, lowest)
                if after < lowest:
                    lowest = after
                    found = (s, r, t)
    return found


@kernel
def _exchange_peak(
    packing: Packing, demand: Demand, gainer: int, loser: int, rank: int, z: float, bound: float
) -> float:
    """Highest risk among the ranks that the exchange touches; ``bound`` as soon as one reaches it."""
    gainer_copies = np.float32(packing.copies_E[gainer])
    loser_copies = np.float32(packing.copies_E[loser])
    gain_now = np.float32(1.0) / gainer_copies
    gain_then = np.float32(1.0) / (gainer_copies + np.float32(1.0))
    lose_now = np.float32(1.0) / loser_copies
    lose_then = np.float32(1.0) / (loser_copies - np.float32(1.0))
    gainer_mean, loser_mean = demand.mean_E[gainer], demand.mean_E[loser]
    gainer_own, loser_own = demand.gram_EE[gainer, gainer], demand.gram_EE[loser, loser]
    both = demand.gram_EE[gainer, loser]
    peak = 0.0
    for r in range(packing.load_R.shape[0]):
        u = np.float32(0.0)
        v = np.float32(0.0)
        if r == rank:
            u, v = gain_then, -lose_now
        else:
            if packing.holds_ER[gainer, r]:
                u = gain_then - gain_now
            if packing.holds_ER[loser, r]:
                v = lose_then - lose_now
            if u == 0 and v == 0:
                continue
        load = packing.load_R[r] + u * gainer_mean + v * loser_mean
        if load >= bound:
            return bound
        variance = packing.variance_R[r] + u * u * gainer_own + v * v * loser_own
        variance += np.float32(2.0) * (
            u * v * both + u * packing.cross_RE[r, gainer] + v * packing.cross_RE[r, loser]
        )
        peak = max(peak, risk(load, variance, z))
        if peak >= bound:
            return bound
    return peak


@kernel
def _swap(packing: Packing, demand: Demand, home_ER: Bool, hot: int, slot: int, rank: int, other: int) -> int:
    """Swap the experts of two slots; returns by how many more slots the placement differs from home."""
    out = packing.phy2log_RS[hot, slot]
    come = packing.phy2log_RS[rank, other]
    replace(packing, demand, hot, slot, come, 1.0 / packing.copies_E[come])
    replace(packing, demand, rank, other, out, 1.0 / packing.copies_E[out])
    left = int(home_ER[out, hot]) + int(home_ER[come, rank])
    return left - int(home_ER[out, rank]) - int(home_ER[come, hot])


@kernel
def _exchange(packing: Packing, demand: Demand, home_ER: Bool, gainer: int, rank: int, slot: int) -> int:
    """Turn the copy in one slot into a copy of ``gainer``; returns by how many more slots it differs from home."""
    loser = packing.phy2log_RS[rank, slot]
    replace(packing, demand, rank, slot, gainer, 1.0 / (packing.copies_E[gainer] + 1))
    _share_anew(packing, demand, gainer, rank, 1)
    _share_anew(packing, demand, loser, rank, -1)
    return int(home_ER[loser, rank]) - int(home_ER[gainer, rank])


@kernel
def _share_anew(packing: Packing, demand: Demand, expert: int, but_rank: int, change: int) -> None:
    """Change an expert's number of copies and with it the load of the ranks that hold it, all but one."""
    copies = packing.copies_E[expert]
    shift = 1.0 / (copies + change) - 1.0 / copies
    for r in range(packing.load_R.shape[0]):
        if r != but_rank and packing.holds_ER[expert, r]:
            shift_load(packing, demand, expert, r, shift)
    packing.copies_E[expert] = copies + change
