"""Decision for one layer: keep it, change its tables, improve its placement, or place it from scratch.

Heat differs more between consecutive windows than the results of different solvers do on a single window, and moves
that chase a burst gain nothing. Every action is therefore fitted to the older half of the window and judged on the
newer half (hold-out validation). The hold-out shows which action pays off for each layer, and at what price per move.
The recommended action is then repeated on the whole window and compared with keeping the layer. FlashLB, by contrast,
applies the placement that fits its window best.

References
----------
L. J. Tashman, *Out-of-Sample Tests of Forecasting Accuracy: An Analysis and Review*, 2000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eplb_core.solver.candidates import (
    MIN_EPISODES,
    as_deployed,
    from_scratch,
    greedy,
    improved,
    par_on,
    peaks_on,
    with_tables,
    without_vain_annealing,
)
from eplb_core.solver.evaluation import mean_peak
from eplb_core.solver.model import (
    EVEN,
    FRESH,
    KEEP,
    LOCAL,
    STEPWISE,
    TABLES,
    Candidate,
    Episodes,
    Float32,
    Float64,
    Int32,
    Layer,
    LayerLayout,
    Recommendation,
    SearchParams,
    episodes_of,
)
from eplb_core.solver.topology import crossing_share, keep_slots, localised
from eplb_core.solver.window import Forecast, choose_forecast, forecast_heat, halves_of, standard_error

_PRICE_LADDER = np.array([64.0, 32.0, 16.0, 8.0, 4.0])
"""Prices per move that the local search tries, as multiples of the true price, highest first.

One search produces a placement for every price. The higher the lowest price, the sooner the search ends. Lower prices
are rarely chosen: with a ladder down to the true price, only one of 56 changes on drifting heat used a multiple below
4. The effect of the ladder is described in ``docs/research/solver.md``.
"""

_MAX_SEARCH_GAIN = 0.15
"""Maximum fraction of a greedy placement's avoidable imbalance (its PAR - 1 on the newer half) that the full search
from scratch is expected to remove. The search rarely removes more, unless heavy replicas receive more than
``_MAX_HEAVY_SHARE`` of the tokens."""
_HEAVY_LOAD = 3.0
"""Load, in units of the mean slot load, above which a replica is heavy."""
_MAX_HEAVY_SHARE = 0.25
"""Fraction of all tokens on heavy replicas above which a greedy placement is a poor estimate.

