"""Inputs of a decision: heat, current layout, topology and settings, validated for consistency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import HeatError, Window, widened
from eplb_core.placement import Float64, Int32, Placement
from eplb_core.planner.episodes import similar_steps_together
from eplb_core.planner.settings import STEP, PlannerSettings
from eplb_core.planner.topology import Topology, TopologyError
from eplb_core.solver.model import Recommendation, SearchOptions
from eplb_core.solver.window import sum_episodes


@dataclass(frozen=True)
class SolveRequest:
    """Inputs of one decision.

    Parameters
    ----------
    window
        Heat on which the decision is based.
    placement
        Current placement.
    log2phy_RLE
        int32 ``[R, L, E]``, current table of each source rank; ``[R, L, E, D]`` for dealing tables.
    topology
        Nodes and token groups of the ranks.
    settings
        Planner settings.
    search
        Search options, which can disable components of the method.
    recommendations
        Recommendation for each layer from the previous decision; empty if there are none.

    Raises
    ------
    HeatError, PlacementError, TopologyError
        If the inputs contradict each other, or if the window has no steps.
    """

    window: Window
    placement: Placement
    log2phy_RLE: Int32
    topology: Topology
    settings: PlannerSettings
    search: SearchOptions
    recommendations: Sequence[Recommendation | None] = ()

    def __post_init__(self) -> None:
        window = self.window
        placement = self.placement
        if (window.layers, window.experts) != (placement.layers, placement.experts):
            raise HeatError(
                f"heat of {window.layers} layers x {window.experts} experts does not match a placement of "
                f"{placement.layers} x {placement.experts}"
            )
        placement.check_log2phy(self.log2phy_RLE)
        if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
            raise HeatError(
                f"source heat of {window.source_RLE.shape[0]} ranks does not match a placement on {placement.ranks} "
                "ranks"
            )
        if self.topology.ranks != placement.ranks:
            raise TopologyError(
                f"a topology of {self.topology.ranks} ranks does not match a placement on {placement.ranks} ranks"
            )
        if window.steps == 0:
            raise HeatError("the window has no steps")

    @property
    def episodes(self) -> int:
        """Number of episodes, at most one per step."""
        return min(self.search.episodes, self.window.steps)

    @cached_property
    def order(self) -> npt.NDArray[np.int64] | None:
        """Order in which steps are summed into episodes, int64 ``[T]``; ``None`` for chronological order."""
        if self.settings.split == STEP:
            return None
        return similar_steps_together(self.window.heat_TLE, self.episodes)

    def episode_heat(self, layer_P: npt.NDArray[np.int64]) -> Float64:
        """Return the heat of the layers ``layer_P`` in each episode, float64 ``[P, N, E]``.

        Each episode is the sum of several steps, in the order given by ``order``. If the host splits by step, each
        episode is a single step instead. These steps are evenly spaced, starting with the first.
        """
        heat_TLE = self.window.heat_TLE
        if self.settings.split == STEP:
            step_N = np.arange(self.episodes) * self.window.steps // self.episodes
            return np.ascontiguousarray(heat_TLE[step_N][:, layer_P].transpose(1, 0, 2), dtype=np.float64)
        if self.order is None:
            return sum_episodes(heat_TLE, layer_P, self.episodes)
        ordered_TPE = widened(heat_TLE[:, layer_P][self.order])
        return sum_episodes(ordered_TPE, np.arange(layer_P.size), self.episodes)


def with_options(
    settings: PlannerSettings, options: Mapping[str, Any]
) -> tuple[PlannerSettings, SearchOptions]:
    """Apply options by name; each name is a field of ``PlannerSettings`` or ``SearchOptions``.

    Examples
    --------
    >>> settings, search = with_options(PlannerSettings(), {"move_price": 0.0, "annealing": False})
    >>> settings.move_price, search.annealing
    (0.0, False)
    """
    search_names = {field.name for field in fields(SearchOptions)}
    search_options = {name: value for name, value in options.items() if name in search_names}
    planner_options = {name: value for name, value in options.items() if name not in search_names}
    return replace(settings, **planner_options), SearchOptions(**search_options)


def groups_on_nodes(settings: PlannerSettings, placement: Placement, topology: Topology) -> tuple[int, str]:
    """Return the number of expert groups to keep on nodes, and the reason if this is not possible.

    The number is 0 if the settings do not request groups, if the groups cannot be kept on nodes, or if there is only
    one node, on which every placement keeps them. The reason is empty unless groups were requested and cannot be
    kept on nodes.

    Examples
    --------
    With two nodes of two ranks each, four groups can be kept on nodes, but three do not spread evenly over them:

    >>> topology = Topology(nodes_R=np.array([0, 0, 1, 1]), token_groups_R=np.arange(4))
    >>> placement = Placement.linear(layers=1, experts=12, ranks=4, slots=4)
    >>> groups_on_nodes(PlannerSettings(expert_groups=4), placement, topology)
    (4, '')
    >>> groups_on_nodes(PlannerSettings(expert_groups=3), placement, topology)
    (0, '12 experts in 3 groups cannot be spread evenly over 2 nodes (ranks per node: 2, slots per rank: 4)')
    """
    groups = settings.expert_groups
    ranks_K = np.bincount(topology.nodes()[0])
    experts = placement.experts
    if groups is None or ranks_K.size == 1:
        return 0, ""
    nodes_are_equal = bool((ranks_K == ranks_K[0]).all())
    groups_are_equal = experts % groups == 0 and groups % ranks_K.size == 0
    if groups_are_equal and nodes_are_equal and placement.slots * ranks_K.size <= experts:
        return groups, ""
    ranks_text = f"{ranks_K[0]}" if nodes_are_equal else f"{ranks_K.min()} to {ranks_K.max()}"
    return 0, (
        f"{experts} experts in {groups} groups cannot be spread evenly over {ranks_K.size} nodes "
        f"(ranks per node: {ranks_text}, slots per rank: {placement.slots})"
    )
