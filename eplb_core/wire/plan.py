"""Plans as each rank receives them: the layers to switch, with everything that a rank can check for itself checked."""

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
from eplb_core.wire.codec import decode, encode, narrowed, packed
from eplb_core.wire.fields import MAX_DIGEST, Digest, Version, WireError, below, each
from eplb_core.wire.generated import agent_pb2, tensor_pb2


@dataclass(frozen=True)
class RankLayer:
    """One layer of a plan as one rank receives it.

    ``phy2log_RS`` is the whole layer after the switch, ``source_RS`` the slot, numbered over all ranks, that each one's
    weights come from: its own where it keeps them. ``log2phy_E`` is the receiving rank's table, ``[E]``, or ``[E, D]``
    where it deals, ``log2phy_digests`` are as ``shared_digests`` gives them.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.LayerUpdate

    layer: Annotated[int, below("layers")]
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    source_RS: Annotated[Int32, "sources", packed("ranks", "slots")]
    log2phy_E: Annotated[Int32, packed("experts", "entries")]
    log2phy_digests: Annotated[tuple[int, ...], each(None, MAX_DIGEST)]

    @cached_property
    def moves_M5(self) -> Int32:
        """Source rank and slot, destination rank and slot, expert of each slot that receives weights, int32 ``[M, 5]``.

        In order of destination.
        """
        source_P, slots = self.source_RS.ravel(), self.source_RS.shape[1]
        to_M = np.flatnonzero(source_P != np.arange(source_P.size))
        ends_4M = (*np.divmod(source_P[to_M], slots), *np.divmod(to_M, slots))
        return np.stack([*ends_4M, self.phy2log_RS.ravel()[to_M]], axis=1).astype(np.int32)


def sources_of(moves_M5: Int32, ranks: int, slots: int) -> Int32:
    """``RankLayer.source_RS`` of moves, int32 ``[R, S]``."""
    source_P = np.arange(ranks * slots, dtype=np.int32)
    source_P[moves_M5[:, 2] * slots + moves_M5[:, 3]] = moves_M5[:, 0] * slots + moves_M5[:, 1]
    return source_P.reshape(ranks, slots)


@dataclass(frozen=True)
class RankPlan:
    """Layers to switch, in order; equal on all ranks but for tables. ``digest`` is a fingerprint of the rest."""

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
        """Compute the digest.

        ``plan_id`` and ``leader_term`` are the service's, ``base_epoch`` and ``base_digest`` version and fingerprint of
        the placement that it starts from, ``layers`` what changes, in the order of the switches.
        """
        digest = _plan_digest(plan_id, base_epoch, base_digest, layers)
        return cls(plan_id, leader_term, base_epoch, base_digest, layers, digest)

    @cached_property
    def moved_LC(self) -> npt.NDArray[np.int64]:
        """Number of experts that each rank receives, then that each rank sends, by layer, int64 ``[layers, 2R]``."""
        moved = []
        for layer in self.layers:
            ranks = len(layer.source_RS)
            sides = [np.bincount(layer.moves_M5[:, column], minlength=ranks) for column in (2, 0)]
            moved.append(np.concatenate(sides))
        return np.array(moved, dtype=np.int64)


def table_digest(log2phy_E: Int32) -> int:
    """63-bit fingerprint of one rank's table of one layer."""
    return array_digest(np.ascontiguousarray(log2phy_E, dtype="<i4"), salt="log2phy")


def sharing(token_groups: Sequence[int]) -> list[int]:
    """Token groups of several ranks, ascending: ranks that see the same tokens must get one table."""
    return sorted(group for group, ranks in Counter(token_groups).items() if ranks > 1)


def shared_digests(log2phy_RE: Int32, token_groups: Sequence[int]) -> tuple[int, ...]:
    """``table_digest`` of each group that ``sharing`` names, by one layer's tables of all ranks."""
    return tuple(table_digest(log2phy_RE[token_groups.index(group)]) for group in sharing(token_groups))


def _plan_digest(plan_id: int, base_epoch: int, base_digest: int, layers: tuple[RankLayer, ...]) -> int:
    """63-bit fingerprint of all that the ranks must agree on: everything but each rank's own table."""
    facts = [plan_id, base_epoch, base_digest]
    for layer in layers:
        tables_G = np.array(layer.log2phy_digests, dtype="<u8")
        source_RS = np.ascontiguousarray(layer.source_RS, dtype="<i4")
        facts += [layer.layer, layer_digest(layer.layer, layer.phy2log_RS)]
        facts += [array_digest(source_RS, salt="sources"), array_digest(tables_G, salt="tables")]
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


def decode_plan(message: agent_pb2.Plan, shape: Shape) -> RankPlan:
    """Return the plan that a rank received, for a deployment of ``shape``.

    What depends on the placement that is installed, and on which ranks share tokens, is not checked here.

    Raises
    ------
    WireError
        A layer is no valid placement, the table does not fit it, a slot's weights come from nowhere or from its own
        rank, or the digest is not the one recomputed here; the text names the field.
    """
    plan = decode(RankPlan, message, shape.sizes)
    if not plan.layers:
        raise WireError("plan.layers: names no layers")
    indices = [layer.layer for layer in plan.layers]
    if len(set(indices)) != len(indices):
        raise WireError(f"plan.layers: a layer is named twice, among {indices}")
    for layer in plan.layers:
        _check_layer(layer, shape)
    digest = _plan_digest(plan.plan_id, plan.base_epoch, plan.base_digest, plan.layers)
    if plan.digest != digest:
        raise WireError(f"plan.digest is {plan.digest:#x}, its content says {digest:#x}")
    return plan


def check_sources(layer: RankLayer, old_RS: Int32) -> None:
    """Raise ``WireError`` unless each slot's weights come from one that holds its expert in ``old_RS``."""
    held_RS = old_RS.ravel()[layer.source_RS]
    _refuse(layer, held_RS != layer.phy2log_RS, f"that does not hold its expert in layer {layer.layer}")


def _check_layer(layer: RankLayer, shape: Shape) -> None:
    where = f"layer {layer.layer}"
    try:
        check_layer(layer.phy2log_RS, shape.experts, f"{where} physical_to_logical")
        check_log2phy(layer.log2phy_E, layer.phy2log_RS, f"{where} log2phy", deals=shape.width > 1)
    except PlacementError as error:
        raise WireError(str(error)) from error
    source_RS, ranks, slots = layer.source_RS, *layer.source_RS.shape
    _refuse(layer, (source_RS < 0) | (source_RS >= ranks * slots), f"not among {ranks} ranks x {slots} slots")
    own_RS = np.arange(ranks * slots).reshape(ranks, slots)
    within_RS = (source_RS // slots == np.arange(ranks)[:, None]) & (source_RS != own_RS)
    _refuse(layer, within_RS, "of its own rank; an expert that stays on its rank keeps its slot")


def _refuse(layer: RankLayer, wrong_RS: npt.NDArray[np.bool_], fault: str) -> None:
    """Raise ``WireError`` for the first slot whose source is wrong."""
    wrong = np.argwhere(wrong_RS)
    if wrong.size:
        rank, slot = wrong[0].tolist()
        source = layer.source_RS[rank, slot]
        raise WireError(f"layer {layer.layer} sources: rank {rank} slot {slot} has slot {source}, {fault}")
