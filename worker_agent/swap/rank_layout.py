"""Placement that a rank serves, and plans that lead on from it: the service's, checked, and one that leads back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from eplb_core import __version__
from eplb_core.placement import (
    Int32,
    Placement,
    apply_layers,
    array_digest,
    check_log2phy,
    combine_digests,
    default_log2phy,
    layer_digest,
    with_entries,
)
from eplb_core.wire.agent import CallOff, Hello, Shape
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.plan import (
    RankLayer,
    RankPlan,
    check_sources,
    decode_plan,
    shared_digests,
    sharing,
    sources_of,
    table_digest,
)

_RESTORING_PLAN_ID = 0
"""No service gives a plan this number."""

Order: TypeAlias = tuple[RankPlan, int] | CallOff
"""Order of the service: a plan with the digest of the placement it was checked against, or a plan's cancellation."""


@dataclass(frozen=True)
class RankLayout:
    """Placement that this rank serves, a snapshot: each committed layer makes a new one, so any thread may read it.

    ``log2phy_LE`` are this rank's tables, int32 ``[L, E]``, or ``[L, E, D]`` where it deals; ``layer_epochs`` the
    epochs at which each layer last changed.
    """

    rank: int
    placement: Placement
    log2phy_LE: Int32
    epoch: int
    layer_epochs: tuple[int, ...]
    layer_digests: tuple[int, ...]

    @classmethod
    def first(cls, rank: int, placement: Placement, log2phy_LE: Int32) -> RankLayout:
        """Snapshot that a rank starts with, epoch 0.

        Raises ``PlacementError`` where a table points to a slot that does not hold its expert.
        """
        for layer, phy2log_RS in enumerate(placement.phy2log_LRS):
            where = f"layer {layer}: log2phy of rank {rank}"
            check_log2phy(log2phy_LE[layer], phy2log_RS, where, deals=log2phy_LE.ndim == 3)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        return cls(rank, placement, log2phy_LE, 0, (0,) * placement.layers, digests)

    @cached_property
    def digest(self) -> int:
        """Fingerprint of the placement, equal on all ranks of a healthy group."""
        return combine_digests(self.placement.experts, self.layer_digests)

    @cached_property
    def version_digest(self) -> int:
        """Fingerprint of placement and epochs: differs too where two ranks differ by a switch of tables alone."""
        version = np.array([self.digest, self.epoch, *self.layer_epochs], dtype="<i8")
        return array_digest(version, salt="version")

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_E: Int32) -> RankLayout:
        """Snapshot after one more committed layer."""
        changed = [(layer, phy2log_RS, log2phy_E[None])]
        placement, log2phy_1LE = apply_layers(self.placement, self.log2phy_LE[None], changed)
        return replace(
            self,
            placement=placement,
            log2phy_LE=log2phy_1LE[0],
            epoch=self.epoch + 1,
            layer_epochs=_replaced(self.layer_epochs, layer, self.epoch + 1),
            layer_digests=_replaced(self.layer_digests, layer, layer_digest(layer, phy2log_RS)),
        )


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True)
class Identity:
    """Place of this rank among its EP group: agreed once, when the ranks meet, and the same for the agent's life.

    ``group_id`` is drawn by rank 0; ``token_groups`` has, per rank, the group of ranks that see the same tokens.
    ``device`` is the name of this rank's device, empty on a CPU.
    """

    deployment: str
    group_id: str
    rank: int
    node: str
    token_groups: tuple[int, ...]
    shape: Shape
    device: str = ""

    def hello(self, installed: RankLayout, highest_term: int = 0) -> Hello:
        """Introduction of this rank while it serves ``installed`` and follows services of this term or higher."""
        return Hello(
            deployment=self.deployment,
            rank=self.rank,
            node=self.node,
            token_group=self.token_groups[self.rank],
            group_id=self.group_id,
            shape=self.shape,
            epoch=installed.epoch,
            digest=installed.digest,
            layer_epochs=installed.layer_epochs,
            slots_LS=np.ascontiguousarray(installed.placement.phy2log_LRS[:, self.rank]),
            log2phy_LE=installed.log2phy_LE,
            agent_version=__version__,
            highest_term=highest_term,
            device=self.device,
        )


