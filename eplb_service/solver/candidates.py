"""What can be done about a layer: retune its tables, improve its placement from where it is, or place it from scratch.

From scratch: replica counts by tree search, local search from its best leaves, annealing where slots are few, tables,
and a last touch through the tables. Where few sources make the tables' shares so coarse that what is best under even
shares is not what they serve best, kicks look for a placement that suits the tables. Where the host splits every
step's tokens by themselves, a search for the steps' own optima (``stepwise``) takes the place of all that is done
about tables.
"""

from __future__ import annotations

import random

import numpy as np

from eplb_service.solver.model import (
    CHOSEN,
    DEALT,
    EVEN,
    SOLVED,
    STEPWISE,
    Candidate,
    Float32,
    Float64,
    Heat,
    Int32,
    Layer,
    SearchParams,
)
from eplb_service.solver.search.annealing import anneal
from eplb_service.solver.search.construction import assignment_of, even_shares
from eplb_service.solver.search.evaluation import SMALLEST_GAIN, mean_of_max, peaks_of_episodes
from eplb_service.solver.search.local_search import local_search
from eplb_service.solver.search.tree_search import place, tree_search
from eplb_service.solver.stepwise.search import searched_for_steps
from eplb_service.solver.stepwise.split import expected_level, levels_of_episodes
from eplb_service.solver.tables.dealing import solve_dealing
from eplb_service.solver.tables.log2phy import (
    fixed_rule,
    slot_shares,
    slots_by_expert,
    solve_tables,
)
from eplb_service.solver.tables.table_swaps import rehoused, swap_through_tables
from eplb_service.solver.topology import keep_slots, match_ranks

_KICKED_SLOTS = 24_000
"""Slots that all kicks of a layer look through together: enough for the known example of eight experts on 16 slots to
reach 185 from seven of eight seeds."""
_COARSE = 0.01
"""Peak-to-average ratio by which tables must do worse than even shares for kicks to be tried: with less to make up for
they won nothing at 32 ranks and took five times as long as everything else."""
_MOST_EXCHANGED = 3
"""Replicas that one kick exchanges at most."""
_DRAWS = 50
"""Draws after which a kick gives up an exchange."""


def improved(layer: Layer, params: SearchParams, price_K: Float64) -> Int32:
    """Local search from the deployed placement; int32 ``[K, R, S]``, a placement for each price of a move.

    Shares are taken as even: tables that lean on the window seen fit the next one worse.
    """
    heat, deployed = layer
    if params.tables == STEPWISE:
        return searched_for_steps(deployed.phy2log_RS, heat, deployed.home_ER, price_K, params)
    share_RS = even_shares(deployed.phy2log_RS, deployed.share_GE.shape[1])
    assignment = assignment_of(deployed.phy2log_RS, share_RS, heat.demand)
    found_KRS, _ = local_search(assignment, heat.demand, deployed.home_ER, params, price_K)
    return found_KRS


