"""Runs the layer solver over many layers, several at a time, and where experts come in groups node by node.

Layers are handed to threads, not to a parallel loop inside a kernel: kernels hold no lock, a layer that fails
spoils no other, the clock can be read between layers, and a process may fork or plan for several deployments at
once without harm.

With groups, placement is hierarchical: groups of experts stay together on a node, and each node is then a layer of
its own. Tokens that a router sends to few groups then cross to few nodes. Groups are packed onto nodes in equal
numbers, hottest first, each onto the coolest node with room; replicas are handed out, placed and improved within the
node.

References
----------
The hierarchical policy of DeepSeek's EPLB, as its README describes it, https://github.com/deepseek-ai/EPLB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol
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
from eplb_core.solver.time_layer import solve_layer_for_time
from eplb_core.solver.topology import match_ranks
from eplb_core.solver.window import halves_of

_Node = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], LayerLayout]
"""One node as a layer of its own: the numbers of its experts and of its ranks in the whole layer, ascending, and what
serves now in the node's numbers."""


class ByLayer(Protocol):
    """Arrays by layer: one array of all, or made when they are asked for, since those of many ranks are large."""

    def __getitem__(self, layer: int, /) -> Any:
        """Return the layer's; it may be asked for on any thread."""


class SolverError(RuntimeError):
    """Failure of one layer; the message is what the solver reported."""


class OutOfTimeError(SolverError):
    """A layer whose turn had not come when the budget was spent."""


def solve_many(
    heat_LNE: Float64,
    deployed_LRS: Int32,
    deployed_LGE: ByLayer,
    share_LGE: ByLayer,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced_L: Bool,
    threads: int | None = None,
    budget_ms: float | None = None,
    node_R: Int32 | None = None,
    node_G: Int32 | None = None,
    expert_groups: int = 0,
    curve_4: Float64 | None = None,
    steps_LNE: Float64 | None = None,
    recommendation_L: Sequence[Recommendation | None] = (),
) -> list[LayerResult | SolverError]:
    """Solve all layers; without a budget the answers do not depend on ``threads`` (``None``: one per CPU).

    Parameters
    ----------
    heat_LNE
        float64 ``[L, N, E]``, tokens of each expert by episode.
    deployed_LRS, deployed_LGE, share_LGE
        Deployed int32 ``[L, R, S]`` placements, int32 ``[L, G, E]`` tables and float ``[L, G, E]`` the part of
        each expert's tokens that each source group has.
    params, half_life_H, min_gain
        As for ``layer.solve_layer``, with one seed for all layers.
    unplaced_L
        bool ``[L]``, which layers are placed from scratch whatever it moves.
    threads
        Layers solved at a time.
    budget_ms
        Layers begin in the order given until it is spent.
    node_R, node_G
        int32, as in ``model.LayerLayout``; one node where they are not given.
    expert_groups
        So many groups of neighbouring experts each stay on one node; 0 for none. The nodes have equally many ranks, and
        their number divides the groups, which divide the experts.
    curve_4, steps_LNE
        With both, the slowest rank's time by a cost curve (see ``time_costs``) is lowered on single steps, float64
        ``[L, N', E]``; groups are not kept together then.
    recommendation_L
        What each layer is to follow, as for ``layer.solve_layer``; by default nothing.

    Returns
    -------
    list of Answer or SolverError
        One for each layer: ``OutOfTimeError`` where the budget was spent, another ``SolverError`` where it failed.
    """
    deadline = np.inf if budget_ms is None else time.monotonic() + budget_ms / 1e3
    heat_LNE = np.ascontiguousarray(heat_LNE, dtype=np.float64)
    deployed = _deployed_by_layer(deployed_LRS, deployed_LGE, share_LGE, heat_LNE.shape[2], node_R, node_G)

    def solve(layer: int) -> LayerResult | SolverError:
        if time.monotonic() >= deadline:
            return OutOfTimeError(f"the budget of {budget_ms:g} ms was spent")
        # No two layers draw alike, and what one draws does not depend on which others are looked into.
        mine = params._replace(seed=params.seed + crc32(heat_LNE[layer].sum(axis=0)))
        place, unplaced = deployed(layer), bool(unplaced_L[layer])
        asked = heat_LNE[layer], place, mine, half_life_H, min_gain, unplaced
        try:
            if curve_4 is not None and steps_LNE is not None:
                steps_NE = np.ascontiguousarray(steps_LNE[layer], dtype=np.float64)
                return solve_layer_for_time(
                    heat_LNE[layer], steps_NE, place, mine, curve_4, min_gain, unplaced, half_life_H
                )
            if expert_groups:
                return _solve_by_node(*asked, expert_groups)
            return solve_layer(*asked, recommendation_L[layer] if recommendation_L else None)
        except Exception as error:  # one layer's failure must not spoil the others
            return SolverError(f"{type(error).__name__}: {error}")

    layers = range(heat_LNE.shape[0])
    with _several(threads, len(layers)) as run:
        return list(run(solve, layers))


