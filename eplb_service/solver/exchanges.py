"""Exchanges: turning one expert's spare copy into a copy of an expert of the hottest rank.

One slot receives weights, and with it every rank that holds either expert carries another share of its tokens.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk
from eplb_service.solver.packing import Packing, replace, shift_load


@kernel
def best_exchange(
    packing: Packing, demand: Demand, hot: int, z: float, bound: float
) -> tuple[int, int, int, float]:
    """The spare copy elsewhere that, as a copy of one of ``hot``'s experts, leaves the ranks it touches coolest.

    Returns slot of ``hot`` whose expert gains a copy, rank and slot of the copy given up; -1 three times where none
    is.
    """
    ranks, slots = packing.phy2log_RS.shape
    found = (-1, -1, -1)
    lowest = bound
    for s in range(slots):
        gainer = packing.phy2log_RS[hot, s]
        if packing.copies_E[gainer] == ranks:
            continue
        gain_then = np.float32(1.0) / np.float32(packing.copies_E[gainer] + 1)
        if _risk_after(packing, demand, hot, gainer, gain_then - packing.share_ER[gainer, hot], z) >= lowest:
            continue
        gained = gain_then * demand.mean_E[gainer]
        for r in range(ranks):
            if packing.holds_ER[gainer, r]:
                continue
            for t in range(slots):
                loser = packing.phy2log_RS[r, t]
                left = packing.load_R[r] - packing.share_ER[loser, r] * demand.mean_E[loser]
                if packing.copies_E[loser] == 1 or left + gained >= lowest:
                    continue
                after = _exchange_peak(packing, demand, gainer, loser, r, z, lowest)
                if after < lowest:
                    lowest = after
                    found = (s, r, t)
    return found[0], found[1], found[2], lowest


@kernel
def _risk_after(packing: Packing, demand: Demand, rank: int, expert: int, change: float, z: float) -> float:
    """Risk of a rank once its copy of an expert receives ``change`` more of the tokens."""
    variance = packing.variance_R[rank] + change * (
        np.float32(2.0) * packing.cross_RE[rank, expert] + change * demand.gram_EE[expert, expert]
    )
    return risk(packing.load_R[rank] + change * demand.mean_E[expert], variance, z)


@kernel
def _exchange_peak(
    packing: Packing, demand: Demand, gainer: int, loser: int, rank: int, z: float, bound: float
) -> float:
    """Highest risk among the ranks that the exchange touches; ``bound`` as soon as one reaches it."""
    gain_then = np.float32(1.0) / np.float32(packing.copies_E[gainer] + 1)
    lose_then = np.float32(1.0) / np.float32(packing.copies_E[loser] - 1)
    gainer_mean, loser_mean = demand.mean_E[gainer], demand.mean_E[loser]
    gainer_own, loser_own = demand.gram_EE[gainer, gainer], demand.gram_EE[loser, loser]
    both = demand.gram_EE[gainer, loser]
    peak = 0.0
    for r in range(packing.load_R.shape[0]):
        u = np.float32(0.0)
        v = np.float32(0.0)
        if r == rank:
            u, v = gain_then, -packing.share_ER[loser, r]
        else:
            if packing.holds_ER[gainer, r]:
                u = gain_then - packing.share_ER[gainer, r]
            if packing.holds_ER[loser, r]:
                v = lose_then - packing.share_ER[loser, r]
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
def exchange(packing: Packing, demand: Demand, home_ER: Bool, gainer: int, rank: int, slot: int) -> int:
    """Turn the copy in one slot into a copy of ``gainer``; returns by how many more slots it differs from home."""
    loser = packing.phy2log_RS[rank, slot]
    packing.copies_E[gainer] += 1
    packing.copies_E[loser] -= 1
    replace(packing, demand, rank, slot, gainer, 0.0)
    _share_evenly(packing, demand, gainer)
    _share_evenly(packing, demand, loser)
    return int(home_ER[loser, rank]) - int(home_ER[gainer, rank])


@kernel
def _share_evenly(packing: Packing, demand: Demand, expert: int) -> None:
    """Split an expert's tokens evenly over the ranks that hold it."""
    share = 1.0 / packing.copies_E[expert]
    for r in range(packing.load_R.shape[0]):
        if packing.holds_ER[expert, r]:
            shift_load(packing, demand, expert, r, share - packing.share_ER[expert, r])
