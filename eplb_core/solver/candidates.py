"""Candidates for one layer: place from scratch or improve the deployed placement, add tables, and judge the results.

A placement from scratch is built in several stages: a tree search for the replica counts, a local search from the best
leaves, annealing if ranks have few slots, tables, and a final search that takes the tables into account. If the host
splits every step's tokens itself, the stages that involve tables are replaced by a placement search that assumes a
nearly optimal split of each step (``step_search``).
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
from eplb_core.solver.step_search import search_for_steps
from eplb_core.solver.stepwise import optimal_peaks
from eplb_core.solver.tables import (
    fixed_rule,
    follow_slots,
    slot_shares,
    slots_by_expert,
    solve_tables,
    swap_through_tables,
)
from eplb_core.solver.topology import keep_slots, match_ranks
from eplb_core.solver.window import choose_forecast, forecast_heat, halves_of

MIN_EPISODES = 4
"""Minimum number of episodes for a hold-out. With fewer, the older half is too short to fit a candidate to."""
_CHANGES = 16
"""Maximum number of changes that a local search makes to the deployed placement in a hold-out. In large layers, the
maximum is one change per ``_CHANGES`` slots instead. On the whole window, it is twice as high.

These few changes suffice to determine whether moves pay off, and at what price. On drifting heat (``make
bench-decide``, ten seeds), the realised PAR is the same as without a maximum, and the CPU time is one sixth lower. With
half as many changes in the hold-out, the PAR is 0.6 % higher.
"""
_TRIAL = 8
"""Divisor of the number of annealing tries in a trial, which checks whether the gains from annealing last."""
_MAX_TRIAL = 1 << 15
"""Maximum number of annealing tries in a trial."""
_WORK = 1 << 29
"""Maximum product of annealing tries and ranks; layers above it are not annealed. Each try takes longer with more
ranks.

In the local search before annealing, the same maximum applies to steps x ranks**2. A layer with 256 experts on 1,024
ranks x 2 slots exceeds the maximum. Annealing 58 such layers took 15 s of CPU time and reduced the PAR from 1.062 to
1.056 (with the heat of ``benchmarks.scale``).
"""
_LONE = 16
"""Divisor of the number of annealing tries if each rank has one slot. Annealing can then improve only the replica
counts.

