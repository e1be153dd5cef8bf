"""One decision, as a pure function: what to change in which layers, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Int32, Placement, PlacementError, check_layer, check_log2phy
from eplb_service.planner import verdict
from eplb_service.planner.cherry_pick import cherry_pick
from eplb_service.planner.effort import search_for
from eplb_service.planner.noise_floor import noise_floor
from eplb_service.planner.plan import LayerPlan, Plan
from eplb_service.planner.scoring import Float64, par, rank_loads, source_shares
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology, TopologyError
from eplb_service.solver.engine import SolverError, solve_many
from eplb_service.solver.episodes import sum_episodes
from eplb_service.solver.layer import Answer
from eplb_service.solver.moves import choose_senders


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
    _check_agreement(window, placement, log2phy_RLE, topology)
    if window.steps == 0:
        raise HeatError("the window holds no steps")
    heat_NLE = sum_episodes(window.heat_TLE, min(settings.episodes, window.steps))
    seen_L = par(rank_loads(heat_NLE, placement, log2phy_RLE, window.source_RLE))
    floor_L = noise_floor(heat_NLE, placement.ranks)
    if settings.policy == "none":
        stays = [
            verdict.kept(layer, seen_L, floor_L, "kept: the policy is none") for layer in range(window.layers)
        ]
        return Plan((), tuple(stays))
    picked = cherry_pick(seen_L, floor_L, settings)
    answers = _solve(window, heat_NLE, placement, log2phy_RLE, topology, settings, picked)
    verdicts = {
        layer: verdict.not_picked(layer, seen_L, floor_L, settings)
        for layer in set(range(window.layers)) - set(picked.tolist())
    }
    plans: list[LayerPlan] = []
    for layer, answer in zip(picked.tolist(), answers, strict=True):
        if isinstance(answer, SolverError) or (flaw := _flaw(answer, placement)):
            reason = verdict.no_answer(answer if isinstance(answer, SolverError) else flaw)
            verdicts[layer] = verdict.kept(layer, seen_L, floor_L, reason)
            continue
        changed = _layer_plan(answer, layer, placement, topology)
        planned = _planned_par(changed, heat_NLE, window, placement)
        refusal = verdict.not_worth_it(answer.taken, float(seen_L[layer]) - planned, settings)
        if refusal is not None:
            verdicts[layer] = verdict.kept(layer, seen_L, floor_L, refusal)
            continue
        plans.append(changed)
        moves = len(changed.moves_M5)
        verdicts[layer] = verdict.changed(layer, seen_L, floor_L, planned, moves, answer.taken)
    plans.sort(key=lambda changed: verdicts[changed.layer].par_planned - verdicts[changed.layer].par_seen)
    return Plan(tuple(plans), tuple(verdicts[layer] for layer in range(window.layers)))


def plan_afresh(window: Window, placement: Placement, topology: Topology, settings: PlannerSettings) -> Plan:
    """Solve every layer from nothing; ``placement`` serves only as what moves are counted against."""
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None, warm=False)
    return plan(window, placement, placement.default_log2phy(), topology, settings)


def _check_agreement(window: Window, placement: Placement, log2phy_RLE: Int32, topology: Topology) -> None:
    if (window.layers, window.experts) != (placement.layers, placement.experts):
        raise HeatError(
            f"heat of {window.layers} layers x {window.experts} experts does not fit a placement of "
            f"{placement.layers} x {placement.experts}"
        )
    wanted = (placement.ranks, placement.layers, placement.experts)
    if log2phy_RLE.shape != wanted:
        raise PlacementError(f"log2phy has the shape {list(wanted)}, got {list(log2phy_RLE.shape)}")
    for layer in range(placement.layers):
        where = f"log2phy of layer {layer}, rank"
        _check_tables(log2phy_RLE[:, layer], placement.phy2log_LRS[layer], where)
    if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
        raise HeatError(
            f"source heat of {window.source_RLE.shape[0]} ranks does not fit {placement.ranks} ranks"
        )
    if topology.ranks != placement.ranks:
        raise TopologyError(f"a topology of {topology.ranks} ranks does not fit {placement.ranks} ranks")


def _check_tables(log2phy_GE: Int32, phy2log_RS: Int32, where: str) -> None:
    """``check_log2phy`` for several tables of one layer; only a bad one is looked at by itself."""
    flat = phy2log_RS.ravel()
    inside_GE = (log2phy_GE >= 0) & (log2phy_GE < flat.size)
    held_GE = flat[np.where(inside_GE, log2phy_GE, 0)] == np.arange(log2phy_GE.shape[1])
    for table in np.flatnonzero(~(inside_GE & held_GE).all(axis=1)):
        check_log2phy(log2phy_GE[table], phy2log_RS, f"{where} {table}")


def _solve(
    window: Window,
    heat_NLE: Float64,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    picked: npt.NDArray[np.int64],
) -> list[Answer | SolverError]:
    """Answers for the picked layers; one source for each token group."""
    _, first_G, group_R = topology.token_groups()
    shares_RLE = source_shares(window.source_RLE, placement.ranks, placement.layers, placement.experts)
    share_GLE = np.zeros((first_G.size, len(picked), placement.experts))
    np.add.at(share_GLE, group_R, shares_RLE[:, picked])
    if settings.policy == "deepseek":
        heat_NLE = heat_NLE.sum(axis=0, keepdims=True)
    return solve_many(
        heat_NLE[:, picked].transpose(1, 0, 2),
        placement.phy2log_LRS[picked],
        log2phy_RLE[first_G][:, picked].transpose(1, 0, 2),
        share_GLE.transpose(1, 0, 2),
        search_for(settings, placement),
        np.array(settings.half_lives) * heat_NLE.shape[0],
        settings.min_gain,
        _unplaced(placement, settings)[picked],
        settings.threads,
        settings.budget_ms,
    )


def _unplaced(placement: Placement, settings: PlannerSettings) -> npt.NDArray[np.bool_]:
    """Layers to place anew whatever it moves: those in the engines' first layout, made for no heat at all."""
    if settings.policy == "deepseek" or not settings.warm:
        return np.ones(placement.layers, dtype=np.bool_)
    first = Placement.linear(1, placement.experts, placement.ranks, placement.slots).phy2log_LRS
    untouched_L: npt.NDArray[np.bool_] = (placement.phy2log_LRS == first).all(axis=(1, 2))
    return untouched_L


