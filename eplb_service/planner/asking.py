"""Puts a decision's question to the solver: the picked layers' heat, what serves them, and how hard to search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Window
from eplb_service.placement import Int32, Placement
from eplb_service.planner.effort import search_for
from eplb_service.planner.scoring import Float64, source_shares
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import SolverError, solve_many


def ask(
    window: Window,
    heat_NLE: Float64,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    picked: npt.NDArray[np.int64],
    expert_groups: int,
) -> list[Answer | SolverError]:
    """Answers for the picked layers, in their order; one source for each token group.

    ``expert_groups``: groups of experts to keep together on nodes, 0 for none.
    """
    _, first_G, group_R = topology.token_groups()
    share_GLE = np.full((first_G.size, len(picked), placement.experts), 1.0 / first_G.size)
    if window.source_RLE is not None:
        # Sliced first: the split of layers that nobody looks into costs nothing.
        shares_RLE = source_shares(
            window.source_RLE[:, picked], placement.ranks, len(picked), placement.experts
        )
        share_GLE[:] = 0.0
        np.add.at(share_GLE, group_R, shares_RLE)
    elif first_G.size < placement.ranks:
        share_GLE[:] = (np.bincount(group_R) / placement.ranks)[:, None, None]
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
        unplaced(placement, settings)[picked],
        settings.threads,
        settings.budget_ms,
        *topology.nodes(),
        expert_groups,
    )


def unplaced(placement: Placement, settings: PlannerSettings) -> npt.NDArray[np.bool_]:
    """Layers to place anew whatever it moves: those in the engines' first layout, made for no heat at all."""
    if settings.policy == "deepseek" or not settings.warm:
        return np.ones(placement.layers, dtype=np.bool_)
    first = Placement.linear(1, placement.experts, placement.ranks, placement.slots).phy2log_LRS
    untouched_L: npt.NDArray[np.bool_] = (placement.phy2log_LRS == first).all(axis=(1, 2))
    return untouched_L