The estimate assumes that the tokens of all experts are split evenly, but for heavy replicas, tables and swaps find
better placements. On drifting and bursty heat (256 experts, 32 ranks x 9 slots), the fraction is at most 0.18 in nine
out of ten layers, so few layers are searched unnecessarily.
"""


@dataclass(frozen=True)
class LayerResult:
    """The solver's decision for one layer, with the figures behind it.

    Parameters
    ----------
    candidate
        Chosen placement and tables, with their peak-to-average ratio (PAR) on the window and the number of moves.
    par_before
        PAR of the deployed placement on the window.
    half_life
        Half-life of the heat forecast, in episodes; infinite if all episodes count equally.
    taken
        Action chosen: ``model.KEEP``, ``TABLES``, ``LOCAL`` or ``FRESH``.
    crossed
        Fraction of the tokens that leave their source's node under the deployed layout; see
        ``topology.crossing_share``.
    crosses
        Fraction of the tokens that leave their source's node under ``candidate``.
    optimism
        Increase in the candidate's PAR from the older half, to which it was fitted, to the newer half; never negative.
        ``None`` if there was no hold-out.
    trimmed
        True if the heat is bursty and the forecast used each expert's trimmed mean.
    recommendation
        Recommendation that the next decision may follow without a hold-out.
    held
        The recommended candidate, fitted to the older half of the episodes; ``None`` if there was no hold-out.
    """

    candidate: Candidate
    par_before: float
    half_life: float
    taken: int
    crossed: float = 0.0
    crosses: float = 0.0
    optimism: float | None = None
    trimmed: bool = False
    recommendation: Recommendation | None = None
    held: Candidate | None = None


class _HoldoutResult(NamedTuple):
    """The action to repeat on the whole window, with the figures from the hold-out."""

    action: int
    """``KEEP``, ``TABLES``, ``LOCAL`` or ``FRESH``."""
    price: float
    """Price per move for the local search."""
    optimism: float | None = None
    """Optimism, as in ``LayerResult``."""
    candidate: Candidate | None = None
    """Candidate that was fitted to the older half; ``None`` if there was no hold-out."""


def solve_layer(
    heat_NE: Float64,
    deployed: LayerLayout,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
    recommendation: Recommendation | None = None,
) -> LayerResult:
    """Decide what to do with one layer.

    Parameters
    ----------
    heat_NE
        float64 ``[N, E]``, tokens per episode and expert, oldest episode first.
    deployed
        Deployed placement and tables, and the sources of the tokens.
    params
        Search parameters.
    half_life_H
        float64 ``[H]``, candidate half-lives of the forecast in episodes. The hold-out chooses among them; the first is
        the default and is used if the window is too short for a hold-out.
    min_gain
        Minimum PAR improvement on the window, net of the cost of the moves.
    unplaced
        True if the deployed placement was not based on heat. The layer is then placed from scratch regardless of the
        cost of the moves.
    recommendation
        Recommendation of the previous decision, to be followed without a hold-out; ``None`` to run one.
    """
    window = episodes_of(heat_NE, deployed.phy2log_RS.shape[0])
    current = as_deployed(window, deployed, params.tables)
    forecast = _forecast_for(window, half_life_H, params, unplaced)
    if unplaced:
        params = without_vain_annealing(window, deployed, params)
        layer = Layer(forecast_heat(window, forecast, 2.0), deployed)
        fresh = from_scratch(layer, params, params.slot_price(deployed.phy2log_RS))
        return _result(fresh, FRESH, current, window, deployed, params, forecast)

    # Step time follows the hottest rank, so the price of a move scales with the current PAR.
    slot_price = params.slot_price(deployed.phy2log_RS, current.par)
    choice = _HoldoutResult(FRESH, slot_price)
    if recommendation is not None:
        choice = _HoldoutResult(LOCAL, recommendation.price * slot_price, recommendation.optimism)
    elif params.options.holdout and heat_NE.shape[0] >= MIN_EPISODES:
        older, newer = halves_of(window)
        choice = _holdout(older, newer, forecast, deployed, params, slot_price, min_gain)
    candidate = current
    action = KEEP
    if choice.action != KEEP:
        layer = Layer(forecast_heat(window, forecast, 2.0), deployed)
        candidate, action = _apply(choice.action, choice.price, layer, current, params, slot_price, min_gain)
    result = _result(candidate, action, current, window, deployed, params, forecast)
    result = replace(result, optimism=choice.optimism, held=choice.candidate)
    # A recommendation is followed once, and the decision after that runs its own hold-out. On drift (``make
    # bench-decide``), this moves 382 slots per window and reaches a PAR of 1.194 (20 seeds). Without recommendations,
    # about 331 slots are moved and the PAR is 1.204. If each one is followed three times, 410 slots are moved and the
    # PAR is 1.185 (10 seeds each).
    may_follow = recommendation is None and action == LOCAL and not forecast.trimmed and slot_price != 0
    if may_follow and choice.optimism is not None:
        next_recommendation = Recommendation(choice.price / slot_price, choice.optimism)
        result = replace(result, recommendation=next_recommendation)
    return result


def _forecast_for(window: Episodes, half_life_H: Float64, params: SearchParams, unplaced: bool) -> Forecast:
    """Choose the heat forecast. If the window is too short to choose one, use the first of ``half_life_H``."""
    if window.share_N.shape[0] >= MIN_EPISODES:
        forecast = choose_forecast(window, half_life_H, params.options.trimmed_mean)
        # The first placement uses the whole window unless heat is bursty.
        if forecast.trimmed or not unplaced:
            return forecast
    return Forecast(float(half_life_H[0]), 0.0)


def _result(
    candidate: Candidate,
    action: int,
    current: Candidate,
    window: Episodes,
    deployed: LayerLayout,
    params: SearchParams,
    forecast: Forecast,
) -> LayerResult:
    """Return the result for a candidate: judge it on the window and keep its tokens on their nodes if possible."""
    crossing_before = crossing_share(current, window, deployed, params.tables)
    crossing_after = crossing_before
    if action != KEEP:
        candidate = candidate._replace(par=par_on(candidate, window, deployed, params.tables))
        candidate = localised(candidate, window, deployed, params)
        crossing_after = crossing_share(candidate, window, deployed, params.tables)
    return LayerResult(
        candidate,
        current.par,
        forecast.half_life,
        action,
        crossing_before,
        crossing_after,
        trimmed=forecast.trimmed,
    )


def _apply(
    recommended: int,
    price: float,
    layer: Layer,
    current: Candidate,
    params: SearchParams,
    slot_price: float,
    min_gain: float,
) -> tuple[Candidate, int]:
    """Repeat the recommended action on the whole window; fall back to new tables, and then to keeping the layer.

    A candidate is accepted if its PAR plus the price of its moves is more than ``min_gain`` below the deployed PAR.

    Returns
    -------
    tuple of Candidate and int
        The accepted candidate and its action.
    """
    limit = par_on(current, layer.heat.episodes, layer.deployed, params.tables) - min_gain
    for action in dict.fromkeys((recommended, TABLES)) if params.tables != STEPWISE else (recommended,):
        if action == FRESH:
            annealing_checked = without_vain_annealing(layer.heat.episodes, layer.deployed, params)
            candidate = from_scratch(layer, annealing_checked, slot_price)
        else:
            phy2log_RS = layer.deployed.phy2log_RS
            if action == LOCAL:
                price_K = _move_prices(slot_price, params)
                # The tolerance absorbs rounding errors, because ``price`` may have been stored as a multiple of the
                # slot price.
                phy2log_RS = _first_change(layer, params, price_K[price_K <= price * (1 + 1e-9)])
            candidate = with_tables(phy2log_RS, layer, params)
        if candidate.par + slot_price * candidate.moves < limit:
            return candidate, action
    return current, KEEP


def _first_change(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Search locally at each price, highest first, and return the first placement that differs from the deployed one.

    Lower prices are needed because, on the whole window, it is possible that no move is worth the recommended price. If
    no price leads to a change, the deployed placement is returned.
    """
    deployed_RS = layer.deployed.phy2log_RS
    improved_KRS = improved(layer, params, price_K, 2)
    changed = (phy2log_RS for phy2log_RS in improved_KRS if not np.array_equal(phy2log_RS, deployed_RS))
    return next(changed, deployed_RS)


