"""Call the solver with the heat, layouts and search parameters of the layers that a decision solves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Int32
from eplb_core.planner.dealing import shares_of_entries, sources_of_tables, width_in_use
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.search_params import search_params_of
from eplb_core.planner.unfitted_layout import unfitted_layers
from eplb_core.solver.engine import LayerBatch, Limits, Nodes, SearchRules, SolverError, solve_many
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.window import shares_of_groups


def solve_layers(
    request: SolveRequest,
    layer_P: npt.NDArray[np.int64],
    floor_L: Float64,
    expert_groups: int,
    move_price: float,
) -> list[LayerResult | SolverError]:
    """Solve the selected layers of a request.

    Each token group is one of the solver's sources. With dealing tables, each entry of the group's table is one source.

    Parameters
    ----------
    request
        Inputs of the decision.
    layer_P
        int64 ``[P]``, indices of the layers to solve.
    floor_L
        float64 ``[L]``, noise floor of each layer's steps.
    expert_groups
        Number of expert groups to keep on nodes; 0 for no groups.
    move_price
        Gain required to move every slot of a layer, as a fraction of its PAR.

    Returns
    -------
    list of LayerResult or SolverError
        One entry per layer in ``layer_P``, in the same order.
    """
    if not layer_P.size:
        return []
    settings = request.settings
    search = request.search
    width = width_in_use(settings, request.log2phy_RLE)
    params = search_params_of(settings, request.placement, width, move_price, search)
    batch = _layer_batch(request, layer_P, floor_L, width)
    episodes = batch.heat_LNE.shape[1]
    rules = SearchRules(params, np.array(search.half_lives) * episodes, settings.min_gain)
    node_R, node_G = request.topology.nodes()
    nodes = Nodes(node_R, np.repeat(node_G, width), expert_groups)
    return solve_many(batch, rules, nodes, Limits(settings.threads, settings.budget_ms))


def _layer_batch(
    request: SolveRequest, layer_P: npt.NDArray[np.int64], floor_L: Float64, width: int
) -> LayerBatch:
    """Return the heat, layouts and recommendations of the layers ``layer_P``.

    ``width`` is the number of entries per expert in the dealing tables.
    """
    window = request.window
    placement = request.placement
    is_deepseek = request.settings.policy == "deepseek"
    if is_deepseek or not request.search.warm:
        unplaced_L = np.ones(window.layers, dtype=np.bool_)
    else:
        unplaced_L = unfitted_layers(request, floor_L)
    heat_PNE = request.episode_heat(layer_P)
    tokens_PE = heat_PNE.sum(axis=1) / window.steps
    if is_deepseek:
        heat_PNE = heat_PNE.sum(axis=1, keepdims=True)
    _, first_G, group_R = request.topology.token_groups()

    def tables_of(index: int) -> Int32:
        tables: Int32 = sources_of_tables(request.log2phy_RLE[first_G, layer_P[index]][:, None], width)[0]
        return tables

    def shares_of(index: int) -> Float64:
        if window.source_RLE is None:
            ranks_G = np.bincount(group_R)
            share_GE = np.repeat((ranks_G / placement.ranks)[:, None], placement.experts, axis=1)
        else:
            share_GE = shares_of_groups(window.source_RLE, layer_P[index], group_R, first_G.size)
        shares: Float64 = shares_of_entries(share_GE[:, None], tokens_PE[index, None], width)[0]
        return shares

    recommendations = request.recommendations
    return LayerBatch(
        heat_PNE,
        placement.phy2log_LRS[layer_P],
        _LazyArrays(tables_of),
        _LazyArrays(shares_of),
        unplaced_L[layer_P],
        [recommendations[layer] for layer in layer_P.tolist()] if recommendations else (),
    )


@dataclass(frozen=True)
class _LazyArrays:
    """Per-layer arrays that are computed only when they are read, which saves memory with many ranks.

    Parameters
    ----------
    make
        Function that returns the array for an index.
    """

    make: Callable[[int], Any]

    def __getitem__(self, index: int) -> Any:
        return self.make(index)
