"""Plans as each rank receives them: the layers to switch, with everything that a rank can check for itself checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.placement import (
    Int32,
    PlacementError,
    array_digest,
    check_layer,
    check_log2phy,
    layer_digest,
)
from eplb_service.wire.codec import pack, unpack
from eplb_service.wire.fields import LAST_DIGEST, LAST_VERSION, WireError, check_count
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.hello import Shape


@dataclass(frozen=True)
class RankLayer:
    """One layer of a plan as one rank receives it.

    Parameters
    ----------
    layer
        Index of the layer.
    phy2log_RS
        The whole layer after the switch, int32 ``[R, S]``.
    log2phy_E
        The receiving rank's table after the switch, int32 ``[E]``, or ``[E, D]`` where it deals.
    log2phy_digests
        ``table_digest`` of every rank's table, R integers.
    moves_M5
        int32 ``[M, 5]``: source rank, source slot, destination rank, destination slot, logical expert.
    """

    layer: int
    phy2log_RS: Int32
    log2phy_E: Int32
    log2phy_digests: tuple[int, ...]
    moves_M5: Int32


@dataclass(frozen=True)
class RankPlan:
    """Layers to switch, in order; equal on all ranks but for tables. ``digest`` is by ``plan_digest``."""

    plan_id: int
    leader_term: int
    base_epoch: int
    base_digest: int
    layers: tuple[RankLayer, ...]
    digest: int

    @classmethod
    def of(
        cls, plan_id: int, leader_term: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]
    ) -> RankPlan:
        """The plan with its digest computed.

        Parameters
        ----------
        plan_id, leader_term
            Of the service that made it.
        base_epoch, base_digest
            Version and fingerprint of the placement that it starts from.
        layers
            What changes, in the order of the switches.
        """
        digest = plan_digest(plan_id, base_epoch, base_digest, layers)
        return cls(plan_id, leader_term, base_epoch, base_digest, layers, digest)


def table_digest(log2phy_E: Int32) -> int:
    """63-bit fingerprint of one rank's table of one layer."""
    return array_digest(np.ascontiguousarray(log2phy_E, dtype="<i4"), salt="log2phy")


def plan_digest(plan_id: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]) -> int:
    """63-bit fingerprint of all that the ranks must agree on: everything but each rank's own table."""
    facts = [plan_id, base_epoch, base_digest]
    for layer in layers:
        tables_R = np.array(layer.log2phy_digests, dtype="<u8")
        moves_M5 = np.ascontiguousarray(layer.moves_M5, dtype="<i4")
        facts += [layer.layer, layer_digest(layer.layer, layer.phy2log_RS)]
        facts += [array_digest(moves_M5, salt="moves"), array_digest(tables_R, salt="tables")]
    return array_digest(np.array(facts, dtype="<u8"), salt="plan")


def encode_plan(plan: RankPlan) -> agent_pb2.Plan:
    """The message for the rank whose tables ``plan`` carries."""
    return agent_pb2.Plan(
        plan_id=plan.plan_id,
        leader_term=plan.leader_term,
        base_epoch=plan.base_epoch,
        base_digest=plan.base_digest,
        layers=[_encode_layer(layer) for layer in plan.layers],
        digest=plan.digest,
    )


def decode_plan(message: agent_pb2.Plan, shape: Shape, rank: int) -> RankPlan:
    """The plan that ``rank`` received, for a deployment of ``shape``.

    Whether the moves start from what is installed is for ``check_moves``, which needs the placement that is.

    Raises
    ------
    WireError
        A layer is no valid placement, the table does not fit it or is not the one listed for ``rank``, the moves do not
        lead to it, or the digest is not the one recomputed here; the text names the field.
    """
    plan_id = check_count(message.plan_id, "plan.plan_id", LAST_VERSION)
    leader_term = check_count(message.leader_term, "plan.leader_term", LAST_VERSION)
    base_epoch = check_count(message.base_epoch, "plan.base_epoch", LAST_VERSION)
    base_digest = check_count(message.base_digest, "plan.base_digest", LAST_DIGEST)
    if not message.layers:
        raise WireError("plan.layers: names no layers")
    decoded = tuple(_decode_layer(update, shape, rank) for update in message.layers)
    indices = [update.layer for update in decoded]
    if len(set(indices)) != len(indices):
        raise WireError(f"plan.layers: a layer is named twice, among {indices}")
    plan = RankPlan.of(plan_id, leader_term, base_epoch, base_digest, decoded)
    if plan.digest != message.digest:
        raise WireError(f"plan.digest is {message.digest:#x}, its content says {plan.digest:#x}")
    return plan