def _holdout(
    older: Episodes,
    newer: Episodes,
    forecast: Forecast,
    deployed: LayerLayout,
    params: SearchParams,
    slot_price: float,
    min_gain: float,
) -> _HoldoutResult:
    """Recommend the action that, fitted to the older half of the window, does best on the newer half.

    Actions are tried from the cheapest to the most expensive: new tables, local search, placement from scratch. The
    cost of an action is its PAR on the newer half plus the price of its moves. An action replaces the best one so far
    (at first, keeping the layer) under two conditions:

    - its cost is lower by more than ``min_gain``;
    - its gain over keeping the layer exceeds the price of its moves by ``sureness`` standard errors.

    If most gains do not last, a local search with a price above the true one makes only the moves whose gains do.
    Several prices are therefore searched, and ``_shortlist_prices`` selects at most two of them to be judged here. A
    placement from scratch takes the most CPU. It is skipped only if ``_least_fresh_cost`` shows that it cannot replace
    the best action. It is tried even if no cheaper action was accepted: on a plateau, where no single move helps, only
    a placement from scratch can improve the layer.

    Examples
    --------
    Let ``min_gain`` be 0.01 and let the deployed placement have a PAR of 1.30 on the newer half. New tables lower it to
    1.28 without any moves. A local search has a PAR of 1.15 on the older half and 1.20 on the newer half, and its moves
    cost 0.03. Its cost of 1.23 is below 1.28 - 0.01. If its gain of 0.10 also exceeds 0.03 by enough standard errors,
    the local search is recommended with an optimism of 0.05. A placement from scratch is also tried if its estimated
    lowest cost is below 1.22.
    """
    fit = Layer(forecast_heat(older, forecast, 1.0), deployed)
    newer_EN, share_N = newer
    current = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    current_N = peaks_on(current, newer_EN, deployed, params.tables)
    best_cost = mean_peak(current_N, share_N)
    best = _HoldoutResult(KEEP, slot_price, 0.0, current)

    # This is a generator, because the results so far determine whether a placement from scratch is made at all.
    def candidates() -> Iterator[tuple[int, float, Candidate]]:
        if params.tables != STEPWISE:
            yield TABLES, slot_price, with_tables(deployed.phy2log_RS, fit, params)
        if params.local_search_steps > 0:
            for price, phy2log_RS in _shortlist_prices(fit, newer, params, slot_price, min_gain):
                yield LOCAL, price, with_tables(phy2log_RS, fit, params)
        if _least_fresh_cost(fit, newer, params, slot_price) < best_cost - min_gain:
            fresh = from_scratch(fit, without_vain_annealing(older, deployed, params), slot_price)
            yield FRESH, slot_price, fresh

    for action, price, candidate in candidates():
        candidate_N = peaks_on(candidate, newer_EN, deployed, params.tables)
        par = mean_peak(candidate_N, share_N)
        spent = slot_price * candidate.moves
        improves = par + spent < best_cost - min_gain
        if improves and is_sure(current_N - candidate_N, share_N, spent, params.options.sureness):
            best_cost = par + spent
            best = _HoldoutResult(action, price, max(0.0, par - candidate.par), candidate)
    return best


