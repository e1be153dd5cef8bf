"""Solver for many layers: several layers in parallel and, if experts are routed in groups, node by node.

Layers are solved on separate threads rather than in a parallel loop inside a kernel. Kernels therefore need no locks, a
failure affects only one layer, and the time budget can be checked between layers. The process can also fork, or plan
for several deployments concurrently.

With expert groups, placement is hierarchical: each group stays on one node, and each node is solved as a layer. If the
router sends each token to only a few groups, the token then reaches only a few nodes. Groups are packed hottest first,
each onto the coolest node that has room, with the same number of groups on every node. Replica counts and placement are
then chosen within each node.

References
----------
DeepSeek EPLB, hierarchical policy, as described in its README, https://github.com/deepseek-ai/EPLB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from eplb_core.solver.candidates import (
    MIN_EPISODES,
    as_deployed,
    from_scratch,
    par_on,
    peaks_on,
    without_vain_annealing,
)
from eplb_core.solver.evaluation import mean_peak
from eplb_core.solver.layer import LayerResult, is_sure, solve_layer
from eplb_core.solver.model import (
    FRESH,
    KEEP,
    Bool,
    Candidate,
    Episodes,
    Float32,
    Float64,
    Int32,
    Layer,
    LayerLayout,
    Recommendation,
    SearchParams,
    episodes_of,
    heat_of,
    homes,
    with_covariance,
)
from eplb_core.solver.topology import match_ranks
from eplb_core.solver.window import halves_of


class ByLayer(Protocol):
    """Per-layer arrays: one array for all layers, or arrays created on demand, which saves memory with many ranks."""

    def __getitem__(self, layer: int, /) -> Any:
        """Return the array of one layer. Must be safe to call from any thread."""


@dataclass(frozen=True)
class LayerBatch:
    """Layers to solve, with their heat and current layouts.

    Parameters
    ----------
    heat_LNE
        float64 ``[L, N, E]``, tokens of each expert by episode, oldest episode first.
    phy2log_LRS
        int32 ``[L, R, S]``, deployed placements.
    log2phy_LGE
        int32 ``[L, G, E]``, deployed tables.
    share_LGE
        float ``[L, G, E]``, fraction of each expert's tokens that comes from each source.
    unplaced_L
        bool ``[L]``, True for layers whose current placement was not based on heat. They are placed from scratch
        regardless of the cost of the moves.
    recommendation_L
        Recommendation for each layer, to be followed without a hold-out; ``None`` for layers without one. Empty if no
        layer has a recommendation.
    """

    heat_LNE: Float64
    phy2log_LRS: Int32
    log2phy_LGE: ByLayer
    share_LGE: ByLayer
    unplaced_L: Bool
    recommendation_L: Sequence[Recommendation | None] = ()


@dataclass(frozen=True)
class SearchRules:
    """Search parameters for all layers, and the criteria for accepting changes.

    Parameters
    ----------
    params
        Search parameters. Their seed is combined with the heat of each layer.
    half_life_H
        float64 ``[H]``, candidate half-lives of the forecast, as for ``layer.solve_layer``.
    min_gain
        Minimum PAR improvement on the window, net of the cost of the moves.
    """

    params: SearchParams
    half_life_H: Float64
    min_gain: float


@dataclass(frozen=True)
class Nodes:
    """Nodes of the ranks and sources.

    Parameters
    ----------
    node_R
        int32 ``[R]``, node of each rank, numbered from 0; ``None`` if there is one node.
    node_G
        int32 ``[G]``, node of each source, -1 if its ranks are on several nodes; ``None`` if there is one node.
    expert_groups
        Number of groups of consecutive experts that each stay on one node; 0 for no groups. All nodes must have the
        same number of ranks. The number of nodes must divide the number of groups, which must divide the number of
        experts.
    """

    node_R: Int32 | None = None
    node_G: Int32 | None = None
    expert_groups: int = 0


@dataclass(frozen=True)
class Limits:
    """Limits on the computing resources of one call.

    Parameters
    ----------
    threads
        Number of layers to solve concurrently; at most one per CPU, which is also the default (``None``).
    budget_ms
        Time budget in milliseconds; ``None`` for no limit. Once it has run out, no further layers are started.
    """

    threads: int | None = None
    budget_ms: float | None = None


ONE_NODE = Nodes()
"""All ranks on one node, without expert groups."""
NO_LIMITS = Limits()
"""One thread per CPU and no time budget."""


class SolverError(RuntimeError):
    """A layer could not be solved."""


class OutOfTimeError(SolverError):
    """The time budget ran out before the layer was started."""


class _NodeLayer(NamedTuple):
    """One node treated as a layer, with its own numbering of experts and ranks."""

    expert_X: npt.NDArray[np.intp]
    """The node's experts, numbered as in the whole layer, in ascending order."""
    rank_Y: npt.NDArray[np.intp]
    """The node's ranks, numbered as in the whole layer, in ascending order."""
    layout: LayerLayout
    """Current layout in the node's numbering."""


