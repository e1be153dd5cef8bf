"""Plans as the ranks receive them. Decoding checks everything that does not depend on the rank's current layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.placement import (
    Int32,
    PlacementError,
    array_digest,
    check_layer,
    check_log2phy,
    layer_digest,
)
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import decode, encode, packed, to_narrowest
from eplb_core.wire.fields import MAX_DIGEST, Digest, Version, WireError, below, each
from eplb_core.wire.generated import agent_pb2, tensor_pb2


@dataclass(frozen=True)
class RankLayer:
    """One layer of a plan as one rank receives it.

    Parameters
    ----------
    layer
        Index of the layer.
    phy2log_RS
        int32 ``[R, S]``, the new placement of the layer on all ranks.
    source_RS
        int32 ``[R, S]``, for each slot, the physical id of the slot that its weights come from. A slot that keeps its
        weights refers to itself.
    log2phy_E
        int32 ``[E]`` or ``[E, D]``, the receiving rank's new table.
    log2phy_digests
        Table digest of each token group with several ranks; see ``shared_digests``.

    Examples
    --------
    Two ranks with two slots each. Slot 1 of rank 1 gets its weights from slot 0 of rank 0, which holds expert 0:

    >>> phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    >>> source_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    >>> RankLayer(5, phy2log_RS, source_RS, np.array([0, 1, 2]), ()).moves_M5
    array([[0, 0, 1, 1, 0]], dtype=int32)
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.LayerUpdate

    layer: Annotated[int, below("layers")]
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    source_RS: Annotated[Int32, "sources", packed("ranks", "slots")]
    log2phy_E: Annotated[Int32, packed("experts", "entries")]
    log2phy_digests: Annotated[tuple[int, ...], each(None, MAX_DIGEST)]

    @cached_property
    def moves_M5(self) -> Int32:
        """Moves of the layer in destination order, int32 ``[M, 5]``.

        The columns are source rank, source slot, destination rank, destination slot and expert.
        """
        source_P = self.source_RS.ravel()
        slots = self.source_RS.shape[1]
        to_M = np.flatnonzero(source_P != np.arange(source_P.size))
        ends_4M = (*np.divmod(source_P[to_M], slots), *np.divmod(to_M, slots))
        return np.stack([*ends_4M, self.phy2log_RS.ravel()[to_M]], axis=1).astype(np.int32)


def sources_of(moves_M5: Int32, ranks: int, slots: int) -> Int32:
    """Convert a layer's moves to ``source_RS`` and return it, int32 ``[R, S]``.

    Parameters
    ----------
    moves_M5
        int32 ``[M, 5]``, as in ``RankLayer.moves_M5``.
    ranks
        R, number of ranks.
    slots
        S, slots per rank.

    Examples
    --------
    >>> sources_of(np.array([[0, 0, 1, 1, 0]]), ranks=2, slots=2)
    array([[0, 1],
           [2, 0]], dtype=int32)
    """
    source_P = np.arange(ranks * slots, dtype=np.int32)
    source_P[moves_M5[:, 2] * slots + moves_M5[:, 3]] = moves_M5[:, 0] * slots + moves_M5[:, 1]
    return source_P.reshape(ranks, slots)


@dataclass(frozen=True)
class RankPlan:
    """A plan as one rank receives it. Plans of different ranks differ only in their tables.

    Parameters
    ----------
    plan_id
        Id of the plan, from the service.
    leader_term
        Leader term of the service.
    base_epoch
        Epoch of the layout that the plan changes.
    base_digest
        Digest of the placement that the plan changes.
    layers
        Layers that change, in the order in which they switch.
    digest
        Digest of the fields that are the same on all ranks. It does not cover ``leader_term``.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Plan

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
        """Return the plan with its digest computed. See ``RankPlan`` for the parameters."""
        digest = _plan_digest(plan_id, base_epoch, base_digest, layers)
        return cls(plan_id, leader_term, base_epoch, base_digest, layers, digest)

    @cached_property
    def moved_LC(self) -> npt.NDArray[np.int64]:
        """Per layer, the number of experts received by each rank, followed by the number sent by each rank.

        int64 ``[layers, 2R]``.
        """
        moved = []
        for layer in self.layers:
            ranks = len(layer.source_RS)
            received_R, sent_R = (
                np.bincount(layer.moves_M5[:, column], minlength=ranks) for column in (2, 0)
            )
            moved.append(np.concatenate([received_R, sent_R]))
        return np.array(moved, dtype=np.int64)


def table_digest(log2phy_E: Int32) -> int:
    """Return the 63-bit digest of one rank's table for one layer."""
    return array_digest(np.ascontiguousarray(log2phy_E, dtype="<i4"), salt="log2phy")


def sharing(token_groups: Sequence[int]) -> list[int]:
    """Return the token groups with several ranks, in ascending order. Ranks of the same group must have equal tables.

    Parameters
    ----------
    token_groups
        Token group of each rank.

    Examples
    --------
    >>> sharing([5, 3, 3, 5, 1])
    [3, 5]
    """
    return sorted(group for group, ranks in Counter(token_groups).items() if ranks > 1)


def shared_digests(log2phy_RE: Int32, token_groups: Sequence[int]) -> tuple[int, ...]:
    """Return the ``table_digest`` of each token group with several ranks, in the order of ``sharing``.

    Parameters
    ----------
    log2phy_RE
        int32 ``[R, E]`` or ``[R, E, D]``, one layer's tables of all source ranks.
    token_groups
        Token group of each rank.
    """
    return tuple(table_digest(log2phy_RE[token_groups.index(group)]) for group in sharing(token_groups))


