"""Messages between a service and its operators: decisions, balance, placements and heat."""

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
from eplb_core.wire.codec import decode, encode, is_repeated, pack, packed, register, unpack, unpack_placement
from eplb_core.wire.fields import WireError, check_count
from eplb_core.wire.generated import operator_pb2, tensor_pb2

MAX_PENDING_STEPS = 1 << 20
"""Maximum number of steps that one rank may be ahead of another."""
MAX_WATCHED_ENTRIES = 1 << 23
"""Maximum number of table entries, in total over all ranks, in a message to a watcher. Larger tables are not sent."""
_MIN_SHOWN = -1e9
"""Lower bound on numbers shown to operators, such as milliseconds, tokens per second or seconds since 1970."""
_MAX_SHOWN = float(1 << 36)
"""Upper bound on numbers shown to operators."""

register(MovePrice, operator_pb2.MovePrice)
register(Worth, operator_pb2.Worth)
register(LayerVerdict, operator_pb2.PastVerdict)


class _ByLayer:
    """Annotation for a plan's moves, keyed by layer and sent as a list."""

    def to_wire(self, moves: Mapping[int, Int32]) -> list[operator_pb2.LayerMoves]:
        """Return the list to send, in layer order."""
        return [operator_pb2.LayerMoves(layer=layer, moves=pack(moves[layer])) for layer in sorted(moves)]