def _flaw(answer: Answer, placement: Placement) -> str:
    """What is wrong with an answer, empty where nothing is: no layer is switched on the solver's word alone."""
    try:
        check_layer(answer.found.phy2log_RS, placement.experts)
        _check_tables(answer.found.log2phy_GE, answer.found.phy2log_RS, "table of source")
    except PlacementError as error:
        return str(error)
    return ""


def _layer_plan(answer: Answer, layer: int, placement: Placement, topology: Topology) -> LayerPlan:
    _, _, group_R = topology.token_groups()
    phy2log_RS = answer.found.phy2log_RS
    moves_M5 = choose_senders(placement.phy2log_LRS[layer].copy(), phy2log_RS, topology.nodes_R.copy())
    return LayerPlan(layer, phy2log_RS, answer.found.log2phy_GE[group_R], moves_M5)


def _planned_par(changed: LayerPlan, heat_NLE: Float64, window: Window, placement: Placement) -> float:
    """Peak-to-average ratio of one layer through its new tables, on the heat that the decision saw."""
    layer = slice(changed.layer, changed.layer + 1)
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, layer]
    planned = Placement(changed.phy2log_RS[None], placement.experts)
    return float(par(rank_loads(heat_NLE[:, layer], planned, changed.log2phy_RE[:, None], source_R1E))[0])
