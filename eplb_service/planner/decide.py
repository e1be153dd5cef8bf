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
from eplb_service.solver.engine import Answers, solve_many
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
    heat_NLE = window.episodes(settings.episodes)
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
    for at, layer in enumerate(picked.tolist()):
        refusal = _flaw(answers, at, placement)
        if refusal is None:
            changed = _layer_plan(answers, at, layer, placement, topology)
            planned = _planned_par(changed, heat_NLE, window, placement)
            gain = float(seen_L[layer]) - planned
            refusal = verdict.not_worth_it(int(answers.taken_L2[at, 1]), gain, settings)
        if refusal is not None:
            verdicts[layer] = verdict.kept(layer, seen_L, floor_L, refusal)
            continue
        plans.append(changed)
        taken = int(answers.taken_L2[at, 1])
        verdicts[layer] = verdict.changed(layer, seen_L, floor_L, planned, len(changed.moves_M5), taken)
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
    for rank in range(placement.ranks):
        for layer in range(placement.layers):
            where = f"log2phy of rank {rank}, layer {layer}"
            check_log2phy(log2phy_RLE[rank, layer], placement.phy2log_LRS[layer], where)
    if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
        raise HeatError(
            f"source heat of {window.source_RLE.shape[0]} ranks does not fit {placement.ranks} ranks"
        )
    if topology.ranks != placement.ranks:
        raise TopologyError(f"a topology of {topology.ranks} ranks does not fit {placement.ranks} ranks")


def _solve(
    window: Window,
    heat_NLE: Float64,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    picked: npt.NDArray[np.int64],
) -> Answers:
    """Answers for the picked layers; one source for each token group."""
    _, first_G, group_R = np.unique(topology.token_groups_R, return_index=True, return_inverse=True)
    shares_RLE = source_shares(window.source_RLE, placement.ranks, placement.layers, placement.experts)
    share_GLE = np.zeros((first_G.size, len(picked), placement.experts))
    np.add.at(share_GLE, group_R, shares_RLE[:, picked])
    if settings.policy == "deepseek":
        heat_NLE = heat_NLE.sum(axis=0, keepdims=True)
    answers = solve_many(
        heat_NLE[:, picked].transpose(1, 0, 2),
        placement.phy2log_LRS[picked],
        log2phy_RLE[first_G][:, picked].transpose(1, 0, 2),
        share_GLE.transpose(1, 0, 2),
        search_for(settings, placement),
        np.array(settings.half_lives) * heat_NLE.shape[0],
        settings.min_gain,
        settings.threads,
    )
    return answers._replace(log2phy_LGE=answers.log2phy_LGE[:, group_R])


def _flaw(answers: Answers, at: int, placement: Placement) -> str | None:
    """What is wrong with an answer, if anything: no layer is switched on the solver's word alone."""
    phy2log_RS = answers.phy2log_LRS[at]
    try:
        check_layer(phy2log_RS, placement.experts)
        for rank in range(placement.ranks):
            check_log2phy(answers.log2phy_LGE[at, rank], phy2log_RS, f"table of rank {rank}")
    except PlacementError as error:
        return f"kept: the solver failed ({error})"
    return None


def _layer_plan(answers: Answers, at: int, layer: int, placement: Placement, topology: Topology) -> LayerPlan:
    phy2log_RS = answers.phy2log_LRS[at]
    moves_M5 = choose_senders(placement.phy2log_LRS[layer].copy(), phy2log_RS, topology.nodes_R.copy())
    return LayerPlan(layer, phy2log_RS, answers.log2phy_LGE[at], moves_M5)


def _planned_par(changed: LayerPlan, heat_NLE: Float64, window: Window, placement: Placement) -> float:
    """Peak-to-average ratio of one layer through its new tables, on the heat that the decision saw."""
    layer = slice(changed.layer, changed.layer + 1)
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, layer]
    planned = Placement(changed.phy2log_RS[None], placement.experts)
    return float(par(rank_loads(heat_NLE[:, layer], planned, changed.log2phy_RE[:, None], source_R1E))[0])
