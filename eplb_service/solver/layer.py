"""One layer's decision: what the hold-out recommends, done on the whole window and weighed against keeping.

A layer can be left as it is, get new tables, a placement improved from where it is, or one from scratch
(``candidates``).

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So each course is fitted to the older half of the window and judged on the newer half (hold-out
validation): the window itself says, per layer, whether to keep, retune or move, and how much a move must win. FlashLB
takes what fits its window best.

References
----------
L. J. Tashman, *Out-of-Sample Tests of Forecasting Accuracy: An Analysis and Review*, 2000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from eplb_service.solver.candidates import (
    FEWEST_EPISODES,
    as_deployed,
    from_scratch,
    improved,
    par_on,
    peaks_on,
    with_tables,
    without_vain_annealing,
)
from eplb_service.solver.evaluation import mean_peak
from eplb_service.solver.model import (
    EVEN,
    FRESH,
    KEEP,
    LOCAL,
    STEPWISE,
    TABLES,
    Candidate,
    Deployed,
    Episodes,
    Float32,
    Float64,
    Int32,
    Layer,
    Recommended,
    SearchParams,
    episodes_of,
    with_covariance,
)
from eplb_service.solver.topology import crossing_share, keep_slots, localised
from eplb_service.solver.window import Forecast, choose_forecast, forecast_heat, halves_of, standard_error

_PRICE_LADDER = np.array([64.0, 32.0, 16.0, 8.0, 4.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first. One search serves them
all, and ends the sooner the dearer the cheapest is: down to the true price, one of 56 changes on drift asked for less
than 4 times as much; ``docs/research/solver.md`` has what it is worth."""

_MOVED_AFRESH = 0.7
"""Part of the slots that a placement from scratch moves at least: 0.77 to 0.86 of 256 experts on 32 ranks x 9 slots, in
closed loops on the four kinds of heat of ``make bench-solver``."""


@dataclass(frozen=True)
class Answer:
    """Placement and tables that the solver chose for one layer, and what it chose them by.

    Parameters
    ----------
    found
        Placement and tables, with their peak-to-average ratio on the window and the slots that move.
    par_before
        The deployed placement's ratio.
    half_life
        Episodes after which heat was taken to count half; infinite where old heat is as good as new.
    taken
        ``model.KEEP``, ``TABLES``, ``LOCAL`` or ``FRESH``.
    crossed, crosses
        Part of the tokens that leave their source's node, before and after; see ``topology.crossing_share``.
    optimism
        Ratio by which what was fitted to the older half did worse on the newer one, at least 0; ``None`` where
        nothing was held out.
    trimmed
        Whether experts counted as their trimmed means say: they have bursts.
    course
        What the next decision may follow without a hold-out of its own.
    """

    found: Candidate
    par_before: float
    half_life: float
    taken: int
    crossed: float = 0.0
    crosses: float = 0.0
    optimism: float | None = None
    trimmed: bool = False
    course: Recommended | None = None


def solve_layer(
    heat_NE: Float64,
    deployed: Deployed,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
    course: Recommended | None = None,
) -> Answer:
    """Decide one layer.

    Parameters
    ----------
    heat_NE
        float64 ``[N, E]``, tokens per episode and expert, oldest first.
    deployed, params
        Deployed placement and tables, and how to search.
    half_life_H
        float64 ``[H]``, half-lives in episodes to choose from by hold-out; the first where the window is too short.
    min_gain
        Peak-to-average ratio that a change must win on the window, after paying for its moves.
    unplaced
        Place from scratch whatever it costs: what is deployed was not made for any heat.
    course
        What to follow without a hold-out; by default one is made.
    """
    seen = episodes_of(heat_NE, deployed.phy2log_RS.shape[0])
    has_halves = heat_NE.shape[0] >= FEWEST_EPISODES
    now = as_deployed(seen, deployed, params.tables)
    forecast = Forecast(float(half_life_H[0]), 0.0)
    optimism: float | None = None

    @cache
    def whole() -> Layer:
        return Layer(with_covariance(*seen), deployed)

    def answer(found: Candidate, taken: int) -> Answer:
        crossed = crosses = crossing_share(now, seen, deployed, params.tables)
        if taken != KEEP:
            found = found._replace(par=par_on(found, seen, deployed, params.tables))
            found = localised(found, whole(), params)
            crosses = crossing_share(found, seen, deployed, params.tables)
        return Answer(found, now.par, forecast.half_life, taken, crossed, crosses, optimism, forecast.trimmed)

    if has_halves:
        chosen = choose_forecast(seen, half_life_H, params.options.trimmed_mean)
        # What is placed for the first time is placed for all heat that is known, but for bursts.
        forecast = chosen if chosen.trimmed or not unplaced else forecast

    def expected() -> Layer:
        return Layer(forecast_heat(whole().heat, forecast, 2.0), deployed)

    if unplaced:
        params = without_vain_annealing(whole(), params)
        found = from_scratch(expected(), params, params.slot_price(deployed.phy2log_RS))
        return answer(found, FRESH)
    # A step takes as long as the hottest rank, so a move's price is a part of the ratio now.
    slot_price = params.slot_price(deployed.phy2log_RS, now.par)
    kind, price = FRESH, slot_price
    if course is not None:
        kind, price, optimism = LOCAL, course.price * slot_price, course.optimism
    elif params.options.holdout and has_halves:
        kind, price, optimism = _holdout(
            *halves_of(seen),
            forecast,
            deployed,
            params,
            slot_price,
            min_gain,
            now.par - 1.0 - slot_price * _MOVED_AFRESH * deployed.phy2log_RS.size,
        )
    if kind == KEEP:
        return answer(now, KEEP)
    found, taken = _best(kind, price, expected(), now, params, slot_price, min_gain)
    made = answer(found, taken)
    # On drift (``make bench-decide``, twenty seeds) to follow it once moves 382 slots in a window, at a ratio of 1.194;
    # never some 331, at 1.204; three times 410, at 1.185 (ten seeds each).
    if course is not None or taken != LOCAL or optimism is None or forecast.trimmed or slot_price == 0:
        return made
    return replace(made, course=Recommended(price / slot_price, optimism))


