"""Plans as each rank receives them: the layers to switch, with everything that a rank can check for itself checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from eplb_service.placement import (
    Int32,
    PlacementError,
    array_digest,
    check_layer,
    check_log2phy,
    layer_digest,
)
from eplb_service.wire.agent import Shape
from eplb_service.wire.codec import Integers, decode, encode, narrowed, packed
from eplb_service.wire.fields import LAST_DIGEST, Digest, Version, WireError, below, each
from eplb_service.wire.generated import agent_pb2, tensor_pb2


@dataclass(frozen=True)
class RankLayer:
    """One layer of a plan as one rank receives it.

    ``phy2log_RS`` is the whole layer after the switch, ``log2phy_E`` the receiving rank's table, ``[E]``, or ``[E, D]``
    where it deals, ``log2phy_digests`` the ``table_digest`` of every rank's; ``moves_M5`` are source rank, source slot,
    destination rank, destination slot, logical expert.
    """

    MESSAGE: ClassVar = agent_pb2.LayerUpdate

    layer: Annotated[int, below("layers")]
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    log2phy_E: Annotated[Int32, packed("experts", "entries")]
    log2phy_digests: Annotated[tuple[int, ...], each("ranks", LAST_DIGEST)]
    moves_M5: Annotated[Int32, packed(None, 5)]


@dataclass(frozen=True)
class RankPlan:
    """Layers to switch, in order; equal on all ranks but for tables. ``digest`` is a fingerprint of the rest."""

    MESSAGE: ClassVar = agent_pb2.Plan

    plan_id: Version
    leader_term: Version
    base_epoch: Version
    base_digest: Digest
    layers: tuple[RankLayer, ...]
    digest: Digest

    @classmethod
    def of(
        cls, plan_id: int, leader_term: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]
    ) -> RankPlan:
        """Compute the digest.

        ``plan_id`` and ``leader_term`` are the service's, ``base_epoch`` and ``base_digest`` version and fingerprint of
        the placement that it starts from, ``layers`` what changes, in the order of the switches.
        """
        digest = _plan_digest(plan_id, base_epoch, base_digest, layers)
        return cls(plan_id, leader_term, base_epoch, base_digest, layers, digest)


def table_digest(log2phy_E: Int32) -> int:
    """63-bit fingerprint of one rank's table of one layer."""
    return array_digest(np.ascontiguousarray(log2phy_E, dtype="<i4"), salt="log2phy")


def _plan_digest(plan_id: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]) -> int:
    """63-bit fingerprint of all that the ranks must agree on: everything but each rank's own table."""
    facts = [plan_id, base_epoch, base_digest]
    for layer in layers:
        tables_R = np.array(layer.log2phy_digests, dtype="<u8")
        moves_M5 = np.ascontiguousarray(layer.moves_M5, dtype="<i4")
        facts += [layer.layer, layer_digest(layer.layer, layer.phy2log_RS)]
        facts += [array_digest(moves_M5, salt="moves"), array_digest(tables_R, salt="tables")]
    return array_digest(np.array(facts, dtype="<u8"), salt="plan")


class SharedPlan:
    """One plan for all ranks, whose messages differ in nothing but their own tables.

    A plan names all ranks' slots, so that all ranks' messages together grow with the square of the ranks. Protobuf
    messages concatenate: what ranks share is encoded once, and joined with a rank's own tables when it is sent.

    Parameters
    ----------
    plan
        As any one rank receives it.
    tables
        All ranks' tables of each of its layers, int32 ``[R, E]``, or ``[R, E, D]`` where they deal.

    ``size`` is that of one rank's message, in bytes.
    """

    def __init__(self, plan: RankPlan, tables: Sequence[Int32]) -> None:
        message = encode(plan)
        self._layers = [
            _shared_layer(update, table) for update, table in zip(message.layers, tables, strict=True)
        ]
        plan_bytes = message.ByteSize()
        response = agent_pb2.ConnectResponse(plan=message).SerializeToString()
        self._begin = response[: len(response) - plan_bytes]
        del message.layers[:]
        self._begin += message.SerializeToString()
        self.size = len(self._begin) + sum(len(shared) + own[0].nbytes for shared, own in self._layers)

    def response(self, rank: int) -> bytes:
        """Return the ``ConnectResponse`` for one rank, encoded."""
        pieces = [self._begin]
        for shared, own in self._layers:
            pieces += shared, own[rank].tobytes()
        return b"".join(pieces)


def _shared_layer(update: agent_pb2.LayerUpdate, tables: Int32) -> tuple[bytes, Integers]:
    """Encode a layer up to the ranks' own tables, which it ends with; they are as they travel, ``[R, ...]``."""
    code, narrow = narrowed(tables)
    own = tensor_pb2.PackedArray(dtype=code, shape=narrow.shape[1:], data=narrow[0].tobytes())  # type: ignore[arg-type]
    update.log2phy.CopyFrom(own)
    whole = agent_pb2.Plan(layers=[update]).SerializeToString()
    before = len(whole) - update.ByteSize()
    last = agent_pb2.LayerUpdate(log2phy=own).SerializeToString()
    shared = agent_pb2.LayerUpdate()
    shared.CopyFrom(update)
    shared.ClearField("log2phy")
    return whole[:before] + shared.SerializeToString() + last[: len(last) - narrow[0].nbytes], narrow


def decode_plan(message: agent_pb2.Plan, shape: Shape, rank: int) -> RankPlan:
    """Return the plan that ``rank`` received, for a deployment of ``shape``.

    Moves are compared with what is installed by ``check_moves``, which needs the placement that is.

    Raises
    ------
    WireError
        A layer is no valid placement, the table does not fit it or is not the one listed for ``rank``, the moves do not
        lead to it, or the digest is not the one recomputed here; the text names the field.
    """
    plan = decode(RankPlan, message, shape.sizes)
    if not plan.layers:
        raise WireError("plan.layers: names no layers")
    indices = [layer.layer for layer in plan.layers]
    if len(set(indices)) != len(indices):
        raise WireError(f"plan.layers: a layer is named twice, among {indices}")
    for layer in plan.layers:
        _check_layer(layer, shape, rank)
    digest = _plan_digest(plan.plan_id, plan.base_epoch, plan.base_digest, plan.layers)
    if plan.digest != digest:
        raise WireError(f"plan.digest is {plan.digest:#x}, its content says {digest:#x}")
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


def _check_layer(layer: RankLayer, shape: Shape, rank: int) -> None:
    where = f"layer {layer.layer}"
    try:
        check_layer(layer.phy2log_RS, shape.experts, f"{where} physical_to_logical")
        check_log2phy(layer.log2phy_E, layer.phy2log_RS, f"{where} log2phy", deals=shape.width > 1)
    except PlacementError as error:
        raise WireError(str(error)) from error
    if layer.log2phy_digests[rank] != table_digest(layer.log2phy_E):
        raise WireError(f"{where} log2phy: is not the table that log2phy_digests lists for rank {rank}")
    _check_destinations(layer.phy2log_RS, layer.moves_M5, f"{where} moves")


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
