"""What would have paid: fit on the older half of the window, judge on the newer half (hold-out validation).

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So the window itself says, per layer, whether to keep, retune or move, and how much a move must win.
FlashLB takes what fits its window best.

References
----------
L. J. Tashman, *Out-of-Sample Tests of Forecasting Accuracy: An Analysis and Review*, 2000.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.candidates import from_scratch, improved, peaks_on, with_tables
from eplb_service.solver.forecast import Forecast, Halves, forecast_heat
from eplb_service.solver.model import (
    FRESH,
    KEEP,
    LOCAL,
    TABLES,
    Candidate,
    Deployed,
    Float32,
    Int32,
    Layer,
    SearchParams,
)
from eplb_service.solver.significance import standard_error

FEWEST_EPISODES = 4
"""Below it there is no older half worth fitting."""
PRICE_LADDER = np.array([32.0, 16.0, 8.0, 4.0, 2.0, 1.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first. Powers of two, so that
one search serves them all; ``docs/solver.md`` has what trying the true price alone loses."""

TRUSTS = (1.0, 0.5, 0.0)
"""How far dealt shares may go from even to fitted ones."""


def choose_trust(halves: Halves, phy2log_RS: Int32, deployed: Deployed, params: SearchParams) -> float:
    """How far dealt shares should go from even ones to fitted ones: what, fitted to the older half, suits the newer.

    ``phy2log_RS`` int32 ``[R, S]`` is the placement that they are tried on. What fitted shares win over dealing round
    the replicas must be above zero by ``params.sureness`` standard errors: they lean on the heat that they were
    fitted to. Of two that do as well the farther one is taken.
    """
    older, newer = Layer(halves.older, deployed), Layer(halves.newer, deployed)
    share_N = newer.heat.share_N

    def peaks(trust: float) -> Float32:
        dealt = with_tables(phy2log_RS, older, params._replace(trust=trust))
        return peaks_on(dealt, newer, params.tables)

    round_N = peaks(0.0)
    chosen, lowest = 0.0, mean_peak(round_N, share_N)
    for trust in reversed(TRUSTS[:-1]):
        found_N = peaks(trust)
        par = mean_peak(found_N, share_N)
        if par <= lowest and is_sure(round_N - found_N, share_N, 0.0, params.sureness):
            chosen, lowest = trust, par
    return chosen


class Recommendation(NamedTuple):
    """What the hold-out recommends."""

    kind: int
    """``model.KEEP`` and so on."""
    price: float
    """Peak-to-average ratio per moved slot that the local search should ask, at least the true price."""
    optimism: float
    """Peak-to-average ratio by which what was fitted to the older half did worse on the newer one, at least 0."""


def holdout(
    halves: Halves,
    forecast: Forecast,
    deployed: Deployed,
    params: SearchParams,
    min_gain: float,
    fresh_may_pay: bool,
) -> Recommendation:
    """What would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    What it wins over keeping must be above its moves' price by ``params.sureness`` standard errors besides.

    Where gains do not last, a local search that asks more than the true price for a move stops at those that do; so
    several prices are tried and all judged at the true one.

    Parameters
    ----------
    halves
        The window's older and newer half.
    forecast
        How the older half's heat is carried on to the newer one.
    deployed
        What serves now.
    params
        Those of the search.
    min_gain
        Part of its ratio that a dearer course must win more.
    fresh_may_pay
        Whether placing from scratch is worth trying at all.
    """
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    older = Layer(forecast_heat(halves.older, forecast, 1.0), deployed)
    newer = Layer(halves.newer, deployed)
    now_N, share_N = peaks_on(now, newer, params.tables), newer.heat.share_N
    best = mean_peak(now_N, share_N)
    course = Recommendation(KEEP, params.move_price, 0.0)
    placed = [(TABLES, params.move_price, deployed.phy2log_RS)]
    if params.local_search_steps > 0:
        price_K = params.move_price * (PRICE_LADDER if params.price_ladder else PRICE_LADDER[-1:])
        found_KRS = improved(older, params, price_K)
        placed += [
            (LOCAL, price, found_RS) for price, found_RS in zip(price_K.tolist(), found_KRS, strict=True)
        ]
    if fresh_may_pay:
        placed.append((FRESH, params.move_price, from_scratch(older, params).phy2log_RS))
    for kind, price, found_RS in placed:
        found = with_tables(found_RS, older, params)
        found_N = peaks_on(found, newer, params.tables)
        par, spent = mean_peak(found_N, share_N), params.move_price * found.moves
        if par + spent < best - min_gain and is_sure(now_N - found_N, share_N, spent, params.sureness):
            best, course = par + spent, Recommendation(kind, price, max(0.0, par - found.par))
    return course


def mean_peak(peak_N: Float32, share_N: Float32) -> float:
    """Peak-to-average ratio of episodes whose hottest ranks have so much, by the episodes' weights; 1.0 without any."""
    return float((peak_N * share_N).sum(dtype=np.float64)) if share_N.any() else 1.0


def is_sure(gain_N: Float32, share_N: Float32, spent: float, sureness: float) -> bool:
    """Whether what episodes won is above what was ``spent`` by so many standard errors; those without weight apart."""
    if sureness == 0:
        return True
    won_N = gain_N[share_N > 0].astype(np.float64)
    return bool(won_N.size) and won_N.mean() - sureness * standard_error(won_N) > spent
