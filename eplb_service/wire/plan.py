"""Plans as each rank receives them: the layers to switch, with everything that a rank can check for itself checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_service.placement import (
    Int32,
    PlacementError,
    array_digest,
    array_digests,
    check_layer,
    check_log2phy,
    layer_digest,
)
from eplb_service.wire.agent import Shape
from eplb_service.wire.codec import decode, encode, narrowed, packed
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
    return table_digests(log2phy_E[None])[0]


def table_digests(log2phy_RE: Int32) -> tuple[int, ...]:
    """Fingerprints of all ranks' tables of one layer."""
    return tuple(array_digests(np.ascontiguousarray(log2phy_RE, dtype="<i4"), salt="log2phy"))


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

    A plan names all ranks' slots, so that all ranks' messages together grow with the square of the ranks: each is made
    when it is sent, of one that is encoded already, with the rank's own tables put into their places.

    Parameters
    ----------
    plan
        As any one rank receives it.
    tables
        All ranks' tables of each of its layers, int32 ``[R, E]``, or ``[R, E, D]`` where they deal.

    ``size`` is that of one rank's message, in bytes.
    """

    def __init__(self, plan: RankPlan, tables: Sequence[Int32]) -> None:
        coded = [narrowed(table) for table in tables]
        rows = [narrow.reshape(len(narrow), -1).view(np.uint8) for _, narrow in coded]
        self._tables_RB = np.concatenate(rows, axis=1)
        response = agent_pb2.ConnectResponse(plan=encode(plan))

        def filled_with(byte: bytes) -> npt.NDArray[np.uint8]:
            """Message whose tables are this byte alone."""
            for update, (code, narrow) in zip(response.plan.layers, coded, strict=True):
                data = byte * narrow[0].nbytes
                own = tensor_pb2.PackedArray(dtype=code, shape=narrow.shape[1:], data=data)  # type: ignore[arg-type]
                update.log2phy.CopyFrom(own)
            return np.frombuffer(response.SerializeToString(), dtype=np.uint8)

        self._message = filled_with(b"\x00").copy()
        self._places = np.flatnonzero(self._message != filled_with(b"\xff"))
        self.size = self._message.size

    def response(self, rank: int) -> bytes:
        """Return the ``ConnectResponse`` for one rank, encoded."""
        # All places are written each time.
        self._message[self._places] = self._tables_RB[rank]
        encoded: bytes = self._message.tobytes()
        return encoded


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
    sent_M = old_RS[moves_M5[:, 0], moves_M5[:, 1]]
    _refuse(sent_M != moves_M5[:, 4], moves_M5, "moves", "its source holds another expert")
    moved_RS = np.zeros(old_RS.shape, dtype=bool)
    moved_RS[moves_M5[:, 2], moves_M5[:, 3]] = True
    wrong = np.argwhere(moved_RS != (old_RS != new_RS))
    if wrong.size:
        rank, slot = wrong[0].tolist()
        fault = "receives a move but keeps" if moved_RS[rank, slot] else "has no move to change to"
        raise WireError(f"moves: rank {rank} slot {slot} {fault} expert {new_RS[rank, slot]}")


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
    ends_M4, bounds = moves_M5[:, :4], np.array([ranks, slots, ranks, slots])
    outside_M = ((ends_M4 < 0) | (ends_M4 >= bounds)).any(axis=1)
    _refuse(outside_M, moves_M5, field, f"not among {ranks} ranks x {slots} slots")
    source_rank_M, _, rank_M, slot_M, expert_M = moves_M5.T
    _refuse(source_rank_M == rank_M, moves_M5, field, "an expert that stays on its rank keeps its slot")
    _refuse(new_RS[rank_M, slot_M] != expert_M, moves_M5, field, "its destination is to hold another expert")
    if np.unique(rank_M * slots + slot_M).size != len(moves_M5):
        raise WireError(f"{field}: two moves have the same destination")


def _refuse(wrong_M: npt.ArrayLike, moves_M5: Int32, field: str, fault: str) -> None:
    """Raise ``WireError`` for the first move that is wrong: source rank and slot, destination, expert."""
    wrong = np.flatnonzero(wrong_M)
    if wrong.size:
        move = int(wrong[0])
        raise WireError(f"{field}[{move}] is {moves_M5[move].tolist()}: {fault}")