def check_moves(old_RS: Int32, new_RS: Int32, moves_M5: Int32) -> None:
    """Raise ``WireError`` unless the moves turn ``old_RS`` into ``new_RS``, one for each changed slot."""
    source_rank, source_slot, rank, slot, expert = moves_M5.T
    sent = old_RS[source_rank, source_slot]
    if (sent != expert).any():
        move = int(np.flatnonzero(sent != expert)[0])
        raise WireError(
            f"moves[{move}]: rank {source_rank[move]} slot {source_slot[move]} holds expert {sent[move]}, "
            f"not {expert[move]}"
        )
    moved_RS = np.zeros(old_RS.shape, dtype=bool)
    moved_RS[rank, slot] = True
    wrong = np.argwhere(moved_RS != (old_RS != new_RS))
    if wrong.size:
        at = int(wrong[0, 0]), int(wrong[0, 1])
        fault = "receives a move but keeps" if moved_RS[at] else f"has no move to change from {old_RS[at]} to"
        raise WireError(f"moves: rank {at[0]} slot {at[1]} {fault} expert {new_RS[at]}")


def _encode_layer(layer: RankLayer) -> agent_pb2.LayerUpdate:
    return agent_pb2.LayerUpdate(
        layer=layer.layer,
        physical_to_logical=pack(layer.phy2log_RS),
        log2phy=pack(layer.log2phy_E),
        log2phy_digests=layer.log2phy_digests,
        moves=pack(layer.moves_M5),
    )


def _decode_layer(update: agent_pb2.LayerUpdate, shape: Shape, rank: int) -> RankLayer:
    if update.layer >= shape.layers:
        raise WireError(f"plan.layers: names layer {update.layer}, the model has {shape.layers}")
    where = f"layer {update.layer}"
    phy2log_RS = unpack(
        update.physical_to_logical, (shape.ranks, shape.slots), f"{where} physical_to_logical"
    )
    log2phy_E = unpack(update.log2phy, shape.table, f"{where} log2phy")
    try:
        check_layer(phy2log_RS, shape.experts, f"{where} physical_to_logical")
        check_log2phy(log2phy_E, phy2log_RS, f"{where} log2phy", deals=shape.width > 1)
    except PlacementError as error:
        raise WireError(str(error)) from error
    digests = tuple(update.log2phy_digests)
    if len(digests) != shape.ranks or max(digests) >= LAST_DIGEST:
        raise WireError(
            f"{where} log2phy_digests: expected one below 2**63 for each of {shape.ranks} ranks, got {len(digests)}"
        )
    if digests[rank] != table_digest(log2phy_E):
        raise WireError(f"{where} log2phy: is not the table that log2phy_digests lists for rank {rank}")
    moves_M5 = unpack(update.moves, (None, 5), f"{where} moves")
    _check_destinations(phy2log_RS, moves_M5, f"{where} moves")
    return RankLayer(update.layer, phy2log_RS, log2phy_E, digests, moves_M5)


def _check_destinations(new_RS: Int32, moves_M5: Int32, field: str) -> None:
    ranks, slots = new_RS.shape
    bounds = np.array([ranks, slots, ranks, slots])
    outside = ((moves_M5[:, :4] < 0) | (moves_M5[:, :4] >= bounds)).any(axis=1)
    if outside.any():
        move = int(np.flatnonzero(outside)[0])
        raise WireError(
            f"{field}[{move}]: {moves_M5[move].tolist()} is not among {ranks} ranks x {slots} slots"
        )
    source_rank, _, rank, slot, expert = moves_M5.T
    within = np.flatnonzero(source_rank == rank)
    if within.size:
        raise WireError(
            f"{field}[{within[0]}]: an expert that stays on rank {rank[within[0]]} keeps its slot"
        )
    wrong = np.flatnonzero(new_RS[rank, slot] != expert)
    if wrong.size:
        move = int(wrong[0])
        raise WireError(
            f"{field}[{move}]: brings expert {expert[move]} to rank {rank[move]} slot {slot[move]}, "
            f"which is to hold {new_RS[rank[move], slot[move]]}"
        )
    if np.unique(rank * slots + slot).size != rank.size:
        raise WireError(f"{field}: two moves have the same destination")