def _best(
    most: int,
    price: float,
    layer: Layer,
    now: Candidate,
    params: SearchParams,
    slot_price: float,
    min_gain: float,
) -> tuple[Candidate, int]:
    """Take the recommended course, else tables, where that still wins on the whole window; and say which one."""
    cost = par_on(now, *layer, params.tables) - min_gain
    for kind in dict.fromkeys((most, TABLES)):
        if kind == FRESH:
            found = from_scratch(layer, without_vain_annealing(layer, params), slot_price)
        else:
            found_RS = layer.deployed.phy2log_RS
            if kind == LOCAL:
                price_K = move_prices(slot_price, params)
                found_RS = _first_change(layer, params, price_K[price_K <= price * (1 + 1e-9)])
            found = with_tables(found_RS, layer, params)
        if found.par + slot_price * found.moves < cost:
            return found, kind
    return now, KEEP


def _first_change(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Search locally at the price recommended; where so dear a move wins nothing here, at the next lower ones."""
    kept_RS = layer.deployed.phy2log_RS
    changed = (
        one_RS for one_RS in improved(layer, params, price_K, 2) if not np.array_equal(one_RS, kept_RS)
    )
    return next(changed, kept_RS)


def _holdout(
    older: Episodes,
    newer: Episodes,
    forecast: Forecast,
    deployed: Deployed,
    params: SearchParams,
    slot_price: float,
    min_gain: float,
    most: float,
) -> tuple[int, float, float]:
    """Choose what would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    What it wins over keeping must be above its moves' price by ``sureness`` standard errors besides. Where gains do not
    last, a local search that asks more than the true price for a move stops at those that do; so several prices are
    tried, and two of them judged (``_lasting``). A placement from scratch is tried last, where what is cheaper wins,
    but less than the ``most`` that one could. Returns the course, the price per moved slot that the local search should
    ask, and ``Answer.optimism``.
    """
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    fit, (newer_EN, share_N) = Layer(forecast_heat(with_covariance(*older), forecast, 1.0), deployed), newer
    now_N = peaks_on(now, newer_EN, deployed, params.tables)
    unchanged = best = mean_peak(now_N, share_N)
    course = KEEP, slot_price, 0.0

    def courses() -> Iterator[tuple[int, float, Int32]]:
        yield TABLES, slot_price, deployed.phy2log_RS
        if params.local_search_steps > 0:
            yield from ((LOCAL, *found) for found in _lasting(fit, newer, params, slot_price, min_gain))
        won = unchanged - best
        if course[0] != KEEP and won < most:
            fresh = from_scratch(fit, without_vain_annealing(fit, params), slot_price)
            yield FRESH, slot_price, fresh.phy2log_RS

    for kind, price, found_RS in courses():
        found = with_tables(found_RS, fit, params)
        found_N = peaks_on(found, newer_EN, deployed, params.tables)
        par, spent = mean_peak(found_N, share_N), slot_price * found.moves
        if par + spent < best - min_gain and is_sure(
            now_N - found_N, share_N, spent, params.options.sureness
        ):
            best, course = par + spent, (kind, price, max(0.0, par - found.par))
    return course


def _lasting(
    fit: Layer, newer: Episodes, params: SearchParams, slot_price: float, min_gain: float
) -> list[tuple[float, Int32]]:
    """Prices to search locally at that win ``min_gain`` on newer heat, each with the placement found, int32 ``[R, S]``.

    First that which does best, then the dearest, which moves least. Tokens are split evenly here, or by step: to solve
    tables for each price takes as long as the search.
    """
    deployed, (newer_EN, share_N) = fit.deployed, newer
    tables = STEPWISE if params.tables == STEPWISE else EVEN

    def cost(phy2log_RS: Int32) -> float:
        spent = slot_price * keep_slots(phy2log_RS, deployed.phy2log_RS)[1]
        one = Candidate(phy2log_RS, deployed.log2phy_GE, 0.0, 0)
        return mean_peak(peaks_on(one, newer_EN, deployed, tables), share_N) + spent

    price_K = move_prices(slot_price, params)
    limit = cost(deployed.phy2log_RS) - min_gain
    found = [
        (found_cost, price, found_RS)
        for price, found_RS in zip(price_K.tolist(), improved(fit, params, price_K, 1), strict=True)
        if (found_cost := cost(found_RS)) < limit
    ]
    if not found:
        return []
    best = min(found, key=lambda one: one[0])
    return [one[1:] for one in (best, found[0]) if one is best or not np.array_equal(one[2], best[2])]


def move_prices(slot_price: float, params: SearchParams) -> Float64:
    """Prices of a move that the local search tries, dearest first."""
    return slot_price * (_PRICE_LADDER if params.options.price_ladder else np.ones(1))


def is_sure(gain_N: Float32, share_N: Float32, spent: float, sureness: float) -> bool:
    """Return whether the mean gain of episodes with weight is above ``spent`` by so many standard errors."""
    if sureness == 0:
        return True
    won_N = gain_N[share_N > 0].astype(np.float64)
    return bool(won_N.size) and won_N.mean() - sureness * standard_error(won_N) > spent
