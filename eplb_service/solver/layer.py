"""One layer's decision: what the hold-out recommends, done on the whole window and weighed against keeping.

A layer can be left as it is, get new tables, a placement improved from where it is, or one from scratch: replica counts
by tree search, local search from its best leaves, annealing where slots are few, tables, and a last touch through the
tables. Where the host splits every step's tokens by themselves, a search for the steps' own optima (``step_search``)
takes the place of all that is done about tables.

The gap between the window seen and the next one is larger than the gap between solvers, and moves that chase bursts
win nothing. So each course is fitted to the older half of the window and judged on the newer half (hold-out
validation): the window itself says, per layer, whether to keep, retune or move, and how much a move must win. FlashLB
takes what fits its window best.

References
----------
L. J. Tashman, *Out-of-Sample Tests of Forecasting Accuracy: An Analysis and Review*, 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from eplb_service.solver.annealing import anneal
from eplb_service.solver.construction import assignment_of, even_shares, place, tree_search
from eplb_service.solver.evaluation import SMALLEST_GAIN, max_rank_loads, mean_of_max, mean_peak
from eplb_service.solver.local_search import local_search
from eplb_service.solver.model import (
    CHOSEN,
    EVEN,
    FRESH,
    KEEP,
    LOCAL,
    SOLVED,
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
    heat_of,
    with_covariance,
)
from eplb_service.solver.step_search import searched_for_steps
from eplb_service.solver.stepwise import levels_of_episodes
from eplb_service.solver.tables import (
    fixed_rule,
    rehoused,
    slot_shares,
    slots_by_expert,
    solve_tables,
    swap_through_tables,
)
from eplb_service.solver.topology import crossing_share, keep_slots, localised, match_ranks
from eplb_service.solver.window import Forecast, choose_forecast, forecast_heat, halves_of, standard_error

FEWEST_EPISODES = 4
"""Episodes below which there is no older half worth fitting."""
_PRICE_LADDER = np.array([64.0, 32.0, 16.0, 8.0, 4.0])
"""Prices of a move that the local search tries, as multiples of the true one; most frugal first. One search serves them
all, and ends the sooner the dearer the cheapest is: down to the true price, one of 56 changes on drift asked for less
than 4 times as much; ``docs/research/solver.md`` has what it is worth."""

_CHANGES = 16
"""Changes that such a search makes at most for the hold-out, or one for so many slots: enough to know whether and at
which price moves pay; twice as many for the whole window. On drift (``make bench-decide``, ten seeds) that realises
what searches without a bound do, in a sixth less CPU; with half as many for the hold-out 0.6 % more."""
_FOLLOWED = 3
"""Decisions that follow the course of one hold-out. On drift (``make bench-decide``, ten seeds) 3 move 399 slots in a
window, at a ratio of 1.185; none 331, at 1.204; and 4 and 5 some 425, at 1.183 and 1.182."""
_MOVED_AFRESH = 0.7
"""Part of the slots that a placement from scratch moves at least: 0.77 to 0.86 of 256 experts on 32 ranks x 9 slots, in
closed loops on the four kinds of heat of ``make bench-solver``."""
_TRIAL, _MOST_TRIAL = 8, 1 << 15
"""Part of annealing's tries that say whether it lasts: one in so many, at most so many."""
_WORK = 1 << 29
"""Most tries of annealing x ranks, as a try costs more where ranks are more: nothing that takes longer is annealed.
Steps of the local search before it x ranks**2 are at most as many.

256 experts on 1,024 ranks x 2 slots come to more. 58 such layers are placed from scratch in 9 s of CPU where annealing
made it 24, at a ratio of 1.062 for 1.056 (``benchmarks.scale``'s heat).
"""
_LONE = 16
"""Part of all tries where ranks have one slot, and replica counts are all that is left to find: one in so many.

256 experts on 320, 512 and 1,024 such ranks (the four kinds of heat of ``make bench-solver``, three seeds) come out
0.2 % worse on the window than with all, and 0.1 % better on the next.
"""


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
    seen = Layer(heat_of(heat_NE, deployed.phy2log_RS.shape[0]), deployed)
    has_halves = heat_NE.shape[0] >= FEWEST_EPISODES
    now = as_deployed(seen, params.tables)
    forecast = Forecast(float(half_life_H[0]), 0.0)
    optimism: float | None = None

    def answer(found: Candidate, taken: int) -> Answer:
        crossed = crosses = crossing_share(now, seen, params.tables)
        if taken != KEEP:
            found = localised(found, seen, params)
            crosses = crossing_share(found, seen, params.tables)
        return Answer(found, now.par, forecast.half_life, taken, crossed, crosses, optimism, forecast.trimmed)

    if has_halves:
        chosen = choose_forecast(seen.heat, half_life_H, params.options.trimmed_mean)
        # What is placed for the first time is placed for all heat that is known, but for bursts.
        forecast = chosen if chosen.trimmed or not unplaced else forecast

    def expected() -> Layer:
        return Layer(forecast_heat(seen.heat, forecast, 2.0), deployed)

    if unplaced:
        params = without_vain_annealing(seen, params)
        found = from_scratch(expected(), params, params.slot_price(deployed.phy2log_RS))
        return answer(found._replace(par=par_on(found, seen, params.tables)), FRESH)
    # A step takes as long as the hottest rank, so a move's price is a part of the ratio now.
    slot_price = params.slot_price(deployed.phy2log_RS, now.par)
    kind, price = FRESH, slot_price
    if course is not None:
        kind, price, optimism = LOCAL, course.price * slot_price, course.optimism
    elif params.options.holdout and has_halves:
        kind, price, optimism = _holdout(
            *halves_of(seen.heat),
            forecast,
            deployed,
            params,
            slot_price,
            min_gain,
            lambda won: _prize(seen, now, params, slot_price, won),
        )
    if kind == KEEP:
        return answer(now, KEEP)
    found, taken = _best(kind, price, expected(), now, params, slot_price, min_gain)
    made = answer(found._replace(par=par_on(found, seen, params.tables)), taken)
    followed = 0 if course is None else course.followed + 1
    if taken != LOCAL or optimism is None or forecast.trimmed or slot_price == 0 or followed == _FOLLOWED:
        return made
    return replace(made, course=Recommended(price / slot_price, optimism, followed))


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
    cost = par_on(now, layer, params.tables) - min_gain
    for kind in dict.fromkeys((most, TABLES)):
        if kind == FRESH:
            found = from_scratch(layer, without_vain_annealing(layer, params), slot_price)
        else:
            found_RS = layer.deployed.phy2log_RS
            if kind == LOCAL:
                price_K = move_prices(slot_price, params)
                found_RS = _first_change(layer, params, price_K[price_K <= price * (1 + 1e-9)])
            found = _with_tables(found_RS, layer, params)
        if found.par + slot_price * found.moves < cost:
            return found, kind
    return now, KEEP


