"""One rank's layout and identity, and its plans: those from the service, and the plan that restores a placement."""

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
"""Plan number that is reserved for restoring plans. No service uses it."""

Order: TypeAlias = tuple[RankPlan, int] | CallOff
"""Order from the service: a call-off, or a plan with the digest of the placement that it was checked against."""


@dataclass(frozen=True)
class RankLayout:
    """Layout that one rank serves. It is immutable, and each commit replaces it, so any thread may read it.

    Parameters
    ----------
    rank
        The rank.
    placement
        Placement of all ranks.
    log2phy_LE
        The rank's tables, int32 ``[L, E]``, or ``[L, E, D]`` for dealing tables.
    epoch
        Version of the layout.
    layer_epochs
        Epoch at which each layer last changed.
    layer_digests
        Digest of each layer's placement.

    Examples
    --------
    Two ranks have two slots each, for three experts. The second slot of rank 1 changes from expert 0 to expert 1, and
    rank 0 keeps its table:

    >>> before = Placement(np.array([[[0, 1], [2, 0]]], dtype=np.int32), experts=3)
    >>> layout = RankLayout.first(0, before, np.array([[0, 1, 2]], dtype=np.int32))
    >>> after_RS = np.array([[0, 1], [2, 1]], dtype=np.int32)
    >>> after = layout.with_layer(0, after_RS, np.array([0, 1, 2], dtype=np.int32))
    >>> after.epoch, after.layer_epochs, after.digest == layout.digest
    (1, (1,), False)
    """

    rank: int
    placement: Placement
    log2phy_LE: Int32
    epoch: int
    layer_epochs: tuple[int, ...]
    layer_digests: tuple[int, ...]

    @classmethod
    def first(cls, rank: int, placement: Placement, log2phy_LE: Int32) -> RankLayout:
        """Return a rank's initial layout, at epoch 0.

        Raises ``PlacementError`` if a table refers to a slot that does not hold its expert.
        """
        for layer, phy2log_RS in enumerate(placement.phy2log_LRS):
            label = f"layer {layer}: log2phy of rank {rank}"
            check_log2phy(log2phy_LE[layer], phy2log_RS, label, deals=log2phy_LE.ndim == 3)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        return cls(rank, placement, log2phy_LE, 0, (0,) * placement.layers, digests)

    @cached_property
    def digest(self) -> int:
        """Fingerprint of the placement. It is equal on all ranks of a healthy group."""
        return combine_digests(self.placement.experts, self.layer_digests)

    @cached_property
    def version_digest(self) -> int:
        """Fingerprint of placement and epochs. Unlike ``digest``, it changes even if only tables change."""
        version = np.array([self.digest, self.epoch, *self.layer_epochs], dtype="<i8")
        return array_digest(version, salt="version")

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_E: Int32) -> RankLayout:
        """Return the layout after committing one more layer.

        Parameters
        ----------
        layer
            Index of the layer.
        phy2log_RS
            Its new placement, int32 ``[R, S]``.
        log2phy_E
            This rank's new table, int32 ``[E]``, or ``[E, D]`` for a dealing table.
        """
        changed = [(layer, phy2log_RS, log2phy_E[None])]
        placement, log2phy_1LE = apply_layers(self.placement, self.log2phy_LE[None], changed)
        return replace(
            self,
            placement=placement,
            log2phy_LE=log2phy_1LE[0],
            epoch=self.epoch + 1,
            layer_epochs=_with_item(self.layer_epochs, layer, self.epoch + 1),
            layer_digests=_with_item(self.layer_digests, layer, layer_digest(layer, phy2log_RS)),
        )


