"""Hierarchical placement: groups of experts stay together on a node, and each node is then a layer of its own.

Tokens that a router sends to few groups then cross to few nodes. Groups are packed onto nodes in equal numbers, hottest
first, each onto the coolest node with room; replicas are handed out, placed and improved within the node.

References
----------
The hierarchical policy of DeepSeek's EPLB, as its README describes it, https://github.com/deepseek-ai/EPLB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.solver.candidates import from_scratch, par_on
from eplb_service.solver.decision import Answer, solve_layer
from eplb_service.solver.model import (
    FRESH,
    KEEP,
    Candidate,
    Deployed,
    Float32,
    Float64,
    Int32,
    Layer,
    SearchParams,
    heat_of,
    homes,
)
from eplb_service.solver.topology import match_ranks

Indices = npt.NDArray[np.intp]


class NodeLayer(NamedTuple):
    """One node as a layer of its own: its experts and ranks are numbered from 0."""

    expert_X: Indices
    """The experts' numbers in the whole layer, ascending."""
    rank_Y: Indices
    """The ranks', ascending."""
    deployed: Deployed
    """What serves now, in the node's numbers."""


def solve_by_node(
    heat_NE: Float64,
    deployed: Deployed,
    params: SearchParams,
    half_life_H: Float64,
    min_gain: float,
    unplaced: bool,
    groups: int,
) -> Answer:
    """Decide one layer whose ``groups`` of neighbouring experts each stay on one node.

    The nodes have equally many ranks, and their number divides
    ``groups``, which divides the experts. A layer whose groups are placed so already keeps them there: weights
    move within nodes only. Any other is placed from scratch.

    Parameters
    ----------
    heat_NE, deployed, params, half_life_H, min_gain, unplaced
        As for ``decision.solve_layer``.
    groups
        Groups of neighbouring experts.
    """
    seen = Layer(heat_of(heat_NE, deployed.phy2log_RS.shape[0]), deployed)
    now = Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0)
    now = now._replace(par=par_on(now, seen, params.tables))
    packed = node_layers(pack_groups(seen.heat.demand.mean_E, deployed, groups), deployed)
    made = [
        (part, from_scratch(Layer(heat_of(_heat_on(heat_NE, part), part.rank_Y.size), part.deployed), params))
        for part in packed
    ]
    fresh = _put_together(made, seen, params)
    node_E = nodes_of_groups(deployed, groups)
    if unplaced or node_E is None:
        return Answer(fresh, now.par, fresh, float(half_life_H[0]), FRESH)
    decided = [
        (part, solve_layer(_heat_on(heat_NE, part), part.deployed, params, half_life_H, min_gain, False))
        for part in node_layers(node_E, deployed)
    ]
    price = params.move_price * now.par
    changed = [(part, answer) for part, answer in decided if answer.taken != KEEP]
    best, taken = _without_the_vain(changed, seen, params._replace(move_price=price))
    half_life = min((answer.half_life for _, answer in taken), default=float(half_life_H[0]))
    if best.par + price * best.moves >= now.par - min_gain:
        return Answer(now, now.par, fresh, half_life, KEEP)
    return Answer(best, now.par, fresh, half_life, max(answer.taken for _, answer in taken))


def pack_groups(mean_E: Float32, deployed: Deployed, groups: int) -> Int32:
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


def nodes_of_groups(deployed: Deployed, groups: int) -> Int32 | None:
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


def node_layers(node_E: Int32, deployed: Deployed) -> list[NodeLayer]:
    """The nodes as layers of their own, where expert ``e`` belongs to the node ``node_E[e]``.

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
        alone = Deployed(
            phy2log_YS,
            np.ascontiguousarray(np.maximum(log2phy_GX, 0), dtype=np.int32),
            np.ascontiguousarray(deployed.share_GE[:, expert_X]),
            homes(phy2log_YS, expert_X.size),
            np.zeros(rank_Y.size, dtype=np.int32),
            np.zeros_like(deployed.node_G),
        )
        layers.append(NodeLayer(expert_X, rank_Y, alone))
    return layers


def _heat_on(heat_NE: Float64, part: NodeLayer) -> Float64:
    return np.ascontiguousarray(heat_NE[:, part.expert_X])


def _without_the_vain(
    changed: list[tuple[NodeLayer, Answer]], layer: Layer, params: SearchParams
) -> tuple[Candidate, list[tuple[NodeLayer, Answer]]]:
    """The changed nodes put together, less those that are cooled in vain because another node is the hottest."""

    def together(chosen: list[tuple[NodeLayer, Answer]]) -> Candidate:
        return _put_together([(part, answer.found) for part, answer in chosen], layer, params)

    best = together(changed)
    for one in list(changed):
        others = [other for other in changed if other is not one]
        without = together(others)
        if without.par + params.move_price * without.moves <= best.par + params.move_price * best.moves:
            best, changed = without, others
    return best, changed


def _put_together(
    parts: Sequence[tuple[NodeLayer, Candidate]], layer: Layer, params: SearchParams
) -> Candidate:
    """What is deployed with some nodes' placement and tables in place of their own."""
    deployed = layer.deployed
    slots = deployed.phy2log_RS.shape[1]
    phy2log_RS, log2phy_GE = deployed.phy2log_RS.copy(), deployed.log2phy_GE.copy()
    for part, found in parts:
        phy2log_RS[part.rank_Y] = part.expert_X[found.phy2log_RS]
        rank_GX = part.rank_Y[found.log2phy_GE // slots]
        log2phy_GE[:, part.expert_X] = rank_GX * slots + found.log2phy_GE % slots
    moves = int(np.count_nonzero(phy2log_RS != deployed.phy2log_RS))
    whole = Candidate(phy2log_RS, log2phy_GE, 0.0, moves)
    return whole._replace(par=par_on(whole, layer, params.tables))