Its effect was measured with 256 experts on 320, 512 and 1,024 ranks x 1 slot (the four kinds of heat in ``make
bench-solver``, three seeds). Compared with the full number of tries, the PAR is 0.2 % higher on the window and 0.1 %
lower on the next one.
"""


def from_scratch(layer: Layer, params: SearchParams, slot_price: float) -> Candidate:
    """Place a layer from scratch: tree search, local search from the best leaves, annealing and tables.

    Parameters
    ----------
    layer
        Heat and current layout of the layer.
    params
        Search parameters.
    slot_price
        Minimum PAR improvement per moved slot.

    Returns
    -------
    Candidate
        The candidate with the lowest sum of PAR and move cost.
    """
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    replicas_KE, _ = tree_search(heat, ranks, slots, params.z, params.tree_leaves)
    no_home_ER = np.zeros_like(deployed.home_ER)
    best = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, np.inf, 0)
    for replicas_E in replicas_KE:
        placed_RS = _place_and_search(replicas_E, layer, params)
        if params.annealing_tries > 0:
            tries = params.annealing_tries // replicas_KE.shape[0]
            placed_RS = anneal(placed_RS, heat.scaled_EN, heat.share_N, tries, params.seed)
        best = _cheaper(best, _match_and_add_tables(placed_RS, layer, params), slot_price)
    if params.tables == STEPWISE and params.step_tries > 0:
        placed_KRS = search_for_steps(best.phy2log_RS, heat, no_home_ER, np.zeros(1), params)
        best = _cheaper(best, _match_and_add_tables(placed_KRS[0], layer, params), slot_price)
    return best


def greedy(layer: Layer, params: SearchParams) -> Int32:
    """Return a greedy placement whose rows are matched to the current ranks, int32 ``[R, S]``.

    ``from_scratch`` starts from the same placement if a layer is too large for the tree search.
    """
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    replicas_KE, _ = tree_search(heat, ranks, slots, params.z, 0)
    placed_RS = place(replicas_KE[0], heat, ranks, slots, params.z).phy2log_RS
    return match_ranks(placed_RS, deployed.phy2log_RS, heat.mean_E.size, deployed.node_R)


def _place_and_search(replicas_E: Int32, layer: Layer, params: SearchParams) -> Int32:
    """Place the replicas greedily, improve the placement by local search and return it, int32 ``[R, S]``.

    The deployed placement is ignored, so moves are free.
    """
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    assignment = place(replicas_E, heat, ranks, slots, params.z)
    no_home_ER = np.zeros_like(deployed.home_ER)
    free_1 = np.zeros(1)
    steps = params.local_search_steps
    if params.annealing_tries > 0:
        steps = min(steps, _WORK // ranks**2)
    placed_1RS = local_search(assignment, heat, no_home_ER, free_1, params.z, steps)
    placed_RS: Int32 = placed_1RS[0]
    return placed_RS


def without_vain_annealing(heat: Episodes, deployed: LayerLayout, params: SearchParams) -> SearchParams:
    """Return the parameters, with annealing disabled if it would take too long or would not help on unseen heat.

    Annealing cools the hottest rank in every episode that it is fitted to. With many ranks or few tokens, however,
    chance largely determines which rank is hottest. A short trial is therefore fitted to each half of the episodes, and
    annealing is disabled unless both trials lower the PAR on the other half.

    Parameters
    ----------
    heat
        Heat of the layer by episode.
    deployed
        Current layout of the layer.
    params
        Search parameters. If ranks have one slot, the number of tries is reduced.
    """
    ranks, slots = deployed.phy2log_RS.shape
    tries = params.annealing_tries // (_LONE if slots == 1 else 1)
    if tries * ranks > _WORK:
        tries = 0
    params = params._replace(annealing_tries=tries)
    if not (tries and params.options.holdout and heat.share_N.size >= MIN_EPISODES):
        return params
    forecast = choose_forecast(heat, np.array([np.inf]), params.options.trimmed_mean)
    older, newer = halves_of(heat)
    for training, held_out in ((older, newer), (newer, older)):
        fit = Layer(forecast_heat(training, forecast, 1.0), deployed)
        if not _annealing_lasts(fit, held_out, params):
            return params._replace(annealing_tries=0)
    return params


def _annealing_lasts(fit: Layer, held_out: Episodes, params: SearchParams) -> bool:
    """Return True if a short annealing run that is fitted to one half also lowers the PAR on the held-out half."""
    heat, deployed = fit
    experts = heat.mean_E.size
    ranks, slots = deployed.phy2log_RS.shape
    replicas_KE, _ = tree_search(heat, ranks, slots, params.z, 0)
    placed_RS = _place_and_search(replicas_KE[0], fit, params)
    tries = min(params.annealing_tries // _TRIAL, _MAX_TRIAL)
    annealed_RS = anneal(placed_RS, heat.scaled_EN, heat.share_N, tries, params.seed)
    before = mean_of_max(*held_out, placed_RS, even_shares(placed_RS, experts))
    after = mean_of_max(*held_out, annealed_RS, even_shares(annealed_RS, experts))
    return after <= before - MIN_GAIN


def as_deployed(heat: Episodes, deployed: LayerLayout, tables: int) -> Candidate:
    """Return the deployed placement and tables as a candidate, with its PAR on ``heat``."""
    current = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    return current._replace(par=par_on(current, heat, deployed, tables))


def par_on(candidate: Candidate, heat: Episodes, deployed: LayerLayout, tables: int) -> float:
    """Return the PAR of a candidate on the given heat, for the split ``tables``."""
    return mean_peak(peaks_on(candidate, heat.scaled_EN, deployed, tables), heat.share_N)


def peaks_on(candidate: Candidate, scaled_EN: Float32, deployed: LayerLayout, tables: int) -> Float32:
    """Return the load of the hottest rank in each episode under a candidate, float32 ``[N]``.

    Parameters
    ----------
    candidate
        Placement and tables to judge.
    scaled_EN
        float32 ``[E, N]``, normalised heat, which may differ from the heat that the candidate was made for.
    deployed
        Current layout, with each source's share of the tokens.
    tables
        Split of the tokens; see ``SearchParams.tables``.
    """
    if tables == STEPWISE:
        return optimal_peaks(candidate.phy2log_RS, scaled_EN)
    return max_rank_loads(scaled_EN, candidate.phy2log_RS, _shares_of(candidate, deployed, tables))


def _shares_of(candidate: Candidate, deployed: LayerLayout, tables: int) -> Float32:
    """Return the fraction of its expert's tokens that each slot receives, float32 ``[R, S]``."""
    if tables == EVEN:
        return even_shares(candidate.phy2log_RS, deployed.share_GE.shape[1])
    return slot_shares(candidate.phy2log_RS, candidate.log2phy_GE, deployed.share_GE)