def _deployed_by_layer(
    deployed_LRS: Int32,
    deployed_LGE: ByLayer,
    share_LGE: ByLayer,
    experts: int,
    node_R: Int32 | None,
    node_G: Int32 | None,
) -> Callable[[int], LayerLayout]:
    """Deployed placement and tables of each layer, as kernels take them."""

    def deployed(layer: int) -> LayerLayout:
        phy2log_RS, log2phy_GE = (
            np.array(of_L[layer], dtype=np.int32, order="C") for of_L in (deployed_LRS, deployed_LGE)
        )
        share_GE = np.array(share_LGE[layer], dtype=np.float32, order="C")
        nodes = (
            np.zeros(count, dtype=np.int32) if node_X is None else node_X
            for count, node_X in ((len(phy2log_RS), node_R), (len(log2phy_GE), node_G))
        )
        return LayerLayout(phy2log_RS, log2phy_GE, share_GE, homes(phy2log_RS, experts), *nodes)

    return deployed


@contextmanager
def _several(threads: int | None, layers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A ``map`` that does as many layers at a time as wanted, at most one per CPU."""
    cpus = os.cpu_count() or 1
    wanted = min(threads or cpus, cpus, layers)
    if wanted <= 1:
        yield map
        return
    with ThreadPoolExecutor(wanted, thread_name_prefix="eplb-solver") as pool:
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
    """Decide one layer whose ``groups`` of neighbouring experts each stay on one node.

    A layer whose groups are placed so already mostly keeps them there: weights move within nodes. The groups are
    packed again if that pays for the moves between nodes. Any other layer is placed from scratch.
    """
    whole = episodes_of(heat_NE, deployed.phy2log_RS.shape[0])
    now = as_deployed(whole, deployed, params.tables)
    slot_price = params.slot_price(deployed.phy2log_RS)
    node_E = _nodes_of_groups(deployed, groups)
    if unplaced or node_E is None:
        return LayerResult(
            _placed_by_node(whole, deployed, params, slot_price, groups),
            now.par,
            float(half_life_H[0]),
            FRESH,
        )
    nodes = _node_layers(node_E, deployed)
    # A slot costs the same, whichever node it is on.
    in_node = params._replace(move_price=params.move_price / len(nodes))
    decided = [
        (node, solve_layer(heat_NE.take(node[0], axis=1), node[2], in_node, half_life_H, min_gain, False))
        for node in nodes
    ]
    price = params.slot_price(deployed.phy2log_RS, now.par)
    changed = [(node, answer) for node, answer in decided if answer.taken != KEEP]
    seen = Layer(with_covariance(*whole), deployed)
    best, taken = _without_vain_changes(changed, seen, params, price)
    half_life = min((answer.half_life for _, answer in taken), default=float(half_life_H[0]))
    action = max((answer.taken for _, answer in taken), default=KEEP)
    if best.par + price * best.moves >= now.par - min_gain:
        best, action = now, KEEP
    limit = best.par + price * best.moves - min_gain
    if _may_regroup(whole, deployed, params, price, min_gain, groups, node_E):
        regrouped = _placed_by_node(whole, deployed, params, price, groups)
        if regrouped.par + price * regrouped.moves < limit:
            best, action = regrouped, FRESH
    return LayerResult(best, now.par, half_life, action)


def _placed_by_node(
    heat: Episodes, deployed: LayerLayout, params: SearchParams, slot_price: float, groups: int
) -> Candidate:
    """Pack the groups onto nodes again, and place each node from scratch."""
    whole = Layer(with_covariance(*heat), deployed)
    made = []
    for node in _node_layers(_pack_groups(whole.heat.mean_E, deployed, groups), deployed):
        expert_X, rank_Y, of_node = node
        heat_NX = np.ascontiguousarray(heat.scaled_EN[expert_X].T, dtype=np.float64)
        alone = Layer(heat_of(heat_NX, rank_Y.size), of_node)
        annealed = without_vain_annealing(alone.heat.episodes, alone.deployed, params)
        made.append((node, from_scratch(alone, annealed, slot_price)))
    return _put_together(made, whole, params)


def _may_regroup(
    heat: Episodes,
    deployed: LayerLayout,
    params: SearchParams,
    price: float,
    min_gain: float,
    groups: int,
    node_E: Int32,
) -> bool:
    """Return True if other groups on the nodes, fitted to the older half, pay for their moves on the newer half.

    Moves within nodes cannot cool a node whose groups have become hotter than the others'. ``node_E`` int32 ``[E]`` is
    each expert's node now.
    """
    if heat.share_N.size < MIN_EPISODES:
        return True
    older, newer = halves_of(heat)
    packed_E = _pack_groups(older.scaled_EN @ older.share_N, deployed, groups)
    if np.array_equal(node_E, packed_E):
        return False
    found = _placed_by_node(older, deployed, params, price, groups)
    now_N, found_N = (
        peaks_on(one, newer.scaled_EN, deployed, params.tables)
        for one in (as_deployed(newer, deployed, params.tables), found)
    )
    spent = price * found.moves
    gain = mean_peak(now_N, newer.share_N) - mean_peak(found_N, newer.share_N)
    return gain - spent > min_gain and is_sure(now_N - found_N, newer.share_N, spent, params.options.sureness)


def _pack_groups(mean_E: Float32, deployed: LayerLayout, groups: int) -> Int32:
    """Node of each expert, int32 ``[E]``: equally many groups on each node, each node as hot as the next.

    ``mean_E`` is each expert's heat. Which node gets which groups is free; those that hold most of them get them.
    """
    nodes = int(deployed.node_R.max()) + 1
    heat_Q = mean_E.reshape(groups, -1).sum(axis=1)
    held: list[list[int]] = [[] for _ in range(nodes)]
    for group in np.argsort(-heat_Q, kind="stable").tolist():
        roomy = [node for node in held if len(node) < groups // nodes]
        min(roomy, key=lambda node: heat_Q[node].sum()).append(group)
    expert_QX = np.arange(mean_E.size, dtype=np.int32).reshape(groups, -1)
    packed_KX = np.stack([expert_QX[sorted(node)].ravel() for node in held])
    there_KP = np.stack([deployed.phy2log_RS[deployed.node_R == node].ravel() for node in range(nodes)])
    dealt_KX = match_ranks(packed_KX, there_KP, mean_E.size, np.zeros(nodes, dtype=np.int32))
    node_E = np.empty(mean_E.size, dtype=np.int32)
    node_E[dealt_KX] = np.arange(nodes, dtype=np.int32)[:, None]
    return node_E


def _nodes_of_groups(deployed: LayerLayout, groups: int) -> Int32 | None:
    """Node of each expert, int32 ``[E]``, where each group is on one node and each node has as many; else none."""
    experts = deployed.share_GE.shape[1]
    nodes = int(deployed.node_R.max()) + 1
    on_KE = np.zeros((nodes, experts), dtype=np.bool_)
    on_KE[deployed.node_R[:, None], deployed.phy2log_RS] = True
    node_E = on_KE.argmax(axis=0).astype(np.int32)
    node_QX = node_E.reshape(groups, -1)
    together = (on_KE.sum(axis=0) == 1).all() and (node_QX == node_QX[:, :1]).all()
    alike = (np.bincount(node_QX[:, 0], minlength=nodes) == groups // nodes).all()
    return node_E if together and alike else None


def _node_layers(node_E: Int32, deployed: LayerLayout) -> list[_Node]:
    """Nodes as layers of their own, where expert ``e`` belongs to the node ``node_E[e]``.

    A slot that holds another node's expert now counts as holding one of its own that its rank lacks; a table entry
    that leads to another node leads to slot 0. Neither matters to a placement from scratch, all that can be asked then.
    """
    slots = deployed.phy2log_RS.shape[1]
    layers = []
    for node in range(int(node_E.max()) + 1):
        expert_X, rank_Y = np.flatnonzero(node_E == node), np.flatnonzero(deployed.node_R == node)
        local_E = np.full(node_E.size, -1, dtype=np.int32)
        local_E[expert_X] = np.arange(expert_X.size)
        phy2log_YS = local_E[deployed.phy2log_RS[rank_Y]]
        for row_S in phy2log_YS:
            lacking = np.setdiff1d(np.arange(expert_X.size), row_S)
            row_S[row_S < 0] = lacking[: (row_S < 0).sum()]
        local_R = np.full(deployed.node_R.size, -1, dtype=np.int32)
        local_R[rank_Y] = np.arange(rank_Y.size)
        slot_GX = deployed.log2phy_GE[:, expert_X]
        log2phy_GX = local_R[slot_GX // slots] * slots + slot_GX % slots
        alone = LayerLayout(
            phy2log_YS,
            np.ascontiguousarray(np.maximum(log2phy_GX, 0), dtype=np.int32),
            np.ascontiguousarray(deployed.share_GE[:, expert_X]),
            homes(phy2log_YS, expert_X.size),
            np.zeros(rank_Y.size, dtype=np.int32),
            np.zeros_like(deployed.node_G),
        )
        layers.append((expert_X, rank_Y, alone))
    return layers


def _without_vain_changes(
    changed: list[tuple[_Node, LayerResult]], layer: Layer, params: SearchParams, price: float
) -> tuple[Candidate, list[tuple[_Node, LayerResult]]]:
    """Put the changed nodes together, less those that are cooled in vain because another node is the hottest."""

    def together(chosen: list[tuple[_Node, LayerResult]]) -> Candidate:
        return _put_together([(node, answer.found) for node, answer in chosen], layer, params)

    best = together(changed)
    for one in list(changed):
        others = [other for other in changed if other is not one]
        without = together(others)
        if without.par + price * without.moves <= best.par + price * best.moves:
            best, changed = without, others
    return best, changed


def _put_together(nodes: Sequence[tuple[_Node, Candidate]], layer: Layer, params: SearchParams) -> Candidate:
    """Return what is deployed with some nodes' placement and tables in place of their own."""
    deployed = layer.deployed
    slots = deployed.phy2log_RS.shape[1]
    phy2log_RS, log2phy_GE = deployed.phy2log_RS.copy(), deployed.log2phy_GE.copy()
    for (expert_X, rank_Y, _), found in nodes:
        phy2log_RS[rank_Y] = expert_X[found.phy2log_RS]
        rank_GX = rank_Y[found.log2phy_GE // slots]
        log2phy_GE[:, expert_X] = rank_GX * slots + found.log2phy_GE % slots
    moves = int(np.count_nonzero(phy2log_RS != deployed.phy2log_RS))
    whole = Candidate(phy2log_RS, log2phy_GE, 0.0, moves)
    return whole._replace(par=par_on(whole, layer.heat.episodes, deployed, params.tables))
