"""One layer's decision where a cost curve is given: what lowers the slowest rank's time, and is worth its moves.

Every candidate is judged by its time: what serves now, the same with other tables, swaps from there, placements from
scratch for time and for balanced tokens. What is placed from scratch never takes longer, on the window, than what
serves or than balanced tokens; and it departs from balanced tokens only if, fitted to either half of the window, that
was faster on the other half. Tokens are balanced as without a curve: for what experts have between bursts, where that
forecasts better (``forecast``). From a placement that was made for heat, a change must pay on the newer half as well,
as in ``holdout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from eplb_service.solver.candidates import from_scratch
from eplb_service.solver.decision import Answer
from eplb_service.solver.forecast import Forecast, choose_forecast, forecast_heat, halves_of
from eplb_service.solver.holdout import FEWEST_EPISODES, PRICE_LADDER, is_sure
from eplb_service.solver.model import (
    FRESH,
    KEEP,
    LOCAL,
    SOLVED,
    TABLES,
    Candidate,
    Deployed,
    Float64,
    Layer,
    SearchParams,
    heat_of,
)
from eplb_service.solver.significance import standard_error
from eplb_service.solver.time.candidates import (
    TimedLayer,
    improved_for_time,
    placed_for_time,
    retabled,
    slowest_of_steps,
    time_ratio,
    timed,
)
from eplb_service.solver.time.evaluation import Curve, steps_of

_NO_FADING = np.array([np.inf])
_HARDLY = 0.001
"""Part of the time by which another way must be faster than balanced tokens on heat that neither was fitted to."""
_SURE = 2.0
"""Standard errors of the difference, step by step, that it must be faster by."""
_BALANCED, _RETABLED, _FOR_TIME = 0, 1, 2
"""Ways to place from scratch: balanced tokens; the same with tables for time; a placement for time."""


class WindowHeat(NamedTuple):
    """One layer's heat of a window, twice."""

    episodes_NE: Float64
    """float64 ``[N, E]``, steps summed, oldest first: what tokens are balanced on."""
    steps_NE: Float64
    """float64 ``[N', E]``, single steps: what time is lowered on."""

    def halves(self) -> tuple[WindowHeat, WindowHeat]:
        """The older and the newer half."""
        cut, step_cut = self.episodes_NE.shape[0] // 2, self.steps_NE.shape[0] // 2
        return (
            WindowHeat(self.episodes_NE[:cut], self.steps_NE[:step_cut]),
            WindowHeat(self.episodes_NE[cut:], self.steps_NE[step_cut:]),
        )


def solve_layer_for_time(
    heat: WindowHeat,
    deployed: Deployed,
    params: SearchParams,
    curve: Curve,
    min_gain: float,
    unplaced: bool,
    half_life_H: Float64 = _NO_FADING,
) -> Answer:
    """Decide one layer.

    Parameters
    ----------
    heat
        Its episodes and single steps.
    deployed, params, min_gain, unplaced, half_life_H
        As for ``decision.solve_layer``; ``move_price`` and ``min_gain`` are parts of the time of even ranks.
    curve
        What tokens cost.

    Returns
    -------
    Answer
        Its ratios are of times: the slowest rank's over that of perfectly even ranks without replicas.
    """
    forecast = _between_bursts(heat, deployed, params, half_life_H)
    seen = _timed(heat, deployed, curve, forecast)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    now = now._replace(par=_ratio(now, seen, params))
    tables = retabled(deployed.phy2log_RS, seen, params)
    parts = heat.halves() if heat.episodes_NE.shape[0] >= FEWEST_EPISODES else ()
    halves = [_timed(half, deployed, curve, forecast) for half in parts]
    way = _lasting_way(halves[0], halves[1], params) if halves else _FOR_TIME
    fresh = min((now, tables, placed(seen, params, way)), key=attrgetter("par"))

    def answer(found: Candidate, taken: int) -> Answer:
        return Answer(found, now.par, fresh, float("inf"), taken, trimmed=forecast.trimmed)

    if unplaced:
        return answer(fresh, KEEP if fresh is now else TABLES if fresh is tables else FRESH)
    if now.par - fresh.par <= min_gain:
        return answer(now, KEEP)
    params = params._replace(move_price=params.move_price * now.par)
    most = FRESH
    if params.holdout and halves:
        older, newer = halves[0], halves[1]
        fitted = courses(older, now, params, FRESH, way)
        judged = [
            (one._replace(par=_ratio(one, newer, params)), kind)
            for one, kind in fitted
            if _surely_pays(one, now, newer, params)
        ]
        _, most = _cheapest(judged, now, params, _ratio(now, newer, params) - min_gain)
    found, taken = _cheapest(courses(seen, now, params, most, way), now, params, now.par - min_gain)
    return answer(found, taken)