def improved(layer: Layer, params: SearchParams, price_K: Float64, times: int) -> Int32:
    """Improve the deployed placement by local search and return one placement for each price per move.

    The search assumes an even split, because token shares from tables that are fitted to this window are less accurate
    on the next one.

    Parameters
    ----------
    layer
        Heat and current layout of the layer.
    params
        Search parameters.
    price_K
        float64 ``[K]``, prices in PAR per moved slot.
    times
        Maximum number of changes, as a multiple of the maximum in a hold-out.

    Returns
    -------
    Int32
        int32 ``[K, R, S]``, a placement for each price.
    """
    heat, deployed = layer
    if params.tables == STEPWISE:
        return search_for_steps(deployed.phy2log_RS, heat, deployed.home_ER, price_K, params)
    share_RS = even_shares(deployed.phy2log_RS, deployed.share_GE.shape[1])
    assignment = assignment_of(deployed.phy2log_RS, share_RS, heat)
    limit = times * max(_CHANGES, share_RS.size // _CHANGES)
    steps = min(limit, params.local_search_steps)
    return local_search(assignment, heat, deployed.home_ER, price_K, params.z, steps)


def _match_and_add_tables(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """Match a placement's rows to the ranks that hold most of their experts, then make and refine the tables."""
    deployed = layer.deployed
    experts = deployed.share_GE.shape[1]
    matched_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = with_tables(matched_RS, layer, params)
    if params.tables in CHOSEN and params.options.table_swaps:
        return _refine_through_tables(candidate, layer, params)
    return candidate


def with_tables(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """Return a candidate for a placement: keep experts in their deployed slots, make tables, and compute the PAR.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement. Experts that stay on their rank get their deployed slot back.
    layer
        Heat and current layout of the layer.
    params
        Search parameters.
    """
    heat, deployed = layer
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if params.tables == SOLVED:
        log2phy_GE, par = solve_tables(kept_RS, heat, deployed.share_GE, params.z)
    else:
        sources, experts = deployed.share_GE.shape
        log2phy_GE = fixed_rule(*slots_by_expert(kept_RS, experts), sources, params.width)
        par = par_on(Candidate(kept_RS, log2phy_GE, 0.0, moves), heat.episodes, deployed, params.tables)
    return Candidate(kept_RS, log2phy_GE, par, moves)


def _refine_through_tables(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """Swap experts under the token shares from the candidate's tables, and keep the result if its PAR is lower.

    The cost of moves is not taken into account.
    """
    heat, deployed = layer
    log2phy_GE = candidate.log2phy_GE.copy()
    swapped_RS = swap_through_tables(
        candidate.phy2log_RS, log2phy_GE, heat, deployed.share_GE, params.z, params.local_search_steps
    )
    kept_RS, moves = keep_slots(swapped_RS, deployed.phy2log_RS)
    refined = Candidate(kept_RS, follow_slots(log2phy_GE, kept_RS), 0.0, moves)
    refined = refined._replace(par=par_on(refined, heat.episodes, deployed, params.tables))
    return refined if refined.par < candidate.par else candidate


def _cheaper(first: Candidate, second: Candidate, price: float) -> Candidate:
    """Return the candidate with the lower sum of PAR and move cost; ``first`` if they are tied."""
    return second if second.par + price * second.moves < first.par + price * first.moves else first