def solve_many(
    batch: LayerBatch,
    rules: SearchRules,
    nodes: Nodes = ONE_NODE,
    limits: Limits = NO_LIMITS,
) -> list[LayerResult | SolverError]:
    """Solve all layers of a batch, in order.

    If there is no time budget, the results do not depend on the number of threads.

    Parameters
    ----------
    batch
        Layers to solve.
    rules
        Search parameters, and the criteria for accepting changes.
    nodes
        Nodes of the ranks and sources, and the expert groups.
    limits
        Number of threads and time budget.

    Returns
    -------
    list of LayerResult or SolverError
        One entry per layer: its result, an ``OutOfTimeError`` if the budget ran out before it was started, or a
        different ``SolverError`` if solving it failed.
    """
    budget_ms = limits.budget_ms
    deadline = np.inf if budget_ms is None else time.monotonic() + budget_ms / 1e3
    heat_LNE = np.ascontiguousarray(batch.heat_LNE, dtype=np.float64)

    def solve(layer: int) -> LayerResult | SolverError:
        if time.monotonic() >= deadline:
            return OutOfTimeError(
                f"the time budget (budget_ms) of {budget_ms:g} ms ran out before this layer was started"
            )
        heat_NE = heat_LNE[layer]
        # Each layer has its own seed, so its random numbers do not depend on the other layers in the batch.
        params = rules.params._replace(seed=rules.params.seed + crc32(heat_NE.sum(axis=0)))
        layout = _layout_of(batch, layer, nodes)
        unplaced = bool(batch.unplaced_L[layer])
        try:
            arguments = heat_NE, layout, params, rules.half_life_H, rules.min_gain, unplaced
            if nodes.expert_groups:
                return _solve_by_node(*arguments, nodes.expert_groups)
            return solve_layer(*arguments, batch.recommendation_L[layer] if batch.recommendation_L else None)
        except Exception as error:  # a failure in one layer must not affect the other layers
            return SolverError(f"{type(error).__name__}: {error}")

    layers = range(heat_LNE.shape[0])
    with _layer_map(limits.threads, len(layers)) as run:
        return list(run(solve, layers))


def _layout_of(batch: LayerBatch, layer: int, nodes: Nodes) -> LayerLayout:
    """Return the current layout of one layer as contiguous arrays of the types that kernels expect."""
    phy2log_RS = np.array(batch.phy2log_LRS[layer], dtype=np.int32, order="C")
    log2phy_GE = np.array(batch.log2phy_LGE[layer], dtype=np.int32, order="C")
    share_GE = np.array(batch.share_LGE[layer], dtype=np.float32, order="C")
    node_R = np.zeros(len(phy2log_RS), dtype=np.int32) if nodes.node_R is None else nodes.node_R
    node_G = np.zeros(len(log2phy_GE), dtype=np.int32) if nodes.node_G is None else nodes.node_G
    home_ER = homes(phy2log_RS, batch.heat_LNE.shape[2])
    return LayerLayout(phy2log_RS, log2phy_GE, share_GE, home_ER, node_R, node_G)


