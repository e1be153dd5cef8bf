"""One decision, as a pure function: which layers to change, to what, and why.

Only the layers that are worth it are looked into: layer-wise cherry-picking, the third of FlashLB's ideas. Ours departs
from FlashLB in what is worth it. FlashLB takes layers whose balancedness fell under a fixed value, or under 0.95 of
what it was after their last change, and sends the largest gains. Ours keeps no such history: a layer is worth it
where more than ``min_gain`` can be won beyond what its experts' own jumps leave (``noise_floor``), and each change must
then pay for its moves on heat that it was not fitted to (``solver.holdout``).

References
----------
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Float64, Int32, Placement, dealing_width, par
from eplb_service.planner.dealing import as_host_deals, first_tables, tables_of_sources
from eplb_service.planner.move_price import LayerTime, move_price
from eplb_service.planner.noise_floor import balanced_par, noise_floor, volatility_bound
from eplb_service.planner.plan import LayerPlan, LayerVerdict, Plan
from eplb_service.planner.scoring import split_loads, split_steps
from eplb_service.planner.settings import STEP, PlannerSettings
from eplb_service.planner.solver_request import (
    episode_heat,
    episodes_of,
    groups_on_nodes,
    solve_picked,
    time_curve,
)
from eplb_service.planner.times import with_times, without_slower
from eplb_service.planner.topology import Topology
from eplb_service.planner.validate import check_arguments, flaw_of
from eplb_service.planner.verdict import Judge, stays
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import SolverError
from eplb_service.solver.model import Candidate
from eplb_service.solver.topology import choose_senders


def plan(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
    layer_time: LayerTime | None = None,
) -> Plan:
    """Decide what to change, given the heat of a window and what serves now.

    Parameters
    ----------
    window
        Heat, and each expert's split over the source ranks where the host reports it.
    placement, log2phy_RLE
        What is deployed: the placement and int32 ``[R, L, E]`` the table of each source rank; ``[R, L, E, D]`` where
        they deal.
    topology
        Nodes and token groups of the ranks.
    settings
        How to decide.
    serving_steps
        Steps that what is decided is expected to serve, over which moves must pay; by default those of the window.
    moving, layer_time
        What is measured of the cost of moves, and of what they may win; the settings' numbers where it is not.

    Returns
    -------
    Plan
        The same for the same arguments, whatever the number of threads. A layer whose solution turns out invalid keeps
        what it has, and its verdict says so; where experts are bound to their ranks, all layers do.

    Raises
    ------
    HeatError, PlacementError, TopologyError
        Where the arguments contradict each other.
    """
    check_arguments(window, placement, log2phy_RLE, topology)
    if window.steps == 0:
        raise HeatError("the window holds no steps")
    steps, expert = serving_steps or float(window.steps), topology.bytes_per_expert
    price = move_price(settings, placement.slots, expert, steps, moving, layer_time)
    settings = replace(settings, move_price=price.value)
    groups, why_ungrouped = groups_on_nodes(settings, placement, topology)
    judge = _judge(window, placement, log2phy_RLE, topology, settings, why_ungrouped)
    if settings.policy == "none" or topology.rank_bound:
        reason = "its experts are bound to their ranks" if topology.rank_bound else "the policy is none"
        return Plan((), tuple(judge.kept(layer, f"kept: {reason}") for layer in range(window.layers)))
    picked = _picked(judge, settings)
    seen = judge.par_L, judge.floor_L
    answers = solve_picked(window, placement, log2phy_RLE, topology, settings, picked, *seen, groups)
    width = dealing_width(log2phy_RLE, 3)
    decided = {
        layer: _decided(layer, answer, judge, window, placement, topology, width)
        for layer, answer in zip(picked.tolist(), answers, strict=True)
    }
    verdicts = tuple(
        decided[layer].verdict if layer in decided else judge.not_picked(layer)
        for layer in range(window.layers)
    )
    changed = [of.changed for of in decided.values() if of.changed is not None]
    hindsight = tuple(of.hindsight for of in decided.values() if of.hindsight is not None)
    if settings.cost_curve is not None:
        by_layer = {of.layer: of for of in changed}
        served = window, placement, log2phy_RLE
        verdicts = with_times(verdicts, by_layer, *served, settings.split, settings.cost_curve)
        if settings.split == STEP and not settings.cost_curve.linear:
            # Searched by tokens: whether that is worth the replicas that it wakes, only the curve says.
            verdicts, changed = without_slower(verdicts, changed, settings.min_gain, price.value)
    changed.sort(key=lambda layer_plan: _gain(verdicts[layer_plan.layer]), reverse=True)
    return Plan(tuple(changed), verdicts, price, hindsight)


def plan_afresh(window: Window, placement: Placement, topology: Topology, settings: PlannerSettings) -> Plan:
    """Solve every layer from scratch; ``placement`` serves only as what moves are counted against."""
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None, warm=False)
    deployed_RLE = first_tables(placement, settings.split, settings.deal_width)
    return plan(window, placement, deployed_RLE, topology, settings)


def _picked(judge: Judge, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of the layers to solve, worst first."""
    if time_curve(settings) is not None:
        return worst_busy(judge.par_L, settings)
    lost_L = judge.volatility_bound_L if settings.warm and settings.volatility else np.ones(judge.par_L.size)
    return cherry_pick(judge.episode_par_L, lost_L, settings)