def _shortlist_prices(
    fit: Layer, newer: Episodes, params: SearchParams, slot_price: float, min_gain: float
) -> list[tuple[float, Int32]]:
    """Return up to two local-search prices whose placements gain more than ``min_gain`` on the newer half.

    The first price has the lowest cost. The second is the highest price with a sufficient gain, which moves the fewest
    slots. It is omitted if both prices lead to the same placement. Costs are computed for an even (or stepwise) split,
    because solving tables for every price would take as long as the search.

    Returns
    -------
    list of tuple of float and Int32
        Prices, each with the placement found, int32 ``[R, S]``.
    """

    def cost(phy2log_RS: Int32) -> float:
        par, moves = _without_tables(phy2log_RS, newer, fit.deployed, params)
        return par + slot_price * moves

    price_K = _move_prices(slot_price, params)
    sufficient: list[tuple[float, float, Int32]] = []
    judged_RS = fit.deployed.phy2log_RS
    candidate_cost = cost(judged_RS)
    limit = candidate_cost - min_gain
    for price, phy2log_RS in zip(price_K.tolist(), improved(fit, params, price_K, 1), strict=True):
        # Neighbouring prices often lead to the same placement.
        if not np.array_equal(phy2log_RS, judged_RS):
            judged_RS = phy2log_RS
            candidate_cost = cost(judged_RS)
        if candidate_cost < limit:
            sufficient.append((candidate_cost, price, phy2log_RS))
    if not sufficient:
        return []
    _, best_price, best_RS = min(sufficient, key=lambda entry: entry[0])
    _, highest_price, highest_RS = sufficient[0]
    shortlist = [(best_price, best_RS)]
    if not np.array_equal(highest_RS, best_RS):
        shortlist.append((highest_price, highest_RS))
    return shortlist


def _least_fresh_cost(fit: Layer, newer: Episodes, params: SearchParams, slot_price: float) -> float:
    """Return the lowest cost on the newer half that a placement from scratch is expected to reach.

    The estimate uses a greedy placement, which takes a tenth of the search's CPU time. If too many tokens are on heavy
    replicas, perfect balance is assumed instead. On drifting and bursty heat (256 experts, 32 ranks x 9 slots), only
    2 % of the layers are then searched from scratch.
    """
    placed_RS = greedy(fit, params)
    par, moves = _without_tables(placed_RS, newer, fit.deployed, params)
    mean_E = fit.heat.mean_E
    slot_load_E = mean_E * placed_RS.shape[1] / np.bincount(placed_RS.ravel(), minlength=mean_E.size)
    if mean_E[slot_load_E > _HEAVY_LOAD].sum() > _MAX_HEAVY_SHARE * mean_E.sum():
        par = 1.0
    return par - _MAX_SEARCH_GAIN * (par - 1.0) + slot_price * moves


def _without_tables(
    phy2log_RS: Int32, newer: Episodes, deployed: LayerLayout, params: SearchParams
) -> tuple[float, int]:
    """Return the PAR on the held-out half under an even (or stepwise) split, and the number of moves."""
    _, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    tables = STEPWISE if params.tables == STEPWISE else EVEN
    return par_on(Candidate(phy2log_RS, deployed.log2phy_GE, 0.0, 0), newer, deployed, tables), moves


def _move_prices(slot_price: float, params: SearchParams) -> Float64:
    """Return the prices per move that the local search tries, highest first."""
    return slot_price * (_PRICE_LADDER if params.options.price_ladder else np.ones(1))


def is_sure(gain_N: Float32, share_N: Float32, spent: float, sureness: float) -> bool:
    """Return True if the mean gain exceeds the cost of the moves by the required number of standard errors.

    Parameters
    ----------
    gain_N
        float32 ``[N]``, gain in each episode.
    share_N
        float32 ``[N]``, weight of each episode. Episodes with zero weight are ignored.
    spent
        Cost of the moves.
    sureness
        Required number of standard errors; with 0 the result is always True.

    Examples
    --------
    The mean gain is 0.2 with a standard error of about 0.058. It exceeds a cost of 0.05 by two standard errors, but not
    a cost of 0.1:

    >>> gain_N = np.array([0.3, 0.1, 0.3, 0.1], dtype=np.float32)
    >>> share_N = np.full(4, 0.25, dtype=np.float32)
    >>> is_sure(gain_N, share_N, spent=0.05, sureness=2.0)
    True
    >>> is_sure(gain_N, share_N, spent=0.1, sureness=2.0)
    False
    """
    if sureness == 0:
        return True
    weighted_N = gain_N[share_N > 0].astype(np.float64)
    return bool(weighted_N.size and weighted_N.mean() - sureness * standard_error(weighted_N) > spent)