@dataclass(frozen=True)
class PastPlan:
    """A past decision and the outcome of its plan.

    On the wire, it is either a ``PastPlan``, which omits ``solve_seconds`` and ``moves``, or a ``MadeDecision``, which
    omits ``leader_term`` and ``base_epoch``.

    Parameters
    ----------
    plan_id
        Id of the plan; 0 if the decision did not lead to a plan.
    at
        Time of the decision, in seconds since 1970. In the history, it is the time when the plan was offered.
    outcome
        Outcome of the plan, such as ``done``; empty while it is in progress.
    reason
        Reason, if the plan was not completed.
    committed
        Number of layers that were switched.
    verdicts
        Verdict on each layer.
    leader_term
        Leader term of the service that made the decision.
    base_epoch
        Epoch of the layout that the plan changes.
    solve_seconds
        Duration of the decision, in seconds.
    moves
        Moves, keyed by layer, int32 ``[M, 5]``.
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
    """Balance at one point in time. PARs are means over the layers with tokens; they are NaN if unknown.

    Parameters
    ----------
    at
        Seconds since 1970.
    par
        Realised PAR.
    par_planned
        PAR that the last decision promised.
    noise_floor
        Noise floor at the last decision.
    layers_switched
        Number of layers switched so far.
    par_left_alone
        PAR of the same steps under the initial layout.
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
    """Layout of a deployment, as sent to clients that watch its heat.

    Parameters
    ----------
    shape
        Sizes of the deployment.
    nodes_R
        Index of each rank's node.
    placement
        Current placement.
    layer_epochs
        Epoch at which each layer last changed, ``[L]``.
    pending_steps
        Maximum number of steps that the fastest rank may be ahead of the slowest. It is also the maximum number of
        steps in a heat report.
    log2phy_RLE
        int32 ``[R, L, E]`` or ``[R, L, E, D]``, tables of all source ranks; ``None`` if they are not sent because they
        have more than ``MAX_WATCHED_ENTRIES`` entries.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.ServedModel

    shape: Shape
    nodes_R: Annotated[tuple[int, ...], fields.each("ranks", fields.MAX_RANKS)]
    placement: Annotated[Placement, "physical_to_logical", unpack_placement]
    layer_epochs: fields.LayerEpochs
    pending_steps: Annotated[int, fields.below(MAX_PENDING_STEPS + 1, least=1)]
    log2phy_RLE: Annotated[Int32 | None, packed("ranks", "layers", "experts", "entries")] = None

    @property
    def ranks(self) -> int:
        """Number of ranks, R, which is a field of the message itself rather than of its shape."""
        return self.shape.ranks

    def check(self, field: str) -> None:
        """Raise ``WireError`` if a table entry points to a slot that does not hold its expert."""
        if self.log2phy_RLE is not None:
            _check_tables(self.placement, self.log2phy_RLE, field)


@dataclass(frozen=True)
class SwitchedLayer:
    """A layer after a switch.

    Parameters
    ----------
    layer
        Index of the layer.
    epoch
        Epoch of the switch.
    phy2log_RS
        int32 ``[R, S]``, the new placement.
    log2phy_RE
        int32 ``[R, E]`` or ``[R, E, D]``, the new tables of all source ranks; ``None`` if they are not sent.
    """

    MESSAGE: ClassVar[type[Any]] = operator_pb2.SwitchedLayer

    layer: Annotated[int, fields.below("layers")]
    epoch: fields.Version
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    log2phy_RE: Annotated[Int32 | None, packed("ranks", "experts", "entries")] = None


def encode_served(served: ServedModel) -> operator_pb2.ServedModel:
    """Encode a layout, omitting its tables if they are too large to send."""
    tables_RLE = served.log2phy_RLE
    is_large = tables_RLE is not None and tables_RLE.size > MAX_WATCHED_ENTRIES
    message: operator_pb2.ServedModel = encode(replace(served, log2phy_RLE=None) if is_large else served)
    return message


def decode_served(message: operator_pb2.ServedModel) -> ServedModel:
    """Decode a layout; raises ``WireError`` if a field is invalid."""
    return decode(ServedModel, message, {"ranks": message.ranks}, "served")


def decode_switched(message: operator_pb2.SwitchedLayer, shape: Shape) -> SwitchedLayer:
    """Decode a switched layer of a deployment with this shape; raises ``WireError`` if a field is invalid."""
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
    """Return the response to a request for the current layout.

    Parameters
    ----------
    epoch
        Epoch of the layout.
    digest
        Digest of the placement.
    placement
        The placement.
    log2phy_RLE
        int32 ``[R, L, E]`` or ``[R, L, E, D]``, tables of all source ranks.
    """
    return operator_pb2.GetPlacementResponse(
        epoch=epoch,
        digest=digest,
        experts=placement.experts,
        physical_to_logical=pack(placement.phy2log_LRS),
        log2phy=pack(log2phy_RLE),
    )


def decode_placement(message: operator_pb2.GetPlacementResponse) -> tuple[Placement, Int32]:
    """Return the placement and the tables of all source ranks; raises ``WireError`` if a field is invalid."""
    experts = check_count(message.experts, "placement.experts", fields.MAX_EXPERTS + 1, least=1)
    check_count(message.epoch, "placement.epoch", fields.MAX_VERSION)
    check_count(message.digest, "placement.digest", fields.MAX_DIGEST)
    placement = unpack_placement(
        message.physical_to_logical, "placement.physical_to_logical", {"experts": experts}
    )
    size = (placement.ranks, placement.layers, experts)
    entries = () if len(message.log2phy.shape) == len(size) else (None,)
    log2phy_RLE = unpack(message.log2phy, (*size, *entries), "placement.log2phy")
    _check_tables(placement, log2phy_RLE, "placement")
    return placement, log2phy_RLE


def _check_tables(placement: Placement, log2phy_RLE: Int32, field: str) -> None:
    """Raise ``WireError`` unless the tables fit the placement."""
    try:
        placement.check_log2phy(log2phy_RLE)
    except PlacementError as error:
        raise WireError(f"{field}.log2phy: {error}") from error


def checked_answer(message: Any) -> Any:
    r"""Validate a service's response, make it safe to display, and return it.

    Text fields are cleaned in place for display in a terminal. Names, numbers and placements are checked. Nested
    messages are treated in the same way.

    Raises
    ------
    WireError
        If a name, number or placement is invalid; the error message names the field.

    Examples
    --------
    >>> checked_answer(operator_pb2.RebalanceResponse(plan_id=3, outcome="2 layers\n"))
    plan_id: 3
    outcome: "2 layers "
    <BLANKLINE>
    """
    if isinstance(message, operator_pb2.GetPlacementResponse):
        decode_placement(message)
    for descriptor, value in message.ListFields():
        if descriptor.name == "deployment":
            fields.check_deployment(value, descriptor.name)
        if descriptor.type == descriptor.TYPE_STRING:
            _clean_texts(message, descriptor, value)
        for item in value if is_repeated(descriptor) else [value]:
            if isinstance(item, Message):
                checked_answer(item)
            elif isinstance(item, float) and not (math.isnan(item) or _MIN_SHOWN <= item <= _MAX_SHOWN):
                raise WireError(f"{descriptor.name} is {item}; expected {_MIN_SHOWN:g} to {_MAX_SHOWN:g}")
    return message


def _clean_texts(message: Any, descriptor: Any, value: Any) -> None:
    """Clean one text field of a message, or each string of the field if it is a list."""
    if is_repeated(descriptor):
        value[:] = [fields.printable(text, fields.MAX_LINE) for text in value]
    else:
        setattr(message, descriptor.name, fields.printable(value, fields.MAX_LINE))


def as_document(message: Any) -> dict[str, Any]:
    """Convert a message to a JSON-compatible dictionary that contains every field.

    Nested messages become dictionaries, packed arrays become nested lists, and digests become hexadecimal strings.
    64-bit numbers remain numbers. Absent messages, absent optional fields and NaN are ``None``.

    Raises
    ------
    WireError
        If a packed array is invalid.

    Examples
    --------
    >>> as_document(operator_pb2.LayerMoves(layer=2))
    {'layer': 2, 'moves': None}
    """
    return {field.name: _document_value(message, field) for field in message.DESCRIPTOR.fields}


def _document_value(message: Any, field: Any) -> Any:
    """Return one field's value for ``as_document``."""
    value = getattr(message, field.name)
    if is_repeated(field):
        return [as_document(item) if field.message_type else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is None:
        if isinstance(value, float) and math.isnan(value):
            return None
        return f"{value:#018x}" if field.name == "digest" else value
    if isinstance(value, tensor_pb2.PackedArray):
        return unpack(value, [None] * len(value.shape), field.name).tolist()
    return as_document(value)
