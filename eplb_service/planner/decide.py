"""One decision, as a pure function: what to change in which layers, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Int32, Placement, par
from eplb_service.planner.asking import ask
from eplb_service.planner.cherry_pick import cherry_pick
from eplb_service.planner.hierarchy import groups_on_nodes
from eplb_service.planner.noise_floor import noise_floor
from eplb_service.planner.plan import LayerPlan, LayerVerdict, Plan
from eplb_service.planner.scoring import split_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.settled import settled_par
from eplb_service.planner.topology import Topology
from eplb_service.planner.validate import check_arguments, flaw_of
from eplb_service.planner.verdict import Judge, stays
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import SolverError
from eplb_service.solver.topology import choose_senders
from eplb_service.solver.window import sum_episodes


def plan(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
) -> Plan:
    """Decide what to change, given the heat of a window and what serves now.

    Parameters
    ----------
    window
        Heat, and each expert's split over the source ranks where the host tells it.
    placement, log2phy_RLE
        What is deployed: the placement and int32 ``[R, L, E]`` the table of each source rank.
    topology
        Nodes and token groups of the ranks.
    settings
        How to decide.

    Returns a ``Plan``: the same for the same arguments, whatever the number of threads. A layer whose solution
    turns out invalid keeps what it has, and its verdict says so. Raises ``HeatError``, ``PlacementError`` or
    ``TopologyError`` where the arguments contradict each other.
    """
    check_arguments(window, placement, log2phy_RLE, topology)
    if window.steps == 0:
        raise HeatError("the window holds no steps")
    episodes = min(settings.episodes, window.steps)
    heat_NLE = sum_episodes(window.heat_TLE, episodes)
    loads_NLR = split_loads(heat_NLE, placement, log2phy_RLE, window.source_RLE, settings.split)
    # A layer without tokens has no ratio; for a decision it is balanced, since nothing can be won there.
    seen_L = np.nan_to_num(par(loads_NLR), nan=1.0)
    drawn_L = noise_floor(heat_NLE, placement.ranks)
    settled_L = settled_par(heat_NLE, loads_NLR, placement) if episodes > 1 else drawn_L
    # Real routers' choices are not independent draws: what was measured may lie below what is computed for those.
    floor_L = np.minimum(drawn_L, settled_L)
    groups, why_ungrouped = groups_on_nodes(settings, placement, topology)
    steps, expert_bytes = window.steps / episodes, topology.bytes_per_expert
    judge = Judge(seen_L, floor_L, settled_L, steps, expert_bytes, settings, why_ungrouped)
    if settings.policy == "none":
        none = (judge.kept(layer, "kept: the policy is none") for layer in range(window.layers))
        return Plan((), tuple(none))
    picked = cherry_pick(
        seen_L, settled_L if settings.warm and settings.volatility else np.ones(window.layers), settings
    )
    answers = ask(window, heat_NLE, placement, log2phy_RLE, topology, settings, picked, groups)
    plans: list[LayerPlan] = []
    told: dict[int, LayerVerdict] = {}
    for layer, answer in zip(picked.tolist(), answers, strict=True):
        changed, told[layer] = _judged(layer, answer, judge, placement, topology)
        if changed is not None:
            plans.append(changed)
    verdicts = tuple(told.get(layer) or judge.not_picked(layer) for layer in range(window.layers))
    plans.sort(key=lambda changed: verdicts[changed.layer].par_planned - verdicts[changed.layer].par_seen)
    return Plan(tuple(plans), verdicts)


def plan_afresh(window: Window, placement: Placement, topology: Topology, settings: PlannerSettings) -> Plan:
    """Solve every layer from nothing; ``placement`` serves only as what moves are counted against."""
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None, warm=False)
    return plan(window, placement, placement.default_log2phy(), topology, settings)


def _judged(
    layer: int, answer: Answer | SolverError, judge: Judge, placement: Placement, topology: Topology
) -> tuple[LayerPlan | None, LayerVerdict]:
    """What an answer makes of its layer: the change, if it is one, and the verdict."""
    if isinstance(answer, SolverError):
        return None, judge.unanswered(layer, answer)
    found = answer.found
    if flaw := flaw_of(found.phy2log_RS, found.log2phy_GE, placement.experts):
        return None, judge.unanswered(layer, flaw)
    if stays(answer):
        return None, judge.not_worth_it(layer, answer)
    moves_M5 = choose_senders(placement.phy2log_LRS[layer].copy(), found.phy2log_RS, topology.nodes_R.copy())
    _, _, group_R = topology.token_groups()
    changed = LayerPlan(layer, found.phy2log_RS, found.log2phy_GE[group_R], moves_M5)
    return changed, judge.changed(layer, answer, len(moves_M5))
