"""Decision for one layer: keep it, change its tables, improve its placement, or place it from scratch.

Heat changes more from one window to the next than solvers differ on any one window, and moves that chase a burst gain
nothing. Every action is therefore fitted to the older half of the window and judged on the newer half (hold-out
validation). The hold-out shows, per layer, which action pays off and at which price per move. The recommended action
is then repeated on the whole window and compared with keeping the layer. FlashLB, by contrast, applies whatever fits
its window best.

References
----------
L. J. Tashman, *Out-of-Sample Tests of Forecasting Accuracy: An Analysis and Review*, 2000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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

One search produces a placement for every price and ends sooner if the lowest price is higher. Lower prices are rarely
chosen: with a ladder down to the true price, only one of 56 changes on drift used less than 4. For the effect of the
ladder see ``docs/research/solver.md``.
"""

_SEARCH_MAY_GAIN = 0.15
"""Fraction of a greedy placement's avoidable imbalance (its PAR - 1 on the newer half) that the full search from
scratch is expected to remove at most. The search rarely removes more, except above ``_MUCH_IS_HEAVY``."""
_HEAVY = 3.0
"""Load, in units of the mean slot load, above which a replica is heavy."""
_MUCH_IS_HEAVY = 0.25
"""Fraction of all tokens on heavy replicas above which a greedy placement is a poor estimate. It assumes even shares of
such experts, while tables and swaps find better placements. On drift and bursts (256 experts, 32 ranks x 9 slots) the
fraction is at most 0.18 in nine of ten layers, so that few layers are searched in vain."""


@dataclass(frozen=True)
class LayerResult:
    """The solver's decision for one layer, with the figures behind it.

    Parameters
    ----------
    found
        Chosen placement and tables, with their peak-to-average ratio (PAR) on the window and the number of moves.
    par_before
        PAR of the deployed placement on the window.
    half_life
        Half-life of the heat forecast, in episodes; infinite if all episodes count equally.
    taken
        Action chosen: ``model.KEEP``, ``TABLES``, ``LOCAL`` or ``FRESH``.
    crossed, crosses
        Fraction of the tokens that leave their source's node before and after the change; see
        ``topology.crossing_share``.
    optimism
        Increase of the candidate's PAR from the older half, to which it was fitted, to the newer half; at least 0.
        ``None`` without a hold-out.
    trimmed
        True if the heat is bursty and the forecast used each expert's trimmed mean.
    recommendation
        Recommendation that the next decision may follow without a hold-out.
    held
        The recommended candidate as it was fitted to the older half of the episodes; ``None`` without a hold-out.
    """

    found: Candidate
    par_before: float
    half_life: float
    taken: int
    crossed: float = 0.0
    crosses: float = 0.0
    optimism: float | None = None
    trimmed: bool = False
    recommendation: Recommendation | None = None
    held: Candidate | None = None


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
        PAR that a change must gain on the window after paying for its moves.
    unplaced
        True if the deployed placement was not made for any heat. The layer is then placed from scratch at any price.
    recommendation
        Recommendation of the previous decision, to be followed without a hold-out; ``None`` to run one.
    """
    window = episodes_of(heat_NE, deployed.phy2log_RS.shape[0])
    can_hold_out = heat_NE.shape[0] >= MIN_EPISODES
    current = as_deployed(window, deployed, params.tables)
    forecast = Forecast(float(half_life_H[0]), 0.0)
    optimism: float | None = None
    held: Candidate | None = None

    def make_answer(found: Candidate, action: int) -> LayerResult:
        crossed = crossing_share(current, window, deployed, params.tables)
        crosses = crossed
        if action != KEEP:
            found = found._replace(par=par_on(found, window, deployed, params.tables))
            found = localised(found, window, deployed, params)
            crosses = crossing_share(found, window, deployed, params.tables)
        return LayerResult(
            found,
            current.par,
            forecast.half_life,
            action,
            crossed,
            crosses,
            optimism,
            forecast.trimmed,
            held=held,
        )

    if can_hold_out:
        chosen = choose_forecast(window, half_life_H, params.options.trimmed_mean)
        # A first placement uses the whole window, except on bursty heat.
        if chosen.trimmed or not unplaced:
            forecast = chosen

    def forecast_layer() -> Layer:
        return Layer(forecast_heat(window, forecast, 2.0), deployed)

    if unplaced:
        params = without_vain_annealing(window, deployed, params)
        found = from_scratch(forecast_layer(), params, params.slot_price(deployed.phy2log_RS))
        return make_answer(found, FRESH)

    # Step time follows the hottest rank, so the price of a move scales with the current PAR.
    slot_price = params.slot_price(deployed.phy2log_RS, current.par)
    recommended = FRESH
    price = slot_price
    if recommendation is not None:
        recommended = LOCAL
        price = recommendation.price * slot_price
        optimism = recommendation.optimism
    elif params.options.holdout and can_hold_out:
        older, newer = halves_of(window)
        recommended, price, optimism, held = _holdout(
            older, newer, forecast, deployed, params, slot_price, min_gain
        )
    if recommended == KEEP:
        return make_answer(current, KEEP)

    found, action = _apply(recommended, price, forecast_layer(), current, params, slot_price, min_gain)
    answer = make_answer(found, action)
    # A recommendation is followed once, and the decision after that runs its own hold-out. On drift (``make
    # bench-decide``), this moves 382 slots per window at a PAR of 1.194 (20 seeds). Never following one moves about 331
    # at 1.204, and following it three times moves 410 at 1.185 (10 seeds each).
    may_follow = recommendation is None and action == LOCAL and not forecast.trimmed and slot_price != 0
    if may_follow and optimism is not None:
        answer = replace(answer, recommendation=Recommendation(price / slot_price, optimism))
    return answer


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

    A candidate is accepted if its PAR plus the price of its moves improves on the deployed PAR by ``min_gain``.

    Returns
    -------
    tuple of Candidate and int
        The accepted candidate and its action.
    """
    limit = par_on(current, layer.heat.episodes, layer.deployed, params.tables) - min_gain
    for action in dict.fromkeys((recommended, TABLES)):
        if action == FRESH:
            annealing_checked = without_vain_annealing(layer.heat.episodes, layer.deployed, params)
            found = from_scratch(layer, annealing_checked, slot_price)
        else:
            phy2log_RS = layer.deployed.phy2log_RS
            if action == LOCAL:
                price_K = move_prices(slot_price, params)
                # The tolerance is for rounding: ``price`` may have been stored as a multiple of the slot price.
                phy2log_RS = _first_change(layer, params, price_K[price_K <= price * (1 + 1e-9)])
            found = with_tables(phy2log_RS, layer, params)
        if found.par + slot_price * found.moves < limit:
            return found, action
    return current, KEEP