def _plan_digest(plan_id: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]) -> int:
    """Return the 63-bit digest of the plan content that all ranks must agree on, which excludes their tables."""
    facts = [plan_id, base_epoch, base_digest]
    for layer in layers:
        tables_G = np.array(layer.log2phy_digests, dtype="<u8")
        source_RS = np.ascontiguousarray(layer.source_RS, dtype="<i4")
        facts += [layer.layer, layer_digest(layer.layer, layer.phy2log_RS)]
        facts += [array_digest(source_RS, salt="sources"), array_digest(tables_G, salt="tables")]
    return array_digest(np.array(facts, dtype="<u8"), salt="plan")


class SharedPlan:
    """One plan for all ranks, encoded once. The ranks' messages differ only in their tables.

    Each message lists the slots of all ranks, so the total size of all messages grows with the square of the number of
    ranks. Therefore, only one message is kept in memory, and ``response`` overwrites its tables with those of the
    requested rank.

    Parameters
    ----------
    plan
        The plan for any one of the ranks.
    tables
        Tables of all source ranks for each layer of the plan, int32 ``[R, E]`` or ``[R, E, D]``.

    Attributes
    ----------
    size
        Size of one rank's message, in bytes.
    """

    def __init__(self, plan: RankPlan, tables: Sequence[Int32]) -> None:
        narrow_tables = [to_narrowest(table) for table in tables]
        rows = [narrow.reshape(len(narrow), -1).view(np.uint8) for _, narrow in narrow_tables]
        self._tables_RB = np.concatenate(rows, axis=1)
        response = agent_pb2.ConnectResponse(plan=encode(plan))

        def filled_with(byte: bytes) -> npt.NDArray[np.uint8]:
            """Return the message with every byte of its tables set to ``byte``."""
            for update, (code, narrow) in zip(response.plan.layers, narrow_tables, strict=True):
                data = byte * narrow[0].nbytes
                table = tensor_pb2.PackedArray(dtype=code, shape=narrow.shape[1:], data=data)  # type: ignore[arg-type]
                update.log2phy.CopyFrom(table)
            return np.frombuffer(response.SerializeToString(), dtype=np.uint8)

        # The two messages differ only in the bytes of the tables.
        self._message = filled_with(b"\x00").copy()
        self._table_bytes = np.flatnonzero(self._message != filled_with(b"\xff"))
        self.size = self._message.size

    def response(self, rank: int) -> bytes:
        """Return the encoded ``ConnectResponse`` for one rank."""
        # Each call overwrites the bytes of all tables, so no data from a different rank remains.
        self._message[self._table_bytes] = self._tables_RB[rank]
        encoded: bytes = self._message.tobytes()
        return encoded


def decode_plan(message: agent_pb2.Plan, shape: Shape) -> RankPlan:
    """Decode and validate the plan that a rank received, and return it.

    Checks that need the current placement or the token groups are left to the caller (``check_sources``).

    Parameters
    ----------
    message
        The message.
    shape
        Shape of the rank's deployment.

    Raises
    ------
    WireError
        If a layer is not a valid placement, a table does not fit it, a source is invalid, or the digest differs from
        the recomputed one. The error message names the field.
    """
    plan = decode(RankPlan, message, shape.sizes)
    if not plan.layers:
        raise WireError("plan.layers is empty; a plan changes at least one layer")
    indices = [layer.layer for layer in plan.layers]
    if len(set(indices)) != len(indices):
        raise WireError(f"plan.layers contains a layer twice: {indices}")
    for layer in plan.layers:
        _check_layer(layer, shape)
    digest = _plan_digest(plan.plan_id, plan.base_epoch, plan.base_digest, plan.layers)
    if plan.digest != digest:
        raise WireError(f"plan.digest is {plan.digest:#x}, but the digest of its content is {digest:#x}")
    return plan


def check_sources(layer: RankLayer, old_RS: Int32) -> None:
    """Raise ``WireError`` unless each slot gets its weights from a slot that currently holds its expert.

    Parameters
    ----------
    layer
        The layer.
    old_RS
        int32 ``[R, S]``, the layer's current placement.
    """
    sent_expert_RS = old_RS.ravel()[layer.source_RS]
    fault = f"which does not hold its expert in layer {layer.layer}"
    _reject_first(layer, sent_expert_RS != layer.phy2log_RS, fault)


def _check_layer(layer: RankLayer, shape: Shape) -> None:
    """Raise ``WireError`` unless the placement, table and sources of a layer are valid."""
    where = f"layer {layer.layer}"
    try:
        check_layer(layer.phy2log_RS, shape.experts, f"{where} physical_to_logical")
        check_log2phy(layer.log2phy_E, layer.phy2log_RS, f"{where} log2phy", deals=shape.width > 1)
    except PlacementError as error:
        raise WireError(str(error)) from error
    source_RS = layer.source_RS
    ranks, slots = source_RS.shape
    is_outside_RS = (source_RS < 0) | (source_RS >= ranks * slots)
    _reject_first(layer, is_outside_RS, f"which is not one of the {ranks} x {slots} slots")
    is_same_rank_RS = source_RS // slots == np.arange(ranks)[:, None]
    is_same_slot_RS = source_RS == np.arange(ranks * slots).reshape(ranks, slots)
    fault = "which is on the same rank; an expert that stays on its rank must keep its slot"
    _reject_first(layer, is_same_rank_RS & ~is_same_slot_RS, fault)


def _reject_first(layer: RankLayer, is_wrong_RS: npt.NDArray[np.bool_], fault: str) -> None:
    """Raise ``WireError`` for the first slot with a wrong source, if there is one."""
    wrong = np.argwhere(is_wrong_RS)
    if wrong.size:
        rank, slot = wrong[0].tolist()
        source = layer.source_RS[rank, slot]
        raise WireError(
            f"layer {layer.layer} sources: rank {rank} slot {slot} gets its weights from slot {source}, {fault}"
        )