@contextmanager
def _layer_map(threads: int | None, layers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Provide a ``map`` over layers that uses up to ``threads`` threads, at most one per CPU or layer."""
    cpus = os.cpu_count() or 1
    workers = min(threads or cpus, cpus, layers)
    if workers <= 1:
        yield map
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="eplb-solver") as pool:
        yield pool.map


def _solve_by_node(
    heat_NE: Float64,
    deployed: LayerLayout,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
    groups: int,
) -> LayerResult:
    """Decide what to do with one layer whose ``groups`` of consecutive experts each stay on one node.

    If the layout is already grouped (see ``_nodes_of_groups``), the groups usually stay on their nodes, and experts
    move only within nodes. The groups are repacked if the gain exceeds the cost of the moves between nodes. If the
    layout is not grouped or was not based on heat, the layer is placed from scratch. The parameters are described in
    ``layer.solve_layer``.
    """
    window = episodes_of(heat_NE, deployed.phy2log_RS.shape[0])
    current = as_deployed(window, deployed, params.tables)
    slot_price = params.slot_price(deployed.phy2log_RS)
    node_E = _nodes_of_groups(deployed, groups)
    default_half_life = float(half_life_H[0])
    if unplaced or node_E is None:
        fresh = _place_by_node(window, deployed, params, slot_price, groups)
        return LayerResult(fresh, current.par, default_half_life, FRESH)
    nodes = _node_layers(node_E, deployed)
    # Keep the price per slot the same within a node as in the whole layer.
    node_params = params._replace(move_price=params.move_price / len(nodes))
    changes = []
    for node in nodes:
        heat_NX = heat_NE.take(node.expert_X, axis=1)
        result = solve_layer(heat_NX, node.layout, node_params, half_life_H, min_gain, False)
        if result.taken != KEEP:
            changes.append((node, result))
    price = params.slot_price(deployed.phy2log_RS, current.par)
    layer = Layer(with_covariance(*window), deployed)
    best, changes = _without_vain_changes(changes, layer, params, price)
    half_life = min((result.half_life for _, result in changes), default=default_half_life)
    action = max((result.taken for _, result in changes), default=KEEP)
    if best.par + price * best.moves >= current.par - min_gain:
        best = current
        action = KEEP
    limit = best.par + price * best.moves - min_gain
    if _may_regroup(window, deployed, params, price, min_gain, groups, node_E):
        regrouped = _place_by_node(window, deployed, params, price, groups)
        if regrouped.par + price * regrouped.moves < limit:
            best = regrouped
            action = FRESH
    return LayerResult(best, current.par, half_life, action)


def _place_by_node(
    heat: Episodes, deployed: LayerLayout, params: SearchParams, slot_price: float, groups: int
) -> Candidate:
    """Repack the groups onto nodes and place each node from scratch."""
    layer = Layer(with_covariance(*heat), deployed)
    placed = []
    for node in _node_layers(_pack_groups(layer.heat.mean_E, deployed, groups), deployed):
        heat_NX = np.ascontiguousarray(heat.scaled_EN[node.expert_X].T, dtype=np.float64)
        node_layer = Layer(heat_of(heat_NX, node.rank_Y.size), node.layout)
        node_params = without_vain_annealing(node_layer.heat.episodes, node.layout, params)
        placed.append((node, from_scratch(node_layer, node_params, slot_price)))
    return _combine_nodes(placed, layer, params)


def _may_regroup(
    heat: Episodes,
    deployed: LayerLayout,
    params: SearchParams,
    price: float,
    min_gain: float,
    groups: int,
    node_E: Int32,
) -> bool:
    """Return True if repacking the groups, fitted to the older half, pays off on the newer half.

    Moves within nodes cannot help a node whose groups have become hotter than the groups of other nodes. With too few
    episodes for a hold-out, the result is True.

    Parameters
    ----------
    heat
        Heat of the layer by episode.
    deployed
        Current layout.
    params
        Search parameters.
    price
        Minimum PAR improvement per moved slot.
    min_gain
        Minimum PAR improvement, net of the cost of the moves.
    groups
        Number of expert groups.
    node_E
        int32 ``[E]``, current node of each expert.
    """
    if heat.share_N.size < MIN_EPISODES:
        return True
    older, newer = halves_of(heat)
    packed_E = _pack_groups(older.scaled_EN @ older.share_N, deployed, groups)
    if np.array_equal(node_E, packed_E):
        return False
    regrouped = _place_by_node(older, deployed, params, price, groups)
    current = as_deployed(newer, deployed, params.tables)
    current_N = peaks_on(current, newer.scaled_EN, deployed, params.tables)
    regrouped_N = peaks_on(regrouped, newer.scaled_EN, deployed, params.tables)
    spent = price * regrouped.moves
    gain = mean_peak(current_N, newer.share_N) - mean_peak(regrouped_N, newer.share_N)
    sure = is_sure(current_N - regrouped_N, newer.share_N, spent, params.options.sureness)
    return gain - spent > min_gain and sure


def _pack_groups(mean_E: Float32, deployed: LayerLayout, groups: int) -> Int32:
    """Assign the expert groups to nodes so that all nodes are about equally hot and have the same number of groups.

    The packing itself treats nodes as interchangeable. Each bundle of groups then goes to the node that already holds
    most of its experts.

    Parameters
    ----------
    mean_E
        float32 ``[E]``, mean heat of each expert.
    deployed
        Current layout.
    groups
        Number of expert groups.

    Returns
    -------
    Int32
        int32 ``[E]``, node of each expert.
    """
    nodes = int(deployed.node_R.max()) + 1
    heat_Q = mean_E.reshape(groups, -1).sum(axis=1)
    bundles: list[list[int]] = [[] for _ in range(nodes)]
    for group in np.argsort(-heat_Q, kind="stable").tolist():
        roomy = [bundle for bundle in bundles if len(bundle) < groups // nodes]
        min(roomy, key=lambda bundle: heat_Q[bundle].sum()).append(group)
    expert_QX = np.arange(mean_E.size, dtype=np.int32).reshape(groups, -1)
    packed_KX = np.stack([expert_QX[sorted(bundle)].ravel() for bundle in bundles])
    deployed_KP = np.stack([deployed.phy2log_RS[deployed.node_R == node].ravel() for node in range(nodes)])
    matched_KX = match_ranks(packed_KX, deployed_KP, mean_E.size, np.zeros(nodes, dtype=np.int32))
    node_E = np.empty(mean_E.size, dtype=np.int32)
    node_E[matched_KX] = np.arange(nodes, dtype=np.int32)[:, None]
    return node_E


def _nodes_of_groups(deployed: LayerLayout, groups: int) -> Int32 | None:
    """Return the node of each expert, int32 ``[E]``, or ``None`` if the layout is not grouped.

    A layout is grouped if each expert group is on one node and all nodes have the same number of groups.
    """
    experts = deployed.share_GE.shape[1]
    nodes = int(deployed.node_R.max()) + 1
    on_KE = np.zeros((nodes, experts), dtype=np.bool_)
    on_KE[deployed.node_R[:, None], deployed.phy2log_RS] = True
    node_E = on_KE.argmax(axis=0).astype(np.int32)
    node_QX = node_E.reshape(groups, -1)
    on_one_node = (on_KE.sum(axis=0) == 1).all() and (node_QX == node_QX[:, :1]).all()
    even = (np.bincount(node_QX[:, 0], minlength=nodes) == groups // nodes).all()
    return node_E if on_one_node and even else None


def _node_layers(node_E: Int32, deployed: LayerLayout) -> list[_NodeLayer]:
    """Split a layer into one layer per node; ``node_E``, int32 ``[E]``, is the node of each expert.

    If an expert is assigned to a different node than its current one, the node layouts contain placeholders. A slot
    whose expert belongs to a different node gets an expert that its rank does not hold, and a table entry that points
    to a different node becomes slot 0. This is harmless, because such nodes are only placed from scratch, and the
    placeholders do not affect that.
    """
    slots = deployed.phy2log_RS.shape[1]
    layers = []
    for node in range(int(node_E.max()) + 1):
        expert_X = np.flatnonzero(node_E == node)
        rank_Y = np.flatnonzero(deployed.node_R == node)
        local_E = np.full(node_E.size, -1, dtype=np.int32)
        local_E[expert_X] = np.arange(expert_X.size)
        phy2log_YS = local_E[deployed.phy2log_RS[rank_Y]]
        for row_S in phy2log_YS:
            missing = np.setdiff1d(np.arange(expert_X.size), row_S)
            row_S[row_S < 0] = missing[: (row_S < 0).sum()]
        local_R = np.full(deployed.node_R.size, -1, dtype=np.int32)
        local_R[rank_Y] = np.arange(rank_Y.size)
        slot_GX = deployed.log2phy_GE[:, expert_X]
        log2phy_GX = local_R[slot_GX // slots] * slots + slot_GX % slots
        layout = LayerLayout(
            phy2log_YS,
            np.ascontiguousarray(np.maximum(log2phy_GX, 0), dtype=np.int32),
            np.ascontiguousarray(deployed.share_GE[:, expert_X]),
            homes(phy2log_YS, expert_X.size),
            np.zeros(rank_Y.size, dtype=np.int32),
            np.zeros_like(deployed.node_G),
        )
        layers.append(_NodeLayer(expert_X, rank_Y, layout))
    return layers


def _without_vain_changes(
    changes: list[tuple[_NodeLayer, LayerResult]], layer: Layer, params: SearchParams, price: float
) -> tuple[Candidate, list[tuple[_NodeLayer, LayerResult]]]:
    """Combine the nodes' changes, but drop those that gain nothing because a different node is hotter.

    Returns the combined candidate and the remaining changes.
    """

    def combine(remaining: list[tuple[_NodeLayer, LayerResult]]) -> Candidate:
        return _combine_nodes([(node, result.candidate) for node, result in remaining], layer, params)

    best = combine(changes)
    for change in list(changes):
        remaining = [entry for entry in changes if entry is not change]
        candidate = combine(remaining)
        if candidate.par + price * candidate.moves <= best.par + price * best.moves:
            best = candidate
            changes = remaining
    return best, changes


def _combine_nodes(
    candidates: Sequence[tuple[_NodeLayer, Candidate]], layer: Layer, params: SearchParams
) -> Candidate:
    """Return the deployed layout with each candidate's placement and tables applied to its node."""
    deployed = layer.deployed
    slots = deployed.phy2log_RS.shape[1]
    phy2log_RS = deployed.phy2log_RS.copy()
    log2phy_GE = deployed.log2phy_GE.copy()
    for node, candidate in candidates:
        phy2log_RS[node.rank_Y] = node.expert_X[candidate.phy2log_RS]
        rank_GX = node.rank_Y[candidate.log2phy_GE // slots]
        log2phy_GE[:, node.expert_X] = rank_GX * slots + candidate.log2phy_GE % slots
    moves = int(np.count_nonzero(phy2log_RS != deployed.phy2log_RS))
    combined = Candidate(phy2log_RS, log2phy_GE, 0.0, moves)
    return combined._replace(par=par_on(combined, layer.heat.episodes, deployed, params.tables))
