"""Exchanges: turning one expert's spare copy into a copy of an expert of the hottest rank.

One slot receives weights, and with it every rank that holds either expert carries another share of its tokens.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, risk
from eplb_service.solver.packing import Packing, replace, shift_load
from eplb_service.solver.pressure import Pressure, pressure


@kernel
def best_exchange(
    packing: Packing, demand: Demand, now: Pressure, hot: int, z: float, bound: float
) -> tuple[int, int, int, float]:
    """The spare copy elsewhere that, as a copy of one of ``hot``'s experts, takes most pressure away, over ``bound``.

    An expert is looked at only where sharing it out further takes more than ``bound`` by itself; that the rank which
    gives up its copy gets cooler as well comes on top.

    Returns slot of ``hot`` whose expert gains a copy, rank and slot of the copy given up, and the pressure taken
    away; -1 three times where none takes enough.
    """
    ranks, slots = packing.phy2log_RS.shape
    found = (-1, -1, -1)
    most = bound
    for s in range(slots):
        gainer = packing.phy2log_RS[hot, s]
        if packing.copies_E[gainer] == ranks:
            continue
        share = np.float32(1.0) / np.float32(packing.copies_E[gainer] + 1)
        relief = np.float32(0.0)
        for r in range(ranks):
            if packing.holds_ER[gainer, r]:
                relief += now.of_R[r] - _pressure_with(
                    packing,
                    demand,
                    now,
                    r,
                    z,
                    gainer,
                    share - packing.share_ER[gainer, r],
                    0,
                    np.float32(0.0),
                )
        if relief <= bound:
            continue
        gained = share * demand.mean_E[gainer]
        for r in range(ranks):
            if packing.holds_ER[gainer, r]:
                continue
            # No rank's risk is below its mean load, so a load past this one alone presses too hard.
            limit = now.base + max(now.of_R[r] + relief - most, 0.0) ** 0.125 / now.scale
            for t in range(slots):
                loser = packing.phy2log_RS[r, t]
                lost = packing.share_ER[loser, r] * demand.mean_E[loser]
                if packing.copies_E[loser] == 1 or packing.load_R[r] + gained - lost > limit:
                    continue
                taken = relief - _burden(packing, demand, now, r, z, gainer, share, loser, relief - most)
                if taken > most:
                    most = taken
                    found = (s, r, t)
    return found[0], found[1], found[2], most


@kernel
def _burden(
    packing: Packing,
    demand: Demand,
    now: Pressure,
    rank: int,
    z: float,
    gainer: int,
    gained: float,
    loser: int,
    enough: float,
) -> float:
    """Pressure added where a copy of ``loser`` on ``rank`` becomes one of ``gainer``; stops once it is ``enough``."""
    burden: float = (
        _pressure_with(packing, demand, now, rank, z, gainer, gained, loser, -packing.share_ER[loser, rank])
        - now.of_R[rank]
    )
    share = np.float32(1.0) / np.float32(packing.copies_E[loser] - 1)
    for r in range(packing.load_R.shape[0]):
        if burden >= enough:
            break
        if r == rank or not packing.holds_ER[loser, r]:
            continue
        more = share - packing.share_ER[loser, r]
        if packing.holds_ER[gainer, r]:
            less = gained - packing.share_ER[gainer, r]
            burden += _pressure_with(packing, demand, now, r, z, gainer, less, loser, more)
            burden -= _pressure_with(packing, demand, now, r, z, gainer, less, loser, np.float32(0.0))
        else:
            burden += (
                _pressure_with(packing, demand, now, r, z, loser, more, gainer, np.float32(0.0)) - now.of_R[r]
            )
    return burden


@kernel
def _pressure_with(
    packing: Packing, demand: Demand, now: Pressure, rank: int, z: float, a: int, u: float, b: int, v: float
) -> float:
    """Pressure of a rank once it receives ``u`` more of expert ``a``'s tokens and ``v`` more of ``b``'s."""
    two = np.float32(2.0)
    load = packing.load_R[rank] + u * demand.mean_E[a] + v * demand.mean_E[b]
    variance = packing.variance_R[rank] + u * u * demand.gram_EE[a, a] + v * v * demand.gram_EE[b, b]
    variance += two * (
        u * v * demand.gram_EE[a, b] + u * packing.cross_RE[rank, a] + v * packing.cross_RE[rank, b]
    )
    return pressure(risk(load, variance, z), now.base, now.scale)


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
