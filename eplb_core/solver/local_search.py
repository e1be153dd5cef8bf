"""Local search that cools the hottest rank by swapping two experts or by exchanging a spare replica.

An exchange turns a replica of one expert into a replica of another. The objective is the smooth peak of ``evaluation``,
which depends only on the ranks' risks, plus a price for every slot that differs from the deployed placement.

Each step finds the hottest rank and applies the change that reduces the pressure most, on the scale that the current
risks define. Because this scale follows the risks, a single step may raise the smooth peak. Continuing from there pays
off: if such steps are undone, the resulting placements of 256 experts on 32 ranks x 9 slots are up to 1.1 % hotter
(phased and bursty heat, seeds 1 and 2). The search returns the best placement that it visited, which is never worse
than the start.

The method is standard; the implementation is original.

References
----------
E. Aarts, J. K. Lenstra (editors), *Local Search in Combinatorial Optimization*, 1997.
"""

from __future__ import annotations

from typing import NamedTuple

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
"""Maximum number of consecutive steps without a new cheapest placement in a search with a move price.

On drifting heat (``make bench-decide``, ten seeds), maximums of 3, 5 and 8 steps result in the same PAR. With 12 steps,
the search takes 1.7 times as long.
"""
EXCHANGES = 4
"""Interval, in steps, at which a search with a move price looks for an exchange even if a swap is available.

Finding an exchange takes 2.5 times as long as finding a swap on 32 ranks x 9 slots, and 6 times as long on 1,024 ranks
x 2 slots.
"""


@kernel
def local_search(
    assignment: Assignment,
    heat: Heat,
    home_ER: Bool,
    price_K: Float64,
    z: float,
    steps: int,
) -> Int32:
    """Search downhill and return, for each price, the placement with the lowest smooth peak + price * moved slots.

    The search looks for an exchange if no swap helps. If moves have a price, it also does so every ``EXCHANGES`` steps.
    A swap costs two moves and an exchange only one, so the search then prefers the exchange if it gains more per move.

    Parameters
    ----------
    assignment
        A complete placement. The search changes it in place and leaves it at the last placement that it visited.
    heat
        Normalised heat of the layer.
    home_ER
        bool ``[E, R]``, True if the rank holds the expert in the deployed placement. Moves to such a rank are free.
    price_K
        float64 ``[K]``, prices in PAR per slot whose expert is not at home. A single search covers all prices.
    z
        Weight of the standard deviation in a rank's risk.
    steps
        Maximum number of changes.

    Returns
    -------
    Int32
        int32 ``[K, R, S]``, a placement for each price.
    """
    ranks = assignment.phy2log_RS.shape[0]
    swaps = swaps_of(assignment, heat)
    frugal = False
    for price in price_K:
        frugal = frugal or price > 0
    away = slots_away(assignment.phy2log_RS, home_ER)
    smooth_max = smooth_max_of(assignment.load_R, assignment.variance_R, z)
    cheapest = nothing_visited(price_K, assignment.phy2log_RS)
    record_visit(cheapest, assignment.phy2log_RS, smooth_peak(smooth_max), away, 0.0)
    last_gain = 0
    for step in range(steps):
        if frugal and step - last_gain > FRUITLESS:
            break
        hot = hottest_of(smooth_max)
        hot_slot, rank, slot, swap_relief = best_swap(assignment, heat, smooth_max, hot, MIN_RELIEF, swaps)
        gainer_slot = -1
        if hot_slot < 0 or (frugal and step % EXCHANGES == 0):
            # A swap costs two moves and an exchange only one, so half the relief is enough.
            bound = max(0.5 * swap_relief, MIN_RELIEF)
            gainer_slot, loser_rank, loser_slot, _ = _best_exchange(assignment, heat, smooth_max, hot, bound)
        if gainer_slot >= 0:
            gainer = assignment.phy2log_RS[hot, gainer_slot]
            loser = assignment.phy2log_RS[loser_rank, loser_slot]
            away += _exchange(assignment, heat, home_ER, gainer, loser_rank, loser_slot)
            for r in range(ranks):
                if assignment.holds_ER[gainer, r] or assignment.holds_ER[loser, r]:
                    lay_out(assignment, heat, swaps, r)
        elif hot_slot >= 0:
            away += swap(assignment, heat, home_ER, swaps, hot, hot_slot, rank, slot)
        else:
            break
        smooth_max = smooth_max_of(assignment.load_R, assignment.variance_R, z)
        if record_visit(cheapest, assignment.phy2log_RS, smooth_peak(smooth_max), away, 0.0):
            last_gain = step
    return cheapest.placement_KRS


