"""Candidates for one layer, made and judged: a placement from scratch, one improved from where it is, and their tables.

A placement from scratch has its replica counts by tree search, a local search from its best leaves, annealing where
slots are few, tables, and a last touch through the tables. Where the host splits every step's tokens by themselves, a
search for the steps' own optima (``step_search``) takes the place of all that is done about tables.
"""

from __future__ import annotations

import numpy as np

from eplb_core.solver.annealing import anneal
from eplb_core.solver.construction import assignment_of, even_shares, place, tree_search
from eplb_core.solver.evaluation import MIN_GAIN, max_rank_loads, mean_of_max, mean_peak
from eplb_core.solver.local_search import local_search
from eplb_core.solver.model import (
    CHOSEN,
    EVEN,
    SOLVED,
    STEPWISE,
    Candidate,
    Episodes,
    Float32,
    Float64,
    Int32,
    Layer,
    LayerLayout,
    SearchParams,
)
from eplb_core.solver.step_search import searched_for_steps
from eplb_core.solver.stepwise import levels_of_episodes
from eplb_core.solver.tables import (
    fixed_rule,
    rehoused,
    slot_shares,
    slots_by_expert,
    solve_tables,
    swap_through_tables,
)
from eplb_core.solver.topology import keep_slots, match_ranks
from eplb_core.solver.window import choose_forecast, forecast_heat, halves_of

MIN_EPISODES = 4
"""Episodes below which there is no older half worth fitting."""
_CHANGES = 16
"""Changes that such a search makes at most for the hold-out, or one for so many slots: enough to know whether and at
which price moves pay; twice as many for the whole window. On drift (``make bench-decide``, ten seeds) that realises
what searches without a bound do, in a sixth less CPU; with half as many for the hold-out 0.6 % more."""
_TRIAL, _MAX_TRIAL = 8, 1 << 15
"""Part of annealing's tries that say whether it lasts: one in so many, at most so many."""
_WORK = 1 << 29
"""Most tries of annealing x ranks, as a try costs more where ranks are more: nothing that takes longer is annealed.
Steps of the local search before it x ranks**2 are at most as many.

256 experts on 1,024 ranks x 2 slots come to more: to anneal 58 such layers took 15 s of CPU, for a ratio of 1.056 in
place of 1.062 (``benchmarks.scale``'s heat).
"""
_LONE = 16
"""Part of all tries where ranks have one slot, and replica counts are all that is left to find: one in so many.

256 experts on 320, 512 and 1,024 such ranks (the four kinds of heat of ``make bench-solver``, three seeds) come out
0.2 % worse on the window than with all, and 0.1 % better on the next.
"""


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


def greedy(layer: Layer, params: SearchParams) -> Int32:
    """Return a greedy placement dealt to the ranks, int32 ``[R, S]``.

    ``from_scratch`` starts from it if a layer is too large for the tree search.
    """
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    replicas_KE, _ = tree_search(heat, ranks, slots, params.z, 0)
    placed_RS = place(replicas_KE[0], heat, ranks, slots, params.z).phy2log_RS
    return match_ranks(placed_RS, deployed.phy2log_RS, heat.mean_E.size, deployed.node_R)


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


def without_vain_annealing(heat: Episodes, deployed: LayerLayout, params: SearchParams) -> SearchParams:
    """Parameters without annealing unless a short one, fitted to either half of the episodes, cools the other half.

    It lowers the hottest rank of every episode that was seen; the more ranks and the fewer tokens, the more often which
    rank that is was chance. Where each rank has one slot few tries do.
    """
    ranks, slots = deployed.phy2log_RS.shape
    tries = params.annealing_tries // (_LONE if slots == 1 else 1)
    tries = tries if tries * ranks <= _WORK else 0
    params = params._replace(annealing_tries=tries)
    if not (tries and params.options.holdout and heat.share_N.size >= MIN_EPISODES):
        return params
    forecast = choose_forecast(heat, np.array([np.inf]), params.options.trimmed_mean)
    older, newer = halves_of(heat)
    for seen, held_out in ((older, newer), (newer, older)):
        fit = forecast_heat(seen, forecast, 1.0)
        replicas_KE, _ = tree_search(fit, ranks, slots, params.z, 0)
        placed_RS = _searched(replicas_KE[0], Layer(fit, deployed), params)
        trial = min(tries // _TRIAL, _MAX_TRIAL)
        found_RS = anneal(placed_RS, fit.scaled_EN, fit.share_N, trial, params.seed)
        before, after = (
            mean_of_max(*held_out, way_RS, even_shares(way_RS, fit.mean_E.size))
            for way_RS in (placed_RS, found_RS)
        )
        if after > before - MIN_GAIN:
            return params._replace(annealing_tries=0)
    return params


def as_deployed(heat: Episodes, deployed: LayerLayout, tables: int) -> Candidate:
    """Return the deployed placement and tables as a candidate."""
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    return now._replace(par=par_on(now, heat, deployed, tables))


def par_on(candidate: Candidate, heat: Episodes, deployed: LayerLayout, tables: int) -> float:
    """Peak-to-average ratio of a candidate on other heat, split by step, evenly or through its tables."""
    return mean_peak(peaks_on(candidate, heat.scaled_EN, deployed, tables), heat.share_N)


def peaks_on(candidate: Candidate, scaled_EN: Float32, deployed: LayerLayout, tables: int) -> Float32:
    """Load of the hottest rank in each episode of other heat under a candidate, float32 ``[N]``."""
    if tables == STEPWISE:
        return levels_of_episodes(candidate.phy2log_RS, scaled_EN)
    return max_rank_loads(scaled_EN, candidate.phy2log_RS, shares_of(candidate, deployed, tables))


def shares_of(candidate: Candidate, deployed: LayerLayout, tables: int) -> Float32:
    """Part of its expert's tokens that each slot receives, float32 ``[R, S]``."""
    if tables == EVEN:
        return even_shares(candidate.phy2log_RS, deployed.share_GE.shape[1])
    return slot_shares(candidate.phy2log_RS, candidate.log2phy_GE, deployed.share_GE)


def improved(layer: Layer, params: SearchParams, price_K: Float64, times: int) -> Int32:
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
    candidate = with_tables(dealt_RS, layer, params)
    if params.tables in CHOSEN and params.options.table_swaps:
        return _touched_up(candidate, layer, params)
    return candidate


def with_tables(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """Put a placement's experts into their deployed slots, make its tables and judge both."""
    heat, deployed = layer
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if params.tables == SOLVED:
        log2phy_GE, par = solve_tables(kept_RS, heat, deployed.share_GE, params.z)
    else:
        sources, experts = deployed.share_GE.shape
        log2phy_GE = fixed_rule(*slots_by_expert(kept_RS, experts), sources, params.width)
        par = par_on(Candidate(kept_RS, log2phy_GE, 0.0, moves), heat.episodes, deployed, params.tables)
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
    found = found._replace(par=par_on(found, heat.episodes, deployed, params.tables))
    return found if found.par < candidate.par else candidate


def _cheaper(one: Candidate, other: Candidate, price: float) -> Candidate:
    """Return the candidate with the lower ratio once its moves are paid for; the first where they cost the same."""
    return other if other.par + price * other.moves < one.par + price * one.moves else one