def _first_change(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Search locally at the price recommended; where so dear a move wins nothing here, at the next lower ones."""
    kept_RS = layer.deployed.phy2log_RS
    changed = (
        one_RS for one_RS in _improved(layer, params, price_K, 2) if not np.array_equal(one_RS, kept_RS)
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
    prize: Callable[[float], float],
) -> tuple[int, float, float]:
    """Choose what would have done best on the newer half, moves paid for; a dearer course must win ``min_gain`` more.

    What it wins over keeping must be above its moves' price by ``sureness`` standard errors besides. Where gains do not
    last, a local search that asks more than the true price for a move stops at those that do; so several prices are
    tried, and two of them judged (``_lasting``). A placement from scratch is tried last, where what is cheaper wins,
    but less than the ``prize`` (``_prize``). Returns the course, the price per moved slot that the local search should
    ask, and ``Answer.optimism``.
    """
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    fit, (newer_EN, share_N) = Layer(forecast_heat(with_covariance(*older), forecast, 1.0), deployed), newer
    now_N = _peaks_on(now, newer_EN, deployed, params.tables)
    unchanged = best = mean_peak(now_N, share_N)
    course = KEEP, slot_price, 0.0

    def courses() -> Iterator[tuple[int, float, Int32]]:
        yield TABLES, slot_price, deployed.phy2log_RS
        if params.local_search_steps > 0:
            yield from ((LOCAL, *found) for found in _lasting(fit, newer, params, slot_price, min_gain))
        won = unchanged - best
        if course[0] != KEEP and won < prize(won):
            fresh = from_scratch(fit, without_vain_annealing(fit, params), slot_price)
            yield FRESH, slot_price, fresh.phy2log_RS

    for kind, price, found_RS in courses():
        found = _with_tables(found_RS, fit, params)
        found_N = _peaks_on(found, newer_EN, deployed, params.tables)
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
        return mean_peak(_peaks_on(one, newer_EN, deployed, tables), share_N) + spent

    price_K = move_prices(slot_price, params)
    limit = cost(deployed.phy2log_RS) - min_gain
    found = [
        (found_cost, price, found_RS)
        for price, found_RS in zip(price_K.tolist(), _improved(fit, params, price_K, 1), strict=True)
        if (found_cost := cost(found_RS)) < limit
    ]
    if not found:
        return []
    best = min(found, key=lambda one: one[0])
    return [one[1:] for one in (best, found[0]) if one is best or not np.array_equal(one[2], best[2])]


def _prize(seen: Layer, now: Candidate, params: SearchParams, slot_price: float, won: float) -> float:
    """The ratio that hindsight wins, placing from scratch for the whole window, once its moves are paid.

    Where it cannot be above what is ``won``, most that it may be is enough to know.
    """
    most = now.par - 1.0 - slot_price * _MOVED_AFRESH * now.phy2log_RS.size
    if most <= won:
        return most
    params = without_vain_annealing(seen, params)
    params = params._replace(options=replace(params.options, table_swaps=False))
    fresh = from_scratch(seen, params, slot_price)
    return now.par - fresh.par - slot_price * fresh.moves


def move_prices(slot_price: float, params: SearchParams) -> Float64:
    """Prices of a move that the local search tries, dearest first."""
    return slot_price * (_PRICE_LADDER if params.options.price_ladder else np.ones(1))


def is_sure(gain_N: Float32, share_N: Float32, spent: float, sureness: float) -> bool:
    """Return whether the mean gain of episodes with weight is above ``spent`` by so many standard errors."""
    if sureness == 0:
        return True
    won_N = gain_N[share_N > 0].astype(np.float64)
    return bool(won_N.size) and won_N.mean() - sureness * standard_error(won_N) > spent


def from_scratch(layer: Layer, params: SearchParams, slot_price: float) -> Candidate:
    """Place a layer by tree search, local search from its best leaves and tables; the cheapest through its tables.

    ``slot_price`` is the peak-to-average ratio that one moved slot must win.
    """
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    best_KE, _ = tree_search(heat, ranks, slots, params.z, params.tree_leaves)
    nowhere_ER = np.zeros_like(deployed.home_ER)
    best = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, np.inf, 0)
    for replicas_E in best_KE:
        placed_RS = _searched(replicas_E, layer, params)
        if params.annealing_tries > 0:
            tries = params.annealing_tries // best_KE.shape[0]
            placed_RS = anneal(placed_RS, heat.scaled_EN, heat.share_N, tries, params.seed)
        best = _cheaper(best, _served(placed_RS, layer, params), slot_price)
    if params.tables == STEPWISE and params.step_tries > 0:
        found_KRS = searched_for_steps(best.phy2log_RS, heat, nowhere_ER, np.zeros(1), params)
        best = _cheaper(best, _served(found_KRS[0], layer, params), slot_price)
    return best


def _searched(replicas_E: Int32, layer: Layer, params: SearchParams) -> Int32:
    """Place these replicas greedily and search locally from there, whatever is deployed; int32 ``[R, S]``."""
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    assignment = place(replicas_E, heat, ranks, slots, params.z)
    nowhere_ER, free_1 = np.zeros_like(deployed.home_ER), np.zeros(1)
    steps = params.local_search_steps
    if params.annealing_tries > 0:
        steps = min(steps, _WORK // ranks**2)
    placed_1RS = local_search(assignment, heat, nowhere_ER, free_1, params.z, steps)
    placed_RS: Int32 = placed_1RS[0]
    return placed_RS


def without_vain_annealing(layer: Layer, params: SearchParams) -> SearchParams:
    """Parameters without annealing unless a short one, fitted to either half of the episodes, cools the other half.

    It lowers the hottest rank of every episode that was seen; the more ranks and the fewer tokens, the more often which
    rank that is was chance. Where each rank has one slot few tries do.
    """
    ranks, slots = layer.deployed.phy2log_RS.shape
    tries = params.annealing_tries // (_LONE if slots == 1 else 1)
    tries = tries if tries * ranks <= _WORK else 0
    params = params._replace(annealing_tries=tries)
    if not (tries and params.options.holdout and layer.heat.share_N.size >= FEWEST_EPISODES):
        return params
    forecast = choose_forecast(layer.heat, np.array([np.inf]), params.options.trimmed_mean)
    older, newer = halves_of(layer.heat)
    for seen, held_out in ((older, newer), (newer, older)):
        fit = forecast_heat(with_covariance(*seen), forecast, 1.0)
        replicas_KE, _ = tree_search(fit, ranks, slots, params.z, 0)
        placed_RS = _searched(replicas_KE[0], Layer(fit, layer.deployed), params)
        trial = min(tries // _TRIAL, _MOST_TRIAL)
        found_RS = anneal(placed_RS, fit.scaled_EN, fit.share_N, trial, params.seed)
        before, after = (
            mean_of_max(*held_out, way_RS, even_shares(way_RS, fit.mean_E.size))
            for way_RS in (placed_RS, found_RS)
        )
        if after > before - SMALLEST_GAIN:
            return params._replace(annealing_tries=0)
    return params


def as_deployed(layer: Layer, tables: int) -> Candidate:
    """Return the deployed placement and tables as a candidate."""
    now = Candidate(layer.deployed.phy2log_RS, layer.deployed.log2phy_GE, 0.0, 0)
    return now._replace(par=par_on(now, layer, tables))


def par_on(candidate: Candidate, layer: Layer, tables: int) -> float:
    """Peak-to-average ratio of a candidate on other heat, split by step, evenly or through its tables."""
    heat, deployed = layer
    return mean_peak(_peaks_on(candidate, heat.scaled_EN, deployed, tables), heat.share_N)


def _peaks_on(candidate: Candidate, scaled_EN: Float32, deployed: Deployed, tables: int) -> Float32:
    """Load of the hottest rank in each episode of other heat under a candidate, float32 ``[N]``."""
    if tables == STEPWISE:
        return levels_of_episodes(candidate.phy2log_RS, scaled_EN)
    return max_rank_loads(scaled_EN, candidate.phy2log_RS, shares_of(candidate, deployed, tables))


def shares_of(candidate: Candidate, deployed: Deployed, tables: int) -> Float32:
    """Part of its expert's tokens that each slot receives, float32 ``[R, S]``."""
    if tables == EVEN:
        return even_shares(candidate.phy2log_RS, deployed.share_GE.shape[1])
    return slot_shares(candidate.phy2log_RS, candidate.log2phy_GE, deployed.share_GE)


def _improved(layer: Layer, params: SearchParams, price_K: Float64, times: int) -> Int32:
    """Search locally from the deployed placement; int32 ``[K, R, S]``, a placement for each price of a move.

    At most ``times`` as many changes are made as for the hold-out. Shares are taken as even: tables that lean on the
    window seen fit the next one worse.
    """
    heat, deployed = layer
    if params.tables == STEPWISE:
        return searched_for_steps(deployed.phy2log_RS, heat, deployed.home_ER, price_K, params)
    share_RS = even_shares(deployed.phy2log_RS, deployed.share_GE.shape[1])
    assignment = assignment_of(deployed.phy2log_RS, share_RS, heat)
    most = times * max(_CHANGES, share_RS.size // _CHANGES)
    steps = min(most, params.local_search_steps)
    return local_search(assignment, heat, deployed.home_ER, price_K, params.z, steps)


def _served(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """Deal a placement to the ranks that hold most of it; add its tables and touch it up through them."""
    deployed = layer.deployed
    experts = deployed.share_GE.shape[1]
    dealt_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = _with_tables(dealt_RS, layer, params)
    if params.tables in CHOSEN and params.options.table_swaps:
        return _touched_up(candidate, layer, params)
    return candidate


def _with_tables(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """Put a placement's experts into their deployed slots, make its tables and judge both."""
    heat, deployed = layer
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if params.tables == SOLVED:
        log2phy_GE, par = solve_tables(kept_RS, heat, deployed.share_GE, params.z)
    else:
        sources, experts = deployed.share_GE.shape
        log2phy_GE = fixed_rule(*slots_by_expert(kept_RS, experts), sources, params.width)
        par = par_on(Candidate(kept_RS, log2phy_GE, 0.0, moves), layer, params.tables)
    return Candidate(kept_RS, log2phy_GE, par, moves)


def _touched_up(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """Swap experts at the shares that the candidate's tables give, unless that raises its realised ratio.

    That ratio is the objective here: it never rises. Moves are taken as free.
    """
    heat, deployed = layer
    log2phy_GE = candidate.log2phy_GE.copy()
    found_RS = swap_through_tables(
        candidate.phy2log_RS, log2phy_GE, heat, deployed.share_GE, params.z, params.local_search_steps
    )
    kept_RS, moves = keep_slots(found_RS, deployed.phy2log_RS)
    found = Candidate(kept_RS, rehoused(log2phy_GE, kept_RS), 0.0, moves)
    found = found._replace(par=par_on(found, layer, params.tables))
    return found if found.par < candidate.par else candidate


def _cheaper(one: Candidate, other: Candidate, price: float) -> Candidate:
    """Return the candidate with the lower ratio once its moves are paid for; the first where they cost the same."""
    return other if other.par + price * other.moves < one.par + price * one.moves else one