def check_plan(message: agent_pb2.Plan, identity: Identity, installed: RankLayout) -> RankPlan:
    """Decode a plan that this rank could carry out; one for another epoch passes: the machine refuses it.

    Raises ``WireError`` where a layer is no valid placement, its weights would come from slots that do not hold them,
    ranks that share tokens would get different tables, or an expert would leave a rank that it is bound to.
    """
    plan = decode_plan(message, identity.shape)
    for layer in plan.layers:
        installed_RS = installed.placement.phy2log_LRS[layer.layer]
        if identity.shape.rank_bound:
            _check_bound(layer.layer, layer.phy2log_RS, installed_RS)
        if plan.base_digest == installed.digest:
            check_sources(layer, installed_RS)
        _check_shared_table(layer, identity)
    return plan


def _check_bound(layer: int, phy2log_RS: Int32, installed_RS: Int32) -> None:
    for rank, (slots_S, installed_S) in enumerate(zip(phy2log_RS, installed_RS, strict=True)):
        others = np.setdiff1d(slots_S, installed_S)
        if others.size:
            raise WireError(
                f"layer {layer} phy2log: rank {rank} would get expert {others[0]}, but grouped experts stay on "
                "their ranks"
            )


def _check_shared_table(layer: RankLayer, identity: Identity) -> None:
    """Raise ``WireError`` where ranks that see the same tokens would get different tables."""
    groups, own = sharing(identity.token_groups), identity.token_groups[identity.rank]
    where = f"layer {layer.layer} log2phy"
    if len(layer.log2phy_digests) != len(groups):
        raise WireError(
            f"{where}: {len(layer.log2phy_digests)} digests for {len(groups)} token groups of several ranks"
        )
    if own in groups and table_digest(layer.log2phy_E) != layer.log2phy_digests[groups.index(own)]:
        raise WireError(f"{where}: is not the table that log2phy_digests lists for token group {own}")


def restoring_plan(
    installed: RankLayout, target: Placement, token_groups: Sequence[int], leader_term: int
) -> RankPlan | None:
    """Plan that leads from ``installed`` to ``target``; ``None`` where nothing has to move.

    Every rank makes it for itself, the same but for the rank's own tables; ranks of one token group get one table.
    Unlike in a service's plan an expert may change its slot within a rank.
    """
    width = with_entries(installed.log2phy_LE, 2).shape[-1]
    first_of_group = [token_groups.index(group) for group in token_groups]
    layers = []
    for layer, new_RS in enumerate(target.phy2log_LRS):
        old_RS = installed.placement.phy2log_LRS[layer]
        if np.array_equal(old_RS, new_RS):
            continue
        tables_RE = default_log2phy(new_RS, target.experts, width)[first_of_group]
        source_RS = sources_of(_restoring_moves(old_RS, new_RS), *new_RS.shape)
        digests = shared_digests(tables_RE, token_groups)
        layers.append(RankLayer(layer, new_RS, source_RS, tables_RE[installed.rank], digests))
    if not layers:
        return None
    return RankPlan.of(_RESTORING_PLAN_ID, leader_term, installed.epoch, installed.digest, tuple(layers))


def _restoring_moves(old_RS: Int32, new_RS: Int32) -> Int32:
    """Moves for each slot that changes, from the same rank where it has the expert; int32 ``[M, 5]``."""
    moves = []
    for rank, slot in np.argwhere(old_RS != new_RS).tolist():
        expert = int(new_RS[rank, slot])
        holders = np.argwhere(old_RS == expert).tolist()
        near = [holder for holder in holders if holder[0] == rank]
        # Ranks that want the same expert ask different holders.
        source = near[0] if near else holders[rank % len(holders)]
        moves.append((*source, rank, slot, expert))
    return np.array(moves, dtype=np.int32)
