"""One layer's decision: what the hold-out recommends, done on the whole window and weighed against keeping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.solver.candidates import from_scratch, improved, par_on, with_tables
from eplb_service.solver.forecast import Forecast, Halves, choose_forecast, forecast_heat, halves_of
from eplb_service.solver.holdout import (
    FEWEST_EPISODES,
    PRICE_LADDER,
    Recommendation,
    choose_trust,
    holdout,
)
from eplb_service.solver.model import (
    DEALT,
    FRESH,
    KEEP,
    LOCAL,
    TABLES,
    Candidate,
    Deployed,
    Float64,
    Int32,
    Layer,
    SearchParams,
    heat_of,
)
from eplb_service.solver.tables.locality import crossing_share, localised


@dataclass(frozen=True)
class Answer:
    """What the solver found for one layer.

    Parameters
    ----------
    found
        Placement and tables, with their peak-to-average ratio on the window and the slots that move.
    par_before
        The ratio of what serves now.
    fresh
        What was placed from scratch for this very window, whatever it moves: the best that hindsight knows.
    half_life
        Episodes after which heat was taken to count half; infinite where old heat is as good as new.
    taken
        ``model.KEEP`` and so on.
    crossed, crosses
        Part of the tokens that leave their source's node, before and after; see ``table_locality.crossing_share``.
    optimism
        See ``holdout.Recommendation``; ``None`` where nothing was held out.
    trimmed
        Whether experts counted as their trimmed means say: they have bursts.
    """

    found: Candidate
    par_before: float
    fresh: Candidate
    half_life: float
    taken: int
    crossed: float = 0.0
    crosses: float = 0.0
    optimism: float | None = None
    trimmed: bool = False

    @property
    def hindsight(self) -> float:
        """The ratio on this window of what was placed for it."""
        return self.fresh.par


def solve_layer(
    heat_NE: Float64,
    deployed: Deployed,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
) -> Answer:
    """Decide one layer.

    Parameters
    ----------
    heat_NE
        float64 ``[N, E]``, tokens per episode and expert, oldest first.
    deployed, params
        What serves now, and how to search.
    half_life_H
        float64 ``[H]``, half-lives in episodes to choose from by hold-out; the first where the window is too short.
    min_gain
        Peak-to-average ratio that a change must win on the window, after paying for its moves.
    unplaced
        Place from scratch whatever it costs: what is deployed was not made for any heat.
    """
    seen = Layer(heat_of(heat_NE, deployed.phy2log_RS.shape[0]), deployed)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    now = now._replace(par=par_on(now, seen, params.tables))
    halves = None
    if heat_NE.shape[0] >= FEWEST_EPISODES:
        halves = halves_of(heat_NE, deployed.phy2log_RS.shape[0])
    fresh, params = _placed_afresh(seen, halves, params)
    forecast = Forecast(float(half_life_H[0]), 0.0)
    optimism: float | None = None

    def answer(found: Candidate, taken: int) -> Answer:
        crossed = crossing_share(now, seen, params.tables)
        if taken != KEEP:
            found = localised(found, seen, params)
        crosses = crossing_share(found, seen, params.tables)
        return Answer(
            found, now.par, fresh, forecast.half_life, taken, crossed, crosses, optimism, forecast.trimmed
        )

    if not unplaced and now.par - fresh.par <= min_gain:
        # Not even hindsight would have won enough.
        return answer(now, KEEP)
    if halves is not None:
        chosen = choose_forecast(halves, half_life_H, params.trimmed_mean)
        # What is placed for the first time is placed for all heat that is known, but for bursts.
        forecast = chosen if chosen.trimmed or not unplaced else forecast
    expected = Layer(forecast_heat(seen.heat, forecast, 2.0), deployed)
    if unplaced:
        found = fresh if expected.heat is seen.heat else from_scratch(expected, params)
        return answer(found._replace(par=par_on(found, seen, params.tables)), FRESH)
    # A step takes as long as the hottest rank, so a move's price is a part of the ratio now.
    params = params._replace(move_price=params.move_price * now.par)
    course = Recommendation(FRESH, params.move_price, 0.0)
    if params.holdout and halves is not None:
        fresh_may_pay = now.par - fresh.par > params.move_price * fresh.moves / 2
        course = holdout(halves, forecast, deployed, params, min_gain, fresh_may_pay)
        optimism = course.optimism
    found, taken = _best(course, expected, now, params, min_gain)
    return answer(found._replace(par=par_on(found, seen, params.tables)), taken)


def _placed_afresh(
    seen: Layer, halves: Halves | None, params: SearchParams
) -> tuple[Candidate, SearchParams]:
    """The layer placed from scratch for its window, and how far dealt shares are trusted from now on."""
    fresh = from_scratch(seen, params)
    if params.tables == DEALT and params.holdout and halves is not None:
        params = params._replace(trust=choose_trust(halves, fresh.phy2log_RS, seen.deployed, params))
        if params.trust < 1:
            fresh = with_tables(fresh.phy2log_RS, seen, params)
    return fresh, params


def _improved(course: Recommendation, layer: Layer, params: SearchParams) -> Int32:
    """The local search at the price recommended; where so dear a move wins nothing here, at the next lower ones."""
    price_K = params.move_price * PRICE_LADDER
    found_KRS = improved(layer, params, price_K[price_K <= course.price * (1 + 1e-9)])
    found_RS: Int32
    for found_RS in found_KRS:
        if not np.array_equal(found_RS, layer.deployed.phy2log_RS):
            return found_RS
    return layer.deployed.phy2log_RS


def _best(
    course: Recommendation,
    layer: Layer,
    now: Candidate,
    params: SearchParams,
    min_gain: float,
) -> tuple[Candidate, int]:
    """The recommended course or a cheaper one, where it still wins on the whole window; and which one it is."""
    best, taken = now, KEEP
    cost = par_on(now, layer, params.tables) - min_gain
    for kind in range(TABLES, course.kind + 1):
        if kind == FRESH:
            found = from_scratch(layer, params)
        else:
            found_RS = layer.deployed.phy2log_RS
            if kind == LOCAL:
                found_RS = _improved(course, layer, params)
            found = with_tables(found_RS, layer, params)
        if found.par + params.move_price * found.moves < cost:
            best, taken, cost = found, kind, found.par + params.move_price * found.moves
    return best, taken
