"""Messages between a service and its operators: decisions and balance as they are sent, and heat as it is counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from google.protobuf.message import Message

from eplb_core.placement import Int32, Placement, PlacementError
from eplb_core.planner.verdicts import LayerVerdict, MovePrice, Worth
from eplb_core.wire import fields
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import decode, encode, pack, packed, placed, register, repeats, unpack
from eplb_core.wire.fields import WireError, check_count
from eplb_core.wire.generated import operator_pb2, tensor_pb2

MAX_PENDING_STEPS = 1 << 20
"""Steps that one rank may be ahead of another."""
MAX_WATCHED_ENTRIES = 1 << 23
"""Entries of all ranks' tables that watchers are sent; beyond, a message would be too large."""
_MIN_SHOWN, _MAX_SHOWN = -1e9, float(1 << 36)
"""Bounds on numbers that are shown, such as milliseconds, tokens per second, or seconds since 1970."""


register(MovePrice, operator_pb2.MovePrice)
register(Worth, operator_pb2.Worth)
register(LayerVerdict, operator_pb2.PastVerdict)


class _ByLayer:
    """Moves of a plan by layer, which travel as a list."""

    def sent(self, moves: Mapping[int, Int32]) -> list[operator_pb2.LayerMoves]:
        """Return the list as it travels."""
        return [operator_pb2.LayerMoves(layer=layer, moves=pack(moves[layer])) for layer in sorted(moves)]


@dataclass(frozen=True)
class PastPlan:
    """One decision of the past, and the outcome of its plan; ``plan_id`` is 0 where none was offered.

    A message ``PastPlan`` has no ``solve_seconds`` and no ``moves`` (int32 ``[M, 5]`` by layer), a ``MadeDecision``
    neither ``leader_term`` nor ``base_epoch``.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.PastPlan

    plan_id: int
    at: float
    outcome: str
    reason: str
    committed: int
    verdicts: tuple[LayerVerdict, ...] = ()
    leader_term: int = 0
    base_epoch: int = 0
    solve_seconds: float = 0.0
    moves: Annotated[Mapping[int, Int32], _ByLayer()] = field(default_factory=dict)


@dataclass(frozen=True)
class BalancePoint:
    """Balance around one moment, in seconds since 1970; a ratio that is not known is NaN.

    Ratios are means over the layers that had tokens: realised, as the last decision expected, its noise floor, and the
    same steps left alone.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.BalancePoint

    at: float
    par: float
    par_planned: float
    noise_floor: float
    layers_switched: int
    par_left_alone: float = math.nan


@dataclass(frozen=True)
class ServedModel:
    """Placement of a deployment, as watchers of its heat learn of it.

    ``nodes_R`` is the node of each rank; ``pending_steps`` bounds how far the fastest rank may be ahead, and the steps
    of one report. ``log2phy_RLE`` are the tables of all source ranks, ``[R, L, E]`` or ``[R, L, E, D]``; ``None`` where
    they are too large (``MAX_WATCHED_ENTRIES``), or not sent.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.ServedModel

    shape: Shape
    nodes_R: Annotated[tuple[int, ...], fields.each("ranks", fields.MAX_RANKS)]
    placement: Annotated[Placement, "physical_to_logical", placed]
    layer_epochs: fields.LayerEpochs
    pending_steps: Annotated[int, fields.below(MAX_PENDING_STEPS + 1, least=1)]
    log2phy_RLE: Annotated[Int32 | None, packed("ranks", "layers", "experts", "entries")] = None

    @property
    def ranks(self) -> int:
        """R, beside the shape in the message."""
        return self.shape.ranks

    def check(self, field: str) -> None:
        """Raise ``WireError`` where an entry of a table names a slot that does not hold its expert."""
        if self.log2phy_RLE is not None:
            _check_tables(self.placement, self.log2phy_RLE, field)


@dataclass(frozen=True)
class SwitchedLayer:
    """``layer`` holds the experts ``phy2log_RS``, int32 ``[R, S]``, since ``epoch``.

    ``log2phy_RE`` are its tables, int32 ``[R, E]`` or ``[R, E, D]``; ``None`` from a service that does not send them.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.SwitchedLayer

    layer: Annotated[int, fields.below("layers")]
    epoch: fields.Version
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    log2phy_RE: Annotated[Int32 | None, packed("ranks", "experts", "entries")] = None