def _lasting_way(older: TimedLayer, newer: TimedLayer, params: SearchParams) -> int:
    """The way to place from scratch that, fitted to either half, is clearly faster on the other; else balanced.

    Not to the older one alone: where heat moves, placements that are alike on one stretch of steps differ on another
    by more than those steps scatter.
    """
    halves = (older, newer)
    if not all(half.steps.weight_N.any() for half in halves):
        return _FOR_TIME
    ways: Sequence[int] = (_RETABLED, _FOR_TIME) if params.tables == SOLVED else (_FOR_TIME,)
    saved_of = dict.fromkeys(ways, 0.0)
    for fit, held_out in (halves, halves[::-1]):
        here = _clearly_saved(fit, held_out, params, tuple(saved_of))
        saved_of = {way: saved_of[way] + us for way, us in here.items()}
    return max(saved_of, key=saved_of.__getitem__, default=_BALANCED)


def _clearly_saved(
    fit: TimedLayer, held_out: TimedLayer, params: SearchParams, ways: Sequence[int]
) -> dict[int, float]:
    """Microseconds that the ways, fitted to some steps, save on others; of those alone of which that is clear."""
    if not ways:
        return {}
    balanced = from_scratch(fit.layer, params)
    by_tokens_N = slowest_of_steps(balanced, held_out, params.tables)
    saved_of = {}
    for way in ways:
        if way == _RETABLED:
            found = retabled(balanced.phy2log_RS, fit, params)
        else:
            found = min(placed_for_time(fit, params), key=attrgetter("par"))
        saved_N = by_tokens_N - slowest_of_steps(found, held_out, params.tables)
        saved, error = float(saved_N.mean()), standard_error(saved_N.astype(np.float64))
        if saved > max(_HARDLY * held_out.even_us, _SURE * error):
            saved_of[way] = saved
    return saved_of


def placed(seen: TimedLayer, params: SearchParams, way: int) -> Candidate:
    """A placement from scratch by one of the ways, unless balanced tokens are faster on this very heat."""
    balanced = from_scratch(seen.layer, params)
    found = [balanced._replace(par=_ratio(balanced, seen, params))]
    if way == _RETABLED:
        found.append(retabled(balanced.phy2log_RS, seen, params))
    elif way == _FOR_TIME:
        found += placed_for_time(seen, params)
    return min(found, key=attrgetter("par"))


def courses(
    seen: TimedLayer, now: Candidate, params: SearchParams, most: int, way: int
) -> list[tuple[Candidate, int]]:
    """What can be done, and which of ``model.TABLES``, ``LOCAL`` and ``FRESH`` it is.

    Parameters
    ----------
    seen, now
        The window, and what serves.
    params
        How to search.
    most
        The last of those to look at.
    way
        How to place from scratch.
    """
    found: list[tuple[Candidate, int]] = []
    if most == KEEP:
        return found
    tables = retabled(now.phy2log_RS, seen, params)
    found.append((tables, TABLES))
    if most >= LOCAL and params.local_search_steps > 0:
        # The search does not see the floor.
        scale = seen.even_us / max(seen.even_us - seen.curve.floor, 1e-30)
        price_K = params.move_price * scale * (PRICE_LADDER if params.price_ladder else PRICE_LADDER[-1:])
        found += [(one, LOCAL) for one in improved_for_time(tables, seen, params, price_K)]
    if most == FRESH:
        found.append((placed(seen, params, way), FRESH))
    return found


def _surely_pays(one: Candidate, now: Candidate, newer: TimedLayer, params: SearchParams) -> bool:
    """Whether what it wins on steps that it was not fitted to is above its moves' price, by the errors asked for."""
    weight_N = newer.steps.weight_N[newer.steps.weight_N > 0]
    saved_N = slowest_of_steps(now, newer, params.tables) - slowest_of_steps(one, newer, params.tables)
    return is_sure(saved_N / newer.even_us, weight_N, params.move_price * one.moves, params.sureness)


def _cheapest(
    found: Sequence[tuple[Candidate, int]], now: Candidate, params: SearchParams, limit: float
) -> tuple[Candidate, int]:
    """The one with the lowest ratio and price of moves below ``limit``, cheaper courses first; otherwise ``now``."""
    best, taken = now, KEEP
    for one, kind in found:
        cost = one.par + params.move_price * one.moves
        if cost < limit:
            best, taken, limit = one, kind, cost
    return best, taken


def _between_bursts(
    heat: WindowHeat, deployed: Deployed, params: SearchParams, half_life_H: Float64
) -> Forecast:
    """What tokens are balanced for: all heat that is known, but for bursts."""
    if heat.episodes_NE.shape[0] >= FEWEST_EPISODES:
        halves = halves_of(heat.episodes_NE, deployed.phy2log_RS.shape[0])
        chosen = choose_forecast(halves, half_life_H, params.trimmed_mean)
        if chosen.trimmed:
            return chosen
    return Forecast(float("inf"), 0.0)


def _timed(heat: WindowHeat, deployed: Deployed, curve: Curve, forecast: Forecast) -> TimedLayer:
    seen = heat_of(heat.episodes_NE, deployed.phy2log_RS.shape[0])
    return timed(Layer(forecast_heat(seen, forecast, 0.0), deployed), steps_of(heat.steps_NE), curve)


def _ratio(candidate: Candidate, seen: TimedLayer, params: SearchParams) -> float:
    return time_ratio(candidate.phy2log_RS, candidate.log2phy_GE, seen, params.tables)