def _first_change(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Search locally at each price, highest first, and return the first placement that differs from the deployed one.

    Lower prices are needed because, on the whole window, no move may be worth the recommended one. If no price leads to
    a change, the deployed placement is returned.
    """
    deployed_RS = layer.deployed.phy2log_RS
    found_KRS = improved(layer, params, price_K, 2)
    changed = (phy2log_RS for phy2log_RS in found_KRS if not np.array_equal(phy2log_RS, deployed_RS))
    return next(changed, deployed_RS)


def _holdout(
    older: Episodes,
    newer: Episodes,
    forecast: Forecast,
    deployed: LayerLayout,
    params: SearchParams,
    slot_price: float,
    min_gain: float,
) -> tuple[int, float, float, Candidate]:
    """Recommend the action that, fitted to the older half of the window, does best on the newer half.

    Actions are tried from the cheapest to the most expensive: new tables, local search, placement from scratch. The
    cost of an action is its PAR on the newer half plus the price of its moves. An action replaces the best one so far
    (at first, keeping the layer) under two conditions:

    - its cost is lower by more than ``min_gain``;
    - its gain over keeping the layer exceeds the price of its moves by ``sureness`` standard errors.

    If gains do not last, a local search that charges more than the true price stops at the moves whose gains do.
    Several prices are therefore searched, and ``_shortlist_prices`` leaves at most two to be judged here. A placement
    from scratch takes the most CPU. It is left out only if ``_least_fresh_cost`` shows that it cannot replace the best
    action. Whether a cheaper action was accepted does not matter: on a plateau, where no single move helps, only a
    placement from scratch finds a way on.

    Returns
    -------
    action : int
        ``KEEP``, ``TABLES``, ``LOCAL`` or ``FRESH``.
    price : float
        Price per move for the local search.
    optimism : float
        As in ``LayerResult``.
    held : Candidate
        As in ``LayerResult``.

    Examples
    --------
    Let ``min_gain`` be 0.01 and let the deployed placement have a PAR of 1.30 on the newer half. New tables bring it to
    1.28, at no moves. A local search has a PAR of 1.15 on the older half and 1.20 on the newer half, and its moves cost
    0.03. Its cost of 1.23 is below 1.28 - 0.01. If its gain of 0.10 also exceeds 0.03 by enough standard errors, the
    local search is recommended with an optimism of 0.05. A placement from scratch is tried as well if its least cost is
    below 1.22.
    """
    fit = Layer(forecast_heat(older, forecast, 1.0), deployed)
    newer_EN, share_N = newer
    current = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    current_N = peaks_on(current, newer_EN, deployed, params.tables)
    keep_cost = mean_peak(current_N, share_N)
    best_cost = keep_cost
    recommendation = KEEP, slot_price, 0.0, current

    # A generator, because the results so far determine whether a placement from scratch is made at all.
    def candidates() -> Iterator[tuple[int, float, Candidate]]:
        yield TABLES, slot_price, with_tables(deployed.phy2log_RS, fit, params)
        if params.local_search_steps > 0:
            for price, phy2log_RS in _shortlist_prices(fit, newer, params, slot_price, min_gain):
                yield LOCAL, price, with_tables(phy2log_RS, fit, params)
        if _least_fresh_cost(fit, newer, params, slot_price) < best_cost - min_gain:
            fresh = from_scratch(fit, without_vain_annealing(older, deployed, params), slot_price)
            yield FRESH, slot_price, fresh

    for action, price, found in candidates():
        found_N = peaks_on(found, newer_EN, deployed, params.tables)
        par = mean_peak(found_N, share_N)
        spent = slot_price * found.moves
        improves = par + spent < best_cost - min_gain
        if improves and is_sure(current_N - found_N, share_N, spent, params.options.sureness):
            best_cost = par + spent
            recommendation = action, price, max(0.0, par - found.par), found
    return recommendation


def _shortlist_prices(
    fit: Layer, newer: Episodes, params: SearchParams, slot_price: float, min_gain: float
) -> list[tuple[float, Int32]]:
    """Return up to two prices for the local search that gain more than ``min_gain`` on the newer half.

    The first has the lowest cost. The second is the highest price with a sufficient gain, whose search moves the fewest
    slots; it is left out if both searches end in the same placement. The costs here assume that tokens are split evenly
    (or by step), because solving tables for every price would take as long as the search.

    Returns
    -------
    list of tuple of float and Int32
        Prices, each with the placement found, int32 ``[R, S]``.
    """

    def cost(phy2log_RS: Int32) -> float:
        par, moves = _without_tables(phy2log_RS, newer, fit.deployed, params)
        return par + slot_price * moves

    limit = cost(fit.deployed.phy2log_RS) - min_gain
    price_K = move_prices(slot_price, params)
    sufficient: list[tuple[float, float, Int32]] = []
    for price, phy2log_RS in zip(price_K.tolist(), improved(fit, params, price_K, 1), strict=True):
        found_cost = cost(phy2log_RS)
        if found_cost < limit:
            sufficient.append((found_cost, price, phy2log_RS))
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

    The estimate uses a greedy placement, which takes a tenth of the search's CPU time. On
    drift and bursts (256 experts, 32 ranks x 9 slots), 2 % of the layers are then searched from scratch.
    """
    placed_RS = greedy(fit, params)
    par, moves = _without_tables(placed_RS, newer, fit.deployed, params)
    mean_E = fit.heat.mean_E
    slot_load_E = mean_E * placed_RS.shape[1] / np.bincount(placed_RS.ravel(), minlength=mean_E.size)
    if mean_E[slot_load_E > _HEAVY].sum() > _MUCH_IS_HEAVY * mean_E.sum():
        par = 1.0
    return par - _SEARCH_MAY_GAIN * (par - 1.0) + slot_price * moves


def _without_tables(
    phy2log_RS: Int32, newer: Episodes, deployed: LayerLayout, params: SearchParams
) -> tuple[float, int]:
    """Return the PAR on the newer half if tokens are split evenly (or by step), and the number of moves."""
    _, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    tables = STEPWISE if params.tables == STEPWISE else EVEN
    return par_on(Candidate(phy2log_RS, deployed.log2phy_GE, 0.0, 0), newer, deployed, tables), moves


def move_prices(slot_price: float, params: SearchParams) -> Float64:
    """Return the prices per move that the local search tries, highest first."""
    return slot_price * (_PRICE_LADDER if params.options.price_ladder else np.ones(1))


def is_sure(gain_N: Float32, share_N: Float32, spent: float, sureness: float) -> bool:
    """Return True if the mean gain exceeds ``spent`` by ``sureness`` standard errors.

    Parameters
    ----------
    gain_N, share_N
        float32 ``[N]``, gain of each episode, and its weight. Episodes with zero weight are ignored.
    spent
        Price of the moves.
    sureness
        Number of standard errors; with 0 the answer is always True.
    """
    if sureness == 0:
        return True
    weighted_N = gain_N[share_N > 0].astype(np.float64)
    return bool(weighted_N.size) and weighted_N.mean() - sureness * standard_error(weighted_N) > spent