def cherry_pick(par_L: Float64, lost_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of the layers worth solving, worst first, at most ``max_layers``.

    A layer is worth it where its ratio is past the threshold and more than ``min_gain`` of it could be won.

    Parameters
    ----------
    par_L, lost_L
        float64 ``[L]``, the ratio seen and what of it no placement can win.
    settings
        With ``par_threshold``, ``min_gain`` and ``max_layers``.
    """
    worst_first = np.argsort(lost_L - par_L, kind="stable")
    worth_it_L = (par_L > settings.par_threshold) & (par_L - lost_L > settings.min_gain)
    return worst_first[worth_it_L[worst_first]][: settings.max_layers]


def worst_busy(par_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of the layers with tokens, worst first, at most ``max_layers``: a ratio of tokens says little of time."""
    worst_first = np.argsort(-np.nan_to_num(par_L, nan=0.0), kind="stable")
    return worst_first[~np.isnan(par_L[worst_first])][: settings.max_layers]


def _judge(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    why_ungrouped: str,
) -> Judge:
    """Ratios of all layers as they are served, per step for people and per episode for the decision."""
    episodes = episodes_of(window, settings)
    steps = split_steps(
        window.heat_TLE, placement, log2phy_RLE, window.source_RLE, settings.split, episodes=episodes
    )
    if settings.split == STEP:
        heat_NLE = episode_heat(window, settings, np.arange(window.layers)).transpose(1, 0, 2)
        loads_NLR = split_loads(heat_NLE, placement, log2phy_RLE, window.source_RLE, settings.split)
        # Every step is balanced for itself, so neither token sampling nor experts' jumps set a floor.
        floor_L = np.where(np.isnan(steps.par_K), np.nan, 1.0)
        drawn_L = bound_L = np.ones(window.layers)
    else:
        loads_NLR = steps.loads_NKR
        floor_L = noise_floor(steps.tokens_TK, placement.ranks)
        # For a decision a layer without tokens is balanced, since nothing can be won there.
        drawn_L = np.nan_to_num(noise_floor(loads_NLR.sum(axis=2), placement.ranks), nan=1.0)
        bound_L = drawn_L
        # Real routers' choices are not independent draws: what was measured may lie below what is computed for those.
        if window.steps > 1:
            floor_L = np.minimum(floor_L, balanced_par(steps.variance_K, placement.ranks))
        if episodes > 1:
            bound_L = volatility_bound(steps)
    return Judge(
        par_L=steps.par_K,
        floor_L=floor_L,
        episode_par_L=np.nan_to_num(par(loads_NLR), nan=1.0),
        episode_floor_L=np.minimum(drawn_L, bound_L),
        volatility_bound_L=bound_L,
        episode_steps=window.steps / episodes,
        bytes_per_expert=topology.bytes_per_expert,
        settings=settings,
        why_ungrouped=why_ungrouped,
    )


class _Decided(NamedTuple):
    """What an answer makes of its layer: the change, if it is one, the verdict, and its solution from scratch."""

    changed: LayerPlan | None
    verdict: LayerVerdict
    hindsight: tuple[int, Int32, Int32] | None = None


def _decided(
    layer: int,
    answer: Answer | SolverError,
    judge: Judge,
    window: Window,
    placement: Placement,
    topology: Topology,
    width: int,
) -> _Decided:
    """What an answer makes of its layer; tables as wide as the host's."""
    if isinstance(answer, SolverError):
        return _Decided(None, judge.unanswered(layer, answer))
    found, fresh = answer.found, answer.fresh
    for candidate in (found, fresh):
        if flaw := flaw_of(candidate.phy2log_RS, candidate.log2phy_GE, placement.experts):
            return _Decided(None, judge.unanswered(layer, flaw))
    _, first_G, group_R = topology.token_groups()

    def tables(candidate: Candidate) -> Int32:
        return tables_of_sources(candidate.log2phy_GE, first_G.size)[group_R]

    fresh_RE = tables(fresh)
    hindsight = _step_par(window, layer, fresh.phy2log_RS, fresh_RE, judge.settings.split)
    from_scratch = layer, fresh.phy2log_RS, as_host_deals(fresh_RE, width)
    if stays(answer):
        return _Decided(None, judge.not_worth_it(layer, answer, hindsight), from_scratch)
    log2phy_RE = tables(found)
    planned = hindsight
    if found is not fresh:
        planned = _step_par(window, layer, found.phy2log_RS, log2phy_RE, judge.settings.split)
    moves_M5 = choose_senders(placement.phy2log_LRS[layer].copy(), found.phy2log_RS, topology.nodes_R.copy())
    changed = LayerPlan(layer, found.phy2log_RS, as_host_deals(log2phy_RE, width), moves_M5)
    verdict = judge.changed(layer, answer, len(moves_M5), planned, hindsight)
    return _Decided(changed, verdict, from_scratch)


def _step_par(window: Window, layer: int, phy2log_RS: Int32, log2phy_RE: Int32, split: str) -> float:
    """Peak-to-average ratio per step of one layer under another placement."""
    placement = Placement(phy2log_RS[None], window.experts)
    log2phy_R1E = log2phy_RE[:, None]
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, layer, None]
    return float(split_steps(window.heat_TLE, placement, log2phy_R1E, source_R1E, split, (layer,)).par_K[0])


def _gain(verdict: LayerVerdict) -> float:
    if verdict.us_seen is not None and verdict.us_planned is not None:
        return verdict.us_seen - verdict.us_planned
    return verdict.par_seen - verdict.par_planned