class Cheapest(NamedTuple):
    """Cheapest placement that a search has visited so far, for each price. All arrays are updated in place."""

    price_K: Float64
    """float64 ``[K]``, prices in PAR per slot whose expert is not at home."""
    cost_K: Float64
    """float64 ``[K]``, cost of each placement: objective value + price * number of slots away from home."""
    placement_KRS: Int32
    """int32 ``[K, R, S]``, the placements."""


@part
def nothing_visited(price_K: Float64, phy2log_RS: Int32) -> Cheapest:
    """Return an empty record for placements with the shape of ``phy2log_RS``."""
    prices = price_K.shape[0]
    ranks, slots = phy2log_RS.shape
    return Cheapest(price_K, np.full(prices, np.inf), np.empty((prices, ranks, slots), dtype=np.int32))


@kernel
def record_visit(cheapest: Cheapest, phy2log_RS: Int32, value: float, away: int, margin: float) -> bool:
    """Record a placement for each price at which it is the cheapest so far.

    Parameters
    ----------
    cheapest
        The record, updated in place.
    phy2log_RS
        int32 ``[R, S]``, the placement.
    value
        Value of the search's objective for the placement.
    away
        Number of slots whose expert is not at home.
    margin
        Minimum difference in cost from the placement recorded so far.

    Returns
    -------
    bool
        True if the placement was recorded for any price.
    """
    improves = False
    for k in range(cheapest.price_K.shape[0]):
        cost = value + cheapest.price_K[k] * away
        if cost < cheapest.cost_K[k] - margin:
            cheapest.cost_K[k] = cost
            set_placement(cheapest.placement_KRS[k], phy2log_RS)
            improves = True
    return improves


@part
def slots_away(phy2log_RS: Int32, home_ER: Bool) -> int:
    """Return the number of slots whose expert is not at home on their rank."""
    ranks, slots = phy2log_RS.shape
    away = 0
    for r in range(ranks):
        for s in range(slots):
            if not home_ER[phy2log_RS[r, s], r]:
                away += 1
    return away


@kernel
def _best_exchange(
    assignment: Assignment, heat: Heat, smooth_max: SmoothMax, hot: int, bound: float
) -> tuple[int, int, int, float]:
    """Find the exchange that gives an expert of ``hot`` one more replica and reduces the pressure most.

    The expert that gains the replica is the *gainer*, and the expert that gives up a spare one is the *loser*. A gainer
    is considered only if its smaller shares reduce the pressure of its current ranks by more than ``bound``. This test
    ignores the possibility that the loser's rank gets cooler as well.

    Returns
    -------
    tuple of int, int, int and float
        Slot of the gainer on ``hot``, rank and slot of the loser, and the reduction of the pressure. The first three
        are -1 if no exchange exceeds ``bound``.
    """
    zero = np.float32(0.0)
    ranks, slots = assignment.phy2log_RS.shape
    burden_P = np.empty(ranks * slots, dtype=np.float32)
    burden_E = np.empty(assignment.replicas_E.shape[0], dtype=np.float32)
    best = (-1, -1, -1)
    best_relief = bound
    for s in range(slots):
        gainer = assignment.phy2log_RS[hot, s]
        if assignment.replicas_E[gainer] == ranks:
            continue
        share = share_of(assignment.replicas_E[gainer] + 1)
        gainer_relief = zero
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                thinner = share - assignment.share_ER[gainer, r]
                pressure = _pressure_with(assignment, heat, smooth_max, r, gainer, thinner, gainer, zero)
                gainer_relief += smooth_max.pressure_R[r] - pressure
        if gainer_relief <= bound:
            continue
        _lay_out_burdens(assignment, heat, smooth_max, gainer, share, burden_P, burden_E)
        gained_load = share * heat.mean_E[gainer]
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                continue
            # A rank's risk is at least its mean load, so a load above this limit already causes too much pressure.
            limit = (
                smooth_max.base
                + max(smooth_max.pressure_R[r] + gainer_relief - best_relief, 0.0) ** 0.125 / smooth_max.scale
            )
            for t in range(slots):
                loser = assignment.phy2log_RS[r, t]
                lost_share = assignment.share_ER[loser, r]
                if (
                    assignment.replicas_E[loser] == 1
                    or assignment.load_R[r] + gained_load - lost_share * heat.mean_E[loser] > limit
                ):
                    continue
                rank_burden = (
                    _pressure_with(assignment, heat, smooth_max, r, gainer, share, loser, -lost_share)
                    - smooth_max.pressure_R[r]
                )
                relief = gainer_relief - rank_burden - (burden_E[loser] - burden_P[r * slots + t])
                if relief > best_relief:
                    best_relief = relief
                    best = (s, r, t)
    return best[0], best[1], best[2], best_relief


