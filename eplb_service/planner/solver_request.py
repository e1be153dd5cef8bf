"""What the solver is asked: the picked layers' heat, what serves them, how hard to search, what stays on one node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Window
from eplb_service.placement import Float64, Int32, Placement
from eplb_service.planner.blind_layout import blind_layers
from eplb_service.planner.dealing import shares_of_entries, sources_of_tables, width_in_use
from eplb_service.planner.scoring import numbers_of, source_shares
from eplb_service.planner.search_params import search_params_of
from eplb_service.planner.settings import STEP, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.decision import Answer
from eplb_service.solver.engine import SolverError, solve_many
from eplb_service.solver.model import DEALT, SOLVED
from eplb_service.solver.time.evaluation import Curve
from eplb_service.solver.window import sum_episodes

_MOST_STEPS = 128
"""Steps of a window that time is lowered on: as many more won less than 0.2 % in the window after."""


def solve_picked(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    picked: npt.NDArray[np.int64],
    par_L: Float64,
    floor_L: Float64,
    expert_groups: int,
) -> list[Answer | SolverError]:
    """Solve the picked layers; one source for each token group, or for each entry of its dealing tables.

    Parameters
    ----------
    window, placement, log2phy_RLE, topology, settings
        As for ``decide.plan``.
    picked
        int64 ``[P]``, indices of layers.
    par_L, floor_L
        float64 ``[L]``, the ratio per step of each layer as it is served, and what token sampling alone leaves of it.
    expert_groups
        Groups of experts to keep together on nodes, 0 for none.

    Returns
    -------
    list[Answer | SolverError]
        One per picked layer, in their order.
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
    curve = time_curve(settings)
    width = width_in_use(settings, log2phy_RLE)
    node_R, node_G = topology.nodes()
    params = search_params_of(settings, placement, width)
    if curve is not None and params.tables == DEALT:
        # Time is lowered source by source, and each entry of a dealing table is one.
        params = params._replace(tables=SOLVED)
    heat_PNE = episode_heat(window, settings, picked)
    tokens_PE = heat_PNE.sum(axis=1) / window.steps
    if settings.policy == "deepseek":
        heat_PNE = heat_PNE.sum(axis=1, keepdims=True)
    return solve_many(
        heat_PNE,
        placement.phy2log_LRS[picked],
        sources_of_tables(log2phy_RLE[first_G][:, picked], width),
        shares_of_entries(share_GLE, tokens_PE, width),
        params,
        np.array(settings.half_lives) * heat_PNE.shape[1],
        settings.min_gain,
        unplaced(window, placement, settings, par_L, floor_L, picked),
        settings.threads,
        settings.budget_ms,
        node_R,
        np.repeat(node_G, width),
        expert_groups,
        curve,
        None if curve is None else sampled_steps(window, picked).transpose(1, 0, 2),
    )


def episodes_of(window: Window, settings: PlannerSettings) -> int:
    """Episodes that a decision looks at: at most one per step."""
    return min(settings.episodes, window.steps)


def episode_heat(window: Window, settings: PlannerSettings, layer_P: npt.NDArray[np.int64]) -> Float64:
    """Heat of some layers by episode, float64 ``[P, N, E]``.

    Steps are summed; a host that splits each step for itself has single ones, evenly from the first.
    """
    episodes = episodes_of(window, settings)
    if settings.split == STEP:
        steps_N = np.arange(episodes) * window.steps // episodes
        return np.ascontiguousarray(window.heat_TLE[steps_N][:, layer_P].transpose(1, 0, 2), dtype=np.float64)
    return sum_episodes(window.heat_TLE, layer_P, episodes)


def time_curve(settings: PlannerSettings) -> Curve | None:
    """What the solver lowers time by; ``None`` where it balances tokens: no curve is given, or a linear one.

    A host that splits by step balances tokens whatever they cost: placements are made for that, and judged by time.
    """
    curve = settings.cost_curve
    if curve is None or curve.linear or settings.policy != "flashlb" or settings.split == STEP:
        return None
    return numbers_of(curve)


def sampled_steps(window: Window, picked: npt.NDArray[np.int64], most: int = _MOST_STEPS) -> Float64:
    """At most so many single steps of the picked layers, evenly from first to last, float64 ``[N, P, E]``."""
    count = min(most, window.steps)
    steps_N = (np.arange(count) * window.steps + window.steps // 2) // count
    return window.heat_TLE[steps_N][:, picked].astype(np.float64)


def unplaced(
    window: Window,
    placement: Placement,
    settings: PlannerSettings,
    par_L: Float64,
    floor_L: Float64,
    picked: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Which of the picked layers to place from scratch whatever it moves: those made for no heat; bool ``[P]``.

    Parameters
    ----------
    window, placement, settings
        As for ``decide.plan``.
    par_L, floor_L
        float64 ``[L]``, each layer's ratio in the window and its noise floor.
    picked
        int64 ``[P]``, the layers to solve.
    """
    if settings.policy == "deepseek" or not settings.warm:
        return np.ones(picked.size, dtype=np.bool_)
    if not picked.size:
        return np.zeros(0, dtype=np.bool_)
    return blind_layers(
        window, placement, par_L, floor_L, settings.split, grouped=settings.expert_groups is not None
    )[picked]


def groups_on_nodes(settings: PlannerSettings, placement: Placement, topology: Topology) -> tuple[int, str]:
    """Groups of experts to keep together on nodes, 0 for none; and why none, where the settings ask for some.

    On one node every placement keeps them together.
    """
    groups = settings.expert_groups
    ranks_K = np.bincount(topology.nodes()[0])
    if groups is None or ranks_K.size == 1:
        return 0, ""
    if placement.experts % groups:
        return 0, f"{placement.experts} experts do not divide into {groups} groups"
    if groups % ranks_K.size:
        return 0, f"{groups} expert groups do not spread evenly over {ranks_K.size} nodes"
    if (ranks_K != ranks_K[0]).any():
        return 0, f"nodes have from {ranks_K.min()} to {ranks_K.max()} ranks"
    if placement.slots * ranks_K.size > placement.experts:
        return 0, f"a rank has more slots than one of {ranks_K.size} nodes would have experts"
    return groups, ""
