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

from eplb_core.solver.construction import Assignment, replace, share_of, shift_load
from eplb_core.solver.evaluation import (
    SmoothMax,
    hottest_of,
    risk,
    smooth_max_of,
    smooth_peak,
    smooth_term,
)
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Float64, Heat, Int32, set_placement
from eplb_core.solver.swaps import MIN_RELIEF, best_swap, lay_out, swap, swaps_of

FRUITLESS = 5
"""Steps without a new cheapest placement after which a search that pays for moves ends. On drift (``make
bench-decide``, ten seeds) 3, 5 and 8 realise the same; with 12 the search takes 1.7 times as long."""
EXCHANGES = 4
"""Steps of such a search of which one looks for an exchange first: to look for one takes 2.5 times as long as for a
swap on 32 ranks x 9 slots, and 6 times on 1,024 x 2."""


@kernel
def local_search(
    assignment: Assignment,
    heat: Heat,
    home_ER: Bool,
    price_K: Float64,
    z: float,
    steps: int,
    exchanges: bool = True,
) -> Int32:
    """Go downhill; returns, for each price, the placement with the lowest smooth peak + price * slots away.

    Parameters
    ----------
    assignment, heat
        A complete placement (left where the search ends) and its heat.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    price_K
        float64 ``[K]``, peak-to-average ratio per slot away from home; one search serves them all.
    z
        Weight of the standard deviation.
    steps
        Most changes that are made.
    exchanges
        Whether replicas may be exchanged besides; not where their counts are settled.

    Returns
    -------
    Int32
        int32 ``[K, R, S]``. Where moves have a price, in one of ``EXCHANGES`` steps an exchange (one slot) is taken
        before a swap (two) if it wins more for each slot.
    """
    ranks, slots = assignment.phy2log_RS.shape
    swaps = swaps_of(assignment, heat)
    frugal = False
    for price in price_K:
        frugal = frugal or price > 0
    away = _slots_away(assignment.phy2log_RS, home_ER)
    now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    cost_K = np.empty(price_K.shape[0], dtype=np.float64)
    for k in range(price_K.shape[0]):
        set_placement(best_KRS[k], assignment.phy2log_RS)
        cost_K[k] = smooth_peak(now) + price_K[k] * away
    last_gain = 0
    for step in range(steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        hot = hottest_of(now)
        slot, rank, other, won = best_swap(assignment, heat, now, hot, z, MIN_RELIEF, swaps)
        gainer = -1
        if exchanges and (slot < 0 or (frugal and step % EXCHANGES == 0)):
            # A swap fills two slots, an exchange one.
            enough = max(0.5 * won, MIN_RELIEF)
            gainer, loser_rank, loser_slot, _ = _best_exchange(assignment, heat, now, hot, z, enough)
        if gainer >= 0:
            expert, loser = assignment.phy2log_RS[hot, gainer], assignment.phy2log_RS[loser_rank, loser_slot]
            away += _exchange(assignment, heat, home_ER, expert, loser_rank, loser_slot)
            for r in range(ranks):
                if assignment.holds_ER[expert, r] or assignment.holds_ER[loser, r]:
                    lay_out(assignment, heat, swaps, r)
        elif slot >= 0:
            away += swap(assignment, heat, home_ER, swaps, hot, slot, rank, other)
        else:
            break
        now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
        peak = smooth_peak(now)
        for k in range(price_K.shape[0]):
            cost = peak + price_K[k] * away
            if cost < cost_K[k]:
                cost_K[k] = cost
                set_placement(best_KRS[k], assignment.phy2log_RS)
                last_gain = step
    return best_KRS


@part
def _slots_away(phy2log_RS: Int32, home_ER: Bool) -> int:
    """Slots whose expert is not at home on their rank."""
    ranks, slots = phy2log_RS.shape
    away = 0
    for r in range(ranks):
        for s in range(slots):
            if not home_ER[phy2log_RS[r, s], r]:
                away += 1
    return away


@part
def risk_of_both(
    assignment: Assignment, heat: Heat, rank: int, a: int, u: float, b: int, v: float, z: float
) -> float:
    """Risk of a rank once it receives ``u`` more of expert ``a``'s tokens and ``v`` more of ``b``'s.

    For the arguments see ``model``.
    """
    two = np.float32(2.0)
    load = assignment.load_R[rank] + u * heat.mean_E[a] + v * heat.mean_E[b]
    variance = assignment.variance_R[rank] + u * u * heat.gram_EE[a, a] + v * v * heat.gram_EE[b, b]
    variance += two * (
        u * v * heat.gram_EE[a, b] + u * assignment.cross_RE[rank, a] + v * assignment.cross_RE[rank, b]
    )
    return risk(load, variance, z)


@kernel
def _best_exchange(
    assignment: Assignment, heat: Heat, now: SmoothMax, hot: int, z: float, bound: float
) -> tuple[int, int, int, float]:
    """The spare replica that, as one of an expert of ``hot``, takes most pressure away, more than ``bound``.

    An expert is looked at only where sharing it out further takes more than ``bound`` by itself; that the rank which
    gives up its replica gets cooler as well comes on top.
    """
    ranks, slots = assignment.phy2log_RS.shape
    burden_P = np.empty(ranks * slots, dtype=np.float32)
    burden_E = np.empty(assignment.replicas_E.shape[0], dtype=np.float32)
    found = (-1, -1, -1)
    most = bound
    for s in range(slots):
        gainer = assignment.phy2log_RS[hot, s]
        if assignment.replicas_E[gainer] == ranks:
            continue
        share = share_of(assignment.replicas_E[gainer] + 1)
        relief = np.float32(0.0)
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                relief += now.of_R[r] - _pressure_with(
                    assignment,
                    heat,
                    now,
                    r,
                    z,
                    gainer,
                    share - assignment.share_ER[gainer, r],
                    gainer,
                    np.float32(0.0),
                )
        if relief <= bound:
            continue
        _lay_out_burdens(assignment, heat, now, z, gainer, share, burden_P, burden_E)
        gained = share * heat.mean_E[gainer]
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                continue
            # No rank's risk is below its mean load, so a load past this one alone presses too hard.
            limit = now.base + max(now.of_R[r] + relief - most, 0.0) ** 0.125 / now.scale
            for t in range(slots):
                loser = assignment.phy2log_RS[r, t]
                lost = assignment.share_ER[loser, r]
                if (
                    assignment.replicas_E[loser] == 1
                    or assignment.load_R[r] + gained - lost * heat.mean_E[loser] > limit
                ):
                    continue
                own = _pressure_with(assignment, heat, now, r, z, gainer, share, loser, -lost) - now.of_R[r]
                taken = relief - own - (burden_E[loser] - burden_P[r * slots + t])
                if taken > most:
                    most = taken
                    found = (s, r, t)
    return found[0], found[1], found[2], most


@kernel
def _lay_out_burdens(
    assignment: Assignment,
    heat: Heat,
    now: SmoothMax,
    z: float,
    gainer: int,
    gained: float,
    burden_P: Float32,
    burden_E: Float32,
) -> None:
    """Lay out the pressure added to each slot's rank where its expert has a replica less elsewhere, and their sums.

    Ranks that hold ``gainer`` have ``gained`` of it by then.
    """
    zero = np.float32(0.0)
    ranks, slots = assignment.phy2log_RS.shape
    for e in range(burden_E.shape[0]):
        burden_E[e] = zero
    for r in range(ranks):
        less = gained - assignment.share_ER[gainer, r] if assignment.holds_ER[gainer, r] else zero
        for t in range(slots):
            loser, burden = assignment.phy2log_RS[r, t], zero
            if assignment.replicas_E[loser] > 1 and loser != gainer:
                more = share_of(assignment.replicas_E[loser] - 1) - assignment.share_ER[loser, r]
                burden += _pressure_with(assignment, heat, now, r, z, gainer, less, loser, more)
                burden -= _pressure_with(assignment, heat, now, r, z, gainer, less, loser, zero)
            burden_P[r * slots + t] = burden
            burden_E[loser] += burden


@kernel
def _pressure_with(
    assignment: Assignment,
    heat: Heat,
    now: SmoothMax,
    rank: int,
    z: float,
    a: int,
    u: float,
    b: int,
    v: float,
) -> float:
    """Pressure of a rank once it receives ``u`` more of expert ``a``'s tokens and ``v`` more of ``b``'s."""
    return smooth_term(risk_of_both(assignment, heat, rank, a, u, b, v, z), now.base, now.scale)


@kernel
def _exchange(assignment: Assignment, heat: Heat, home_ER: Bool, gainer: int, rank: int, slot: int) -> int:
    """Turn the replica in one slot into one of ``gainer``; returns by how many more slots it differs from home."""
    loser = assignment.phy2log_RS[rank, slot]
    assignment.replicas_E[gainer] += 1
    assignment.replicas_E[loser] -= 1
    replace(assignment, heat, rank, slot, gainer, np.float32(0.0))
    _share_evenly(assignment, heat, gainer)
    _share_evenly(assignment, heat, loser)
    more: int = np.int64(home_ER[loser, rank]) - np.int64(home_ER[gainer, rank])
    return more


@part
def _share_evenly(assignment: Assignment, heat: Heat, expert: int) -> None:
    """Split an expert's tokens evenly over the ranks that hold it."""
    share = share_of(assignment.replicas_E[expert])
    for r in range(assignment.load_R.shape[0]):
        if assignment.holds_ER[expert, r]:
            shift_load(assignment, heat, expert, r, share - assignment.share_ER[expert, r])