def encode_served(served: ServedModel) -> operator_pb2.ServedModel:
    """Return the message, without tables that are too large for it."""
    tables_RLE = served.log2phy_RLE
    is_large = tables_RLE is not None and tables_RLE.size > MAX_WATCHED_ENTRIES
    message: operator_pb2.ServedModel = encode(replace(served, log2phy_RLE=None) if is_large else served)
    return message


def decode_served(message: operator_pb2.ServedModel) -> ServedModel:
    """Return what is served; raises ``WireError`` naming the field that cannot be what it is."""
    return decode(ServedModel, message, {"ranks": message.ranks}, "served")


def decode_switched(message: operator_pb2.SwitchedLayer, shape: Shape) -> SwitchedLayer:
    """Return a switched layer of a deployment of ``shape``; raises as ``decode_served`` does."""
    switched = decode(SwitchedLayer, message, shape.sizes, "switched")
    try:
        placement = Placement(switched.phy2log_RS[None], shape.experts)
    except PlacementError as error:
        raise WireError(f"switched.physical_to_logical: {error}") from error
    if switched.log2phy_RE is not None:
        _check_tables(placement, switched.log2phy_RE[:, None], "switched")
    return switched


def encode_placement(
    epoch: int, digest: int, placement: Placement, log2phy_RLE: Int32
) -> operator_pb2.GetPlacementResponse:
    """Return the message of what is served, with the tables of all ranks, ``[R, L, E]`` or ``[R, L, E, D]``."""
    return operator_pb2.GetPlacementResponse(
        epoch=epoch,
        digest=digest,
        experts=placement.experts,
        physical_to_logical=pack(placement.phy2log_LRS),
        log2phy=pack(log2phy_RLE),
    )


def decode_placement(message: operator_pb2.GetPlacementResponse) -> tuple[Placement, Int32]:
    """Return placement and tables; raises as ``decode_served`` does."""
    experts = check_count(message.experts, "placement.experts", fields.MAX_EXPERTS + 1, least=1)
    check_count(message.epoch, "placement.epoch", fields.MAX_VERSION)
    check_count(message.digest, "placement.digest", fields.MAX_DIGEST)
    placement = placed(message.physical_to_logical, "placement.physical_to_logical", {"experts": experts})
    size = (placement.ranks, placement.layers, experts)
    entries = () if len(message.log2phy.shape) == len(size) else (None,)
    log2phy_RLE = unpack(message.log2phy, (*size, *entries), "placement.log2phy")
    _check_tables(placement, log2phy_RLE, "placement")
    return placement, log2phy_RLE


def _check_tables(placement: Placement, log2phy_RLE: Int32, field: str) -> None:
    try:
        placement.check_log2phy(log2phy_RLE)
    except PlacementError as error:
        raise WireError(f"{field}.log2phy: {error}") from error


def checked_answer(message: Any) -> Any:
    """Return a service's answer as it may be shown: texts fit for a terminal, numbers that people can read.

    Raises
    ------
    WireError
        A name, a number or a placement cannot be what it is; the text names it.
    """
    if isinstance(message, operator_pb2.GetPlacementResponse):
        decode_placement(message)
    for descriptor, value in message.ListFields():
        name, parts = descriptor.name, list(value) if repeats(descriptor) else [value]
        if name == "deployment":
            fields.check_deployment(value, name)
        if descriptor.type == descriptor.TYPE_STRING:
            cleaned = [fields.printable(text, fields.MAX_LINE) for text in parts]
            if repeats(descriptor):
                value[:] = cleaned
            else:
                setattr(message, name, cleaned[0])
        for part in parts:
            if isinstance(part, Message):
                checked_answer(part)
            elif isinstance(part, float) and not (math.isnan(part) or _MIN_SHOWN <= part <= _MAX_SHOWN):
                raise WireError(f"{name} is {part}; it must be {_MIN_SHOWN:g} to {_MAX_SHOWN:g}")
    return message


def as_document(message: Any) -> dict[str, Any]:
    """Every field by its name, messages within as documents, for JSON.

    64-bit numbers stay numbers, digests are hexadecimal text, packed arrays nested lists; what is optional or a message
    and absent is ``None``. Raises ``WireError`` where a packed array within does not hold what it claims.
    """
    return {field.name: _document_value(message, field) for field in message.DESCRIPTOR.fields}


def _document_value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if repeats(field):
        return [as_document(item) if field.message_type else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is None:
        return f"{value:#018x}" if field.name == "digest" else value
    if isinstance(value, tensor_pb2.PackedArray):
        return unpack(value, [None] * len(value.shape), field.name).tolist()
    return as_document(value)