def with_tables(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """A placement with its experts in their deployed slots, its tables and what both are worth."""
    heat, deployed = layer
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    if params.tables == DEALT:
        log2phy_GE, par = solve_dealing(kept_RS, layer, params)
    elif params.tables == SOLVED:
        log2phy_GE, par = solve_tables(
            kept_RS, heat.demand, heat.scaled_EN, heat.share_N, deployed.share_GE, params.z
        )
    else:
        first_E1, slot_P = slots_by_expert(kept_RS, deployed.share_GE.shape[1])
        log2phy_GE = fixed_rule(first_E1, slot_P, deployed.share_GE.shape[0], params.width)
        par = realised(kept_RS, log2phy_GE, heat, deployed.share_GE, params.tables)
    return Candidate(kept_RS, log2phy_GE, par, moves)


def touched_up(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """The candidate after swaps at the shares that its tables give, unless they raise its realised ratio.

    That ratio is the objective here: it never rises. Moves are taken as free.
    """
    heat, deployed = layer
    log2phy_GE = candidate.log2phy_GE.copy()
    found_RS = swap_through_tables(
        candidate.phy2log_RS,
        log2phy_GE,
        heat.demand,
        deployed.share_GE,
        params,
    )
    kept_RS, moves = keep_slots(found_RS, deployed.phy2log_RS)
    kept_GE = rehoused(log2phy_GE, kept_RS)
    par = realised(kept_RS, kept_GE, heat, deployed.share_GE, params.tables)
    if par < candidate.par:
        return Candidate(kept_RS, kept_GE, par, moves)
    return candidate


def cheaper(one: Candidate, other: Candidate, price: float) -> Candidate:
    """The candidate with the lower ratio once its moves are paid for; the first where they cost the same."""
    return other if other.par + price * other.moves < one.par + price * one.moves else one


def par_on(candidate: Candidate, layer: Layer, tables: int) -> float:
    """Peak-to-average ratio of a candidate on other heat."""
    return realised(candidate.phy2log_RS, candidate.log2phy_GE, layer.heat, layer.deployed.share_GE, tables)


def peaks_on(candidate: Candidate, layer: Layer, tables: int) -> Float32:
    """Load of the hottest rank in each episode of other heat under a candidate, float32 ``[N]``."""
    heat, phy2log_RS = layer.heat, candidate.phy2log_RS
    if tables == STEPWISE:
        return levels_of_episodes(phy2log_RS, heat.scaled_EN, heat.share_N)
    weight_RS = _weights(phy2log_RS, candidate.log2phy_GE, layer.deployed.share_GE, tables)
    return peaks_of_episodes(heat.scaled_EN, phy2log_RS, weight_RS)


def realised(phy2log_RS: Int32, log2phy_GE: Int32, heat: Heat, share_GE: Float32, tables: int) -> float:
    """Peak-to-average ratio, split by step, evenly or through tables.

    Parameters
    ----------
    phy2log_RS, log2phy_GE
        int32 ``[R, S]`` and ``[G, E]``, a placement and its tables.
    heat
        Of the layer.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    tables
        One of ``model.EVEN``, ``RULE``, ``SOLVED``, ``DEALT`` and ``STEPWISE``.
    """
    if tables == STEPWISE:
        return expected_level(phy2log_RS, heat.scaled_EN, heat.share_N)
    weight_RS = _weights(phy2log_RS, log2phy_GE, share_GE, tables)
    return mean_of_max(heat.scaled_EN, heat.share_N, phy2log_RS, weight_RS)


def _weights(phy2log_RS: Int32, log2phy_GE: Int32, share_GE: Float32, tables: int) -> Float32:
    """The part of its expert's tokens that each slot receives, float32 ``[R, S]``."""
    if tables == EVEN:
        return even_shares(phy2log_RS, share_GE.shape[1])
    return slot_shares(phy2log_RS, log2phy_GE, share_GE)


def from_scratch(layer: Layer, params: SearchParams) -> Candidate:
    """Tree search over replica counts, local search from its best leaves, tables; the best through its tables."""
    heat, deployed = layer
    ranks, slots = deployed.phy2log_RS.shape
    best_KE, _ = tree_search(heat.demand, ranks, slots, params)
    nowhere_ER = np.zeros_like(deployed.home_ER)
    best = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, np.inf, 0)
    lowest_even = np.inf
    for replicas_E in best_KE:
        assignment = place(replicas_E, heat.demand, ranks, slots, params.z)
        found_KRS, _ = local_search(assignment, heat.demand, nowhere_ER, params, np.zeros(1))
        placed_RS = found_KRS[0]
        if params.annealing_tries > 0:
            placed_RS, even = anneal(
                placed_RS,
                heat.scaled_EN,
                heat.share_N,
                params.annealing_tries // best_KE.shape[0],
                params.seed,
            )
            lowest_even = min(lowest_even, even)
        best = cheaper(best, served(placed_RS, layer, params), params.move_price)
    if params.tables == DEALT:
        # Shares of one entry or finer: what they cannot even out in the mean another placement may.
        coarse = params.annealing_tries > 0 and _mean_peak(best, layer) > 1.0 + _COARSE
    else:
        # Kicks can only make up for what tables lose against the even shares that were searched with.
        coarse = params.tables == SOLVED and best.par > lowest_even + _COARSE
    if coarse and params.table_kicks and params.tree_groups > 0:
        best = kicked_through_tables(best, layer, params, _KICKED_SLOTS // (ranks * slots))
    if params.tables == STEPWISE and params.step_tries > 0:
        found_KRS = searched_for_steps(best.phy2log_RS, heat, nowhere_ER, np.zeros(1), params)
        best = cheaper(best, served(found_KRS[0], layer, params), params.move_price)
    return best


def _mean_peak(candidate: Candidate, layer: Layer) -> float:
    """Load of the hottest rank in the mean of the episodes."""
    heat, deployed = layer
    share_RS = slot_shares(candidate.phy2log_RS, candidate.log2phy_GE, deployed.share_GE)
    load_R = (share_RS * heat.demand.mean_E[candidate.phy2log_RS]).sum(axis=1)
    return float(load_R.max())


def kicked_through_tables(candidate: Candidate, layer: Layer, params: SearchParams, rounds: int) -> Candidate:
    """The candidate, or a cheaper one found by so many kicks, each with tables solved and touched up again.

    A kick turns a few random spare replicas into replicas of other experts. The search goes on from whatever is as good
    as where it is: many placements share the same hottest rank.

    References
    ----------
    H. Lourenço, O. Martin, T. Stützle, *Iterated Local Search*, 2003.
    """
    rng = random.Random(params.seed)  # noqa: S311
    best = here = candidate
    for _ in range(rounds):
        kicked_RS = kicked(here.phy2log_RS, layer.deployed.share_GE.shape[1], rng)
        found = with_tables(kicked_RS, layer, params)
        if params.table_swaps:
            found = touched_up(found, layer, params)
        price = params.move_price
        if found.par + price * found.moves <= here.par + price * here.moves + SMALLEST_GAIN:
            here = found
            best = cheaper(best, here, params.move_price)
    return best


def kicked(phy2log_RS: Int32, experts: int, rng: random.Random) -> Int32:
    """The placement with one to three random spare replicas replaced by experts that their ranks lack."""
    ranks, slots = phy2log_RS.shape
    kicked_RS: Int32 = phy2log_RS.copy()
    for _ in range(1 + rng.randrange(_MOST_EXCHANGED)):
        for _ in range(_DRAWS):
            rank, slot, gainer = rng.randrange(ranks), rng.randrange(slots), rng.randrange(experts)
            spare = np.count_nonzero(kicked_RS == kicked_RS[rank, slot]) > 1
            if spare and gainer not in kicked_RS[rank]:
                kicked_RS[rank, slot] = gainer
                break
    return kicked_RS


def annealed(candidate: Candidate, layer: Layer, params: SearchParams, tries: int, seed: int) -> Candidate:
    """The candidate after so many tries of annealing, where they win.

    Parameters
    ----------
    candidate, layer
        What is improved, and on which heat.
    params
        How tokens are split, and the price of a move.
    tries, seed
        How long, and of which random numbers.
    """
    if params.tables == STEPWISE:
        nowhere_ER = np.zeros_like(layer.deployed.home_ER)
        params = params._replace(seed=seed)
        found_RS = searched_for_steps(candidate.phy2log_RS, layer.heat, nowhere_ER, np.zeros(1), params)[0]
    else:
        found_RS, _ = anneal(candidate.phy2log_RS, layer.heat.scaled_EN, layer.heat.share_N, tries, seed)
    return cheaper(candidate, served(found_RS, layer, params), params.move_price)


def served(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> Candidate:
    """A placement dealt to the ranks that hold most of it, with its tables, touched up through them."""
    deployed = layer.deployed
    experts = deployed.share_GE.shape[1]
    dealt_RS = match_ranks(phy2log_RS, deployed.phy2log_RS, experts, deployed.node_R)
    candidate = with_tables(dealt_RS, layer, params)
    if params.tables in CHOSEN and params.table_swaps:
        return touched_up(candidate, layer, params)
    return candidate
