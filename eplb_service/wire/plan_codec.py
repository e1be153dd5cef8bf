"""Plans on the wire: what a rank is told to switch, with everything that it can check for itself checked."""

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
from eplb_service.wire.codec import WireError, pack, unpack
from eplb_service.wire.generated import agent_pb2


@dataclass(frozen=True)
class WireLayer:
    """One layer of a plan as one rank hears it.

    Parameters
    ----------
    layer
        Index of the layer.
    phy2log_RS
        The whole layer after the switch, int32 ``[R, S]``.
    log2phy_E
        The receiving rank's table after the switch, int32 ``[E]``.
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
class WirePlan:
    """Layers to switch, in order; equal on all ranks but for tables. ``digest`` is by ``plan_digest``."""

    plan_id: int
    leader_term: int
    base_epoch: int
    base_digest: int
    layers: tuple[WireLayer, ...]
    digest: int


def table_digest(log2phy_E: Int32) -> int:
    """63-bit fingerprint of one rank's table of one layer."""
    return array_digest(np.ascontiguousarray(log2phy_E, dtype="<i4"), salt="log2phy")


def plan_digest(plan_id: int, base_epoch: int, base_digest: int, layers: tuple[WireLayer, ...]) -> int:
    """63-bit fingerprint of all that the ranks must agree on: everything but each rank's own table."""
    words = [plan_id, base_epoch, base_digest]
    for layer in layers:
        tables_R = np.array(layer.log2phy_digests, dtype="<u8")
        moves_M5 = np.ascontiguousarray(layer.moves_M5, dtype="<i4")
        words += [layer.layer, layer_digest(layer.layer, layer.phy2log_RS)]
        words += [array_digest(moves_M5, salt="moves"), array_digest(tables_R, salt="tables")]
    return array_digest(np.array(words, dtype="<u8"), salt="plan")


def encode_plan(plan: WirePlan) -> agent_pb2.Plan:
    """The message for the rank whose tables ``plan`` carries."""
    return agent_pb2.Plan(
        plan_id=plan.plan_id,
        leader_term=plan.leader_term,
        base_epoch=plan.base_epoch,
        base_digest=plan.base_digest,
        layers=[_encode_layer(layer) for layer in plan.layers],
        digest=plan.digest,
    )


def decode_plan(
    message: agent_pb2.Plan, layers: int, ranks: int, slots: int, experts: int, *, rank: int
) -> WirePlan:
    """The plan that ``rank`` received, for a model of ``layers`` x ``experts`` on ``ranks`` x ``slots``.

    Raises ``WireError`` naming the field unless each layer is a valid placement, the table fits it and is
    the one listed for ``rank``, the moves lead to it, and the digest is the one recomputed here. Whether the
    moves start from what is installed is for ``check_moves``, which needs the placement that is.
    """
    if not message.layers:
        raise WireError("plan: names no layers")
    decoded = tuple(_decode_layer(update, layers, ranks, slots, experts, rank) for update in message.layers)
    indices = [update.layer for update in decoded]
    if len(set(indices)) != len(indices):
        raise WireError(f"plan: a layer stands in it twice, among {indices}")
    digest = plan_digest(message.plan_id, message.base_epoch, message.base_digest, decoded)
    if digest != message.digest:
        raise WireError(f"plan: digest is {message.digest:#x}, its content says {digest:#x}")
    return WirePlan(
        message.plan_id, message.leader_term, message.base_epoch, message.base_digest, decoded, digest
    )


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
        said = "receives a move but keeps" if moved_RS[at] else f"has no move to change from {old_RS[at]} to"
        raise WireError(f"moves: rank {at[0]} slot {at[1]} {said} expert {new_RS[at]}")


def _encode_layer(layer: WireLayer) -> agent_pb2.LayerUpdate:
    return agent_pb2.LayerUpdate(
        layer=layer.layer,
        physical_to_logical=pack(layer.phy2log_RS),
        log2phy=pack(layer.log2phy_E),
        log2phy_digests=layer.log2phy_digests,
        moves=pack(layer.moves_M5),
    )


def _decode_layer(
    update: agent_pb2.LayerUpdate, layers: int, ranks: int, slots: int, experts: int, rank: int
) -> WireLayer:
    if update.layer >= layers:
        raise WireError(f"plan: names layer {update.layer}, the model has {layers}")
    where = f"layer {update.layer}"
    phy2log_RS = unpack(update.physical_to_logical, (ranks, slots), f"{where} physical_to_logical")
    log2phy_E = unpack(update.log2phy, (experts,), f"{where} log2phy")
    try:
        check_layer(phy2log_RS, experts, where)
        check_log2phy(log2phy_E, phy2log_RS, f"{where} log2phy")
    except PlacementError as error:
        raise WireError(str(error)) from error
    digests = tuple(update.log2phy_digests)
    if len(digests) != ranks:
        raise WireError(
            f"{where} log2phy_digests: expected one for each of {ranks} ranks, got {len(digests)}"
        )
    if digests[rank] != table_digest(log2phy_E):
        raise WireError(f"{where} log2phy: is not the table whose digest is listed for rank {rank}")
    moves_M5 = unpack(update.moves, (None, 5), f"{where} moves")
    _check_destinations(phy2log_RS, moves_M5, f"{where} moves")
    return WireLayer(update.layer, phy2log_RS, log2phy_E, digests, moves_M5)


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