@kernel
def _lay_out_burdens(
    assignment: Assignment,
    heat: Heat,
    smooth_max: SmoothMax,
    gainer: int,
    gainer_share: float,
    burden_P: Float32,
    burden_E: Float32,
) -> None:
    """Compute how much the pressure on each slot's rank rises if the slot's expert loses a replica on a different rank.

    Parameters
    ----------
    assignment
        The placement before the exchange.
    heat
        Normalised heat of the layer.
    smooth_max
        Current pressures.
    gainer
        Expert that gains a replica.
    gainer_share
        Fraction of the gainer's tokens that each of its replicas receives after the exchange.
    burden_P
        float32 ``[P]``, output: the increase for each slot.
    burden_E
        float32 ``[E]``, output: the sum over the slots of each expert.
    """
    zero = np.float32(0.0)
    ranks, slots = assignment.phy2log_RS.shape
    for e in range(burden_E.shape[0]):
        burden_E[e] = zero
    for r in range(ranks):
        thinner = gainer_share - assignment.share_ER[gainer, r] if assignment.holds_ER[gainer, r] else zero
        for t in range(slots):
            loser = assignment.phy2log_RS[r, t]
            burden = zero
            if assignment.replicas_E[loser] > 1 and loser != gainer:
                thicker = share_of(assignment.replicas_E[loser] - 1) - assignment.share_ER[loser, r]
                burden += _pressure_with(assignment, heat, smooth_max, r, gainer, thinner, loser, thicker)
                burden -= _pressure_with(assignment, heat, smooth_max, r, gainer, thinner, loser, zero)
            burden_P[r * slots + t] = burden
            burden_E[loser] += burden


@kernel
def _pressure_with(
    assignment: Assignment,
    heat: Heat,
    smooth_max: SmoothMax,
    rank: int,
    expert_a: int,
    share_a: float,
    expert_b: int,
    share_b: float,
) -> float:
    """Return the pressure of a rank after the token shares of two of its experts change.

    Parameters
    ----------
    assignment
        The placement before the change.
    heat
        Normalised heat of the layer.
    smooth_max
        Scale of the pressures.
    rank
        The rank.
    expert_a
        First expert.
    share_a
        Change in the fraction of ``expert_a``'s tokens that the rank receives.
    expert_b
        Second expert.
    share_b
        Change in the fraction of ``expert_b``'s tokens that the rank receives.
    """
    two = np.float32(2.0)
    load = assignment.load_R[rank] + share_a * heat.mean_E[expert_a] + share_b * heat.mean_E[expert_b]
    variance = (
        assignment.variance_R[rank]
        + share_a * share_a * heat.gram_EE[expert_a, expert_a]
        + share_b * share_b * heat.gram_EE[expert_b, expert_b]
    )
    variance += two * (
        share_a * share_b * heat.gram_EE[expert_a, expert_b]
        + share_a * assignment.cross_RE[rank, expert_a]
        + share_b * assignment.cross_RE[rank, expert_b]
    )
    return smooth_term(risk(load, variance, smooth_max.z), smooth_max.base, smooth_max.scale)


@kernel
def _exchange(assignment: Assignment, heat: Heat, home_ER: Bool, gainer: int, rank: int, slot: int) -> int:
    """Replace the replica in a slot with one of ``gainer`` and split both experts' tokens evenly over their replicas.

    Returns the change in the number of slots whose expert is not at home.
    """
    loser = assignment.phy2log_RS[rank, slot]
    assignment.replicas_E[gainer] += 1
    assignment.replicas_E[loser] -= 1
    replace(assignment, heat, rank, slot, gainer, np.float32(0.0))
    _share_evenly(assignment, heat, gainer)
    _share_evenly(assignment, heat, loser)
    change: int = np.int64(home_ER[loser, rank]) - np.int64(home_ER[gainer, rank])
    return change


@part
def _share_evenly(assignment: Assignment, heat: Heat, expert: int) -> None:
    """Split an expert's tokens evenly over the ranks that hold it."""
    share = share_of(assignment.replicas_E[expert])
    for r in range(assignment.load_R.shape[0]):
        if assignment.holds_ER[expert, r]:
            shift_load(assignment, heat, expert, r, share - assignment.share_ER[expert, r])