def _with_item(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True)
class Identity:
    """Identity of this rank in its EP group. The ranks agree on it when they meet, and it never changes afterwards.

    Parameters
    ----------
    deployment
        Name of the deployment.
    group_id
        Random identifier of the group, chosen by rank 0.
    rank
        Index of this rank.
    node
        Host of this rank.
    token_groups
        Token group of each rank. Ranks in the same group see the same tokens.
    shape
        Sizes of the model and the group.
    device
        Model name of this rank's device; empty on a CPU.
    """

    deployment: str
    group_id: str
    rank: int
    node: str
    token_groups: tuple[int, ...]
    shape: Shape
    device: str = ""

    def hello(self, installed: RankLayout, highest_term: int = 0) -> Hello:
        """Return the message that introduces this rank to a service.

        Parameters
        ----------
        installed
            Current layout.
        highest_term
            Highest leader term received so far. The rank rejects plans with lower terms.
        """
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
    """Decode a plan and check that this rank can carry it out.

    A plan for a different epoch passes this check, because the state machine rejects it and reports the reason.

    Parameters
    ----------
    message
        The plan as received.
    identity
        Identity of this rank.
    installed
        Current layout.

    Raises
    ------
    WireError
        If the agent only observes, a layer is not a valid placement, the source slots do not hold the experts, ranks
        that share tokens would get different tables, or a rank-bound expert would leave its rank.
    """
    if identity.shape.observed:
        raise WireError("this agent only observes and does not move experts")
    plan = decode_plan(message, identity.shape)
    for layer in plan.layers:
        installed_RS = installed.placement.phy2log_LRS[layer.layer]
        if identity.shape.rank_bound:
            _check_rank_bound(layer.layer, layer.phy2log_RS, installed_RS)
        if plan.base_digest == installed.digest:
            check_sources(layer, installed_RS)
        _check_shared_table(layer, identity)
    return plan


def _check_rank_bound(layer: int, phy2log_RS: Int32, installed_RS: Int32) -> None:
    """Raise ``WireError`` if any rank would receive an expert that it does not hold."""
    for rank, (slots_S, installed_S) in enumerate(zip(phy2log_RS, installed_RS, strict=True)):
        received = np.setdiff1d(slots_S, installed_S)
        if received.size:
            raise WireError(
                f"layer {layer} phy2log: rank {rank} would get expert {received[0]}, but grouped experts must "
                "stay on their ranks"
            )


def _check_shared_table(layer: RankLayer, identity: Identity) -> None:
    """Raise ``WireError`` if ranks that see the same tokens would get different tables."""
    groups = sharing(identity.token_groups)
    group = identity.token_groups[identity.rank]
    label = f"layer {layer.layer} log2phy"
    if len(layer.log2phy_digests) != len(groups):
        raise WireError(
            f"{label}: expected a digest for each of the {len(groups)} token groups with several ranks, got "
            f"{len(layer.log2phy_digests)}"
        )
    if group in groups and table_digest(layer.log2phy_E) != layer.log2phy_digests[groups.index(group)]:
        raise WireError(
            f"{label}: the table does not match the digest of token group {group} in log2phy_digests"
        )


def restoring_plan(
    installed: RankLayout, target: Placement, token_groups: Sequence[int], leader_term: int
) -> RankPlan | None:
    """Return a plan that restores a placement, or ``None`` if no slot changes.

    Each rank computes its plan independently. The plans are equal except for the rank's own tables, and ranks in the
    same token group get the same tables. Unlike in a plan from the service, an expert may change slots within a rank.

    Parameters
    ----------
    installed
        Current layout.
    target
        Placement to restore.
    token_groups
        Token group of each rank.
    leader_term
        Leader term of the plan.
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
    """Return one move for each slot that changes. The source is on the same rank if that rank holds the expert.

    Returns
    -------
    Int32
        int32 ``[M, 5]``: source rank and slot, destination rank and slot, and the expert.

    Examples
    --------
    Rank 0 swaps its two experts, and rank 1 replaces expert 3 with expert 0:

    >>> old_RS = np.array([[0, 1], [2, 3]], dtype=np.int32)
    >>> new_RS = np.array([[1, 0], [2, 0]], dtype=np.int32)
    >>> _restoring_moves(old_RS, new_RS)
    array([[0, 1, 0, 0, 1],
           [0, 0, 0, 1, 0],
           [0, 0, 1, 1, 0]], dtype=int32)
    """
    moves = []
    for rank, slot in np.argwhere(old_RS != new_RS).tolist():
        expert = int(new_RS[rank, slot])
        holders = np.argwhere(old_RS == expert).tolist()
        local = [holder for holder in holders if holder[0] == rank]
        # Spread ranks that need the same expert over the ranks that hold it.
        source = local[0] if local else holders[rank % len(holders)]
        moves.append((*source, rank, slot, expert))
    return np.array(moves, dtype=np.int32)
