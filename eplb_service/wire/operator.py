"""Messages between a service and its operators: status, history, balance, heat as it is counted, all of it checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from google.protobuf.message import Message

from eplb_service.placement import Int32, Placement, PlacementError
from eplb_service.wire import fields
from eplb_service.wire.agent import Shape
from eplb_service.wire.codec import decode, encode, pack, packed, placed, unpack
from eplb_service.wire.fields import WireError, check_count
from eplb_service.wire.generated import operator_pb2, tensor_pb2

MOST_PLANS = 100
"""Plans in one answer."""
MOST_POINTS = 1 << 16
MOST_PENDING_STEPS = 1 << 20
"""Steps that one rank may be ahead of another."""
MOST_WATCHED_ENTRIES = 1 << 23
"""Entries of all ranks' tables that watchers are sent; beyond, a message would be too large."""
OUTCOMES = ("", "done", "refused", "aborted", "timed_out", "interrupted")
"""Ends of a plan; empty while it is under way."""
MOVE_PRICES = ("measured", "partly measured", "stated", "assumed")
"""Sources of the price of moves, best first."""
TIME_PRICES = ("measured", "fitted", "stated", "assumed")
"""Sources of what tokens cost in time, best first."""
_MOST_DEPLOYMENTS = 1 << 16
_Problems = Annotated[tuple[fields.Line, ...], fields.UpTo(2 * fields.MOST_RANKS)]


@dataclass(frozen=True)
class MovePrice:
    """Price of the last decision's moves: the part of its ratio that a layer must win to have every slot moved.

    ``kind`` is one of ``MOVE_PRICES``, ``reason`` what it was computed from. The milliseconds are those of steps lost
    for each expert that a rank receives, for each megabyte of weights, and while the model waits for a layer's switch;
    ``None`` where not known.
    """

    MESSAGE: ClassVar = operator_pb2.MovePrice

    price: fields.Ratio
    kind: Annotated[str, fields.one_of(MOVE_PRICES)]
    reason: fields.Line
    ms_per_move: fields.Ratio | None = None
    ms_per_megabyte: fields.Ratio | None = None
    ms_per_switch: fields.Ratio | None = None


@dataclass(frozen=True)
class Worth:
    """Worth of balancing: the slowest ranks of all layers together, milliseconds per step, mean over ``steps`` steps.

    Left alone under the layout that was met first, serving as now, and best under what ``best`` names. The gain is left
    alone less served, with its 95 % interval; ``price_kind`` one of ``TIME_PRICES``, ``price`` the same for people.
    ``step_ms`` is the wall time of a step as served, mean of ``timed_steps``; what is ``None`` is not known.
    """

    MESSAGE: ClassVar = operator_pb2.Worth

    steps: fields.WindowSteps
    left_alone_ms: fields.Ratio
    serving_ms: fields.Ratio
    best_ms: fields.Ratio
    best: fields.Line
    gain_ms: fields.Finite
    gain_low_ms: fields.Finite
    gain_high_ms: fields.Finite
    price_kind: Annotated[str, fields.one_of(TIME_PRICES)]
    price: fields.Line
    timed_steps: fields.WindowSteps = 0
    step_ms: fields.Finite | None = None
    gain_percent: fields.Finite | None = None
    tokens_per_second: fields.Finite | None = None
    tokens_per_second_won: fields.Finite | None = None

    @property
    def verdict(self) -> str:
        """``helps``, ``costs`` or ``not shown to help``: what the interval says."""
        if self.gain_low_ms > 0:
            return "helps"
        return "costs" if self.gain_high_ms < 0 else "not shown to help"


@dataclass(frozen=True)
class DeploymentStatus:
    """A deployment as a whole; sizes are 0 while they are not known.

    ``par`` is the realised peak-to-average ratio of the window, 0 while that is empty; the five counts after
    ``window_steps`` are totals over its life; ``plan_id`` is 0 where no plan is under way; ``worth`` and ``move_price``
    are ``None`` until a decision has judged its steps, or solved anything.
    """

    MESSAGE: ClassVar = operator_pb2.DeploymentStatus

    deployment: fields.Deployment
    layers: fields.Layers = 0
    experts: Annotated[int, fields.below(fields.MOST_EXPERTS + 1)] = 0
    ranks: Annotated[int, fields.below(fields.MOST_RANKS + 1)] = 0
    slots: Annotated[int, fields.below(fields.MOST_SLOTS + 1)] = 0
    agents_connected: Annotated[int, fields.below(fields.MOST_RANKS + 1)] = 0
    epoch: fields.Version = 0
    digest: fields.Digest = 0
    par: fields.Ratio = 0.0
    window_steps: fields.WindowSteps = 0
    steps_received: fields.Total = 0
    steps_lost: fields.Total = 0
    layers_switched: fields.Total = 0
    experts_moved: fields.Total = 0
    bytes_moved: fields.Total = 0
    paused: bool = False
    plan_id: fields.Version = 0
    last_decision: fields.Line = ""
    problems: _Problems = ()
    leader_term: fields.Version = 0
    worth: Worth | None = None
    move_price: MovePrice | None = None


@dataclass(frozen=True)
class LayerStatus:
    """One layer: its realised ratio, what the last plan for it promised (0: none), and when it last changed."""

    MESSAGE: ClassVar = operator_pb2.LayerStatus

    layer: fields.Layer
    par: fields.Ratio
    planned_par: fields.Measured
    epoch: fields.Version


@dataclass(frozen=True)
class AgentStatus:
    """One rank's agent as it last reported; what is ``None`` is not known.

    ``staging_bytes`` and ``ring_bytes`` are held for experts that wait for their commit, and in which layers count
    heat.
    """

    MESSAGE: ClassVar = operator_pb2.AgentStatus

    rank: Annotated[int, fields.below(fields.MOST_RANKS)]
    node: fields.Name
    connected: bool
    step: Annotated[int, fields.below(2 * fields.LAST_STEP)]
    epoch: fields.Version
    error: fields.Line
    agent_version: fields.Name
    dropped_steps: fields.Step
    silent_seconds: fields.Time | None = None
    staging_bytes: fields.Bytes | None = None
    ring_bytes: fields.Bytes | None = None


@dataclass(frozen=True)
class LayerVerdict:
    """Decision about one layer, and why; ratios are peak-to-average ratios per step, NaN for a layer without tokens.

    Parameters
    ----------
    par_seen, par_planned
        Under the placement and tables that serve now, and as decided.
    noise_floor
        Ratio that token sampling alone gives a perfectly balanced layer: computed for independent draws, or less where
        ranks measurably jump less than that. No placement can win below it.
    moves, bytes
        Slots that must receive weights, and what they are sent; 0 where the host does not report an expert's size.
    reason
        For operators, one line. Where it names a ratio of episodes it says so: the search sees episodes, not steps.
    hindsight
        Ratio that a placement made for this very window would have had, whatever it moved; ``None`` where the decision
        did not look into the layer.
    us_seen, us_planned
        Microseconds of the slowest rank, as it serves now and as decided; ``None`` without a cost curve. Not sent.
    optimism
        How much worse than on the heat that they were fitted to such changes did on other heat (hold-out); 0 for a
        layer that stays, ``None`` where it was not held out. Not sent.
    """

    MESSAGE: ClassVar = operator_pb2.PastVerdict

    layer: fields.Layer
    par_seen: fields.Measured
    par_planned: fields.Measured
    noise_floor: fields.Measured
    moves: Annotated[int, fields.below(fields.MOST_RANKS * fields.MOST_SLOTS + 1)]
    changed: bool
    reason: fields.Line
    hindsight: fields.Measured | None = None
    bytes: fields.Bytes = 0
    us_seen: float | None = None
    us_planned: float | None = None
    optimism: float | None = 0.0

    @property
    def regret(self) -> float | None:
        """Ratio that the last decision left to win on this window: that seen less that of hindsight, at least 0."""
        return None if self.hindsight is None else max(0.0, self.par_seen - self.hindsight)


class _MovesByLayer:
    """Moves of a plan by layer, which travel as a list."""

    def __call__(self, listed: Sequence[Any], field: str, _sizes: fields.Sizes) -> dict[int, Int32]:
        check_count(len(listed), f"the length of {field}", fields.MOST_LAYERS + 1)
        moves = {}
        for number, one in enumerate(listed):
            layer = check_count(one.layer, f"{field}[{number}].layer", fields.MOST_LAYERS)
            moves[layer] = packed(None, 5, least=0)(one.moves, f"{field}[{number}].moves", {})
        return moves

    def sent(self, moves: Mapping[int, Int32]) -> list[operator_pb2.LayerMoves]:
        """Return the list as it travels."""
        return [operator_pb2.LayerMoves(layer=layer, moves=pack(moves[layer])) for layer in sorted(moves)]


@dataclass(frozen=True)
class PastPlan:
    """One decision of the past, and the outcome of its plan; ``plan_id`` is 0 where none was offered.

    A message ``PastPlan`` has no ``solve_seconds`` and no ``moves`` (int32 ``[M, 5]`` by layer), a ``MadeDecision``
    neither ``leader_term`` nor ``base_epoch``.
    """

    MESSAGE: ClassVar = operator_pb2.PastPlan

    plan_id: fields.Version
    at: fields.Time
    outcome: Annotated[str, fields.one_of(OUTCOMES)]
    reason: fields.Line
    committed: fields.Layers
    verdicts: Annotated[tuple[LayerVerdict, ...], fields.UpTo(fields.MOST_LAYERS)] = ()
    leader_term: fields.Version = 0
    base_epoch: fields.Version = 0
    solve_seconds: fields.Seconds = 0.0
    moves: Annotated[Mapping[int, Int32], _MovesByLayer()] = field(default_factory=dict)


@dataclass(frozen=True)
class BalancePoint:
    """Balance around one moment, in seconds since 1970; a ratio that is not known is NaN.

    Ratios are means over the layers that had tokens: realised, as the last decision expected, and its noise floor.
    """

    MESSAGE: ClassVar = operator_pb2.BalancePoint

    at: fields.Time
    par: fields.Measured
    par_planned: fields.Measured
    noise_floor: fields.Measured
    layers_switched: fields.Total


@dataclass(frozen=True)
class Balance:
    """Balance over time, oldest first, and the last decisions.

    ``rank_loads_LR`` are loads over their layer's mean in thousandths, int32 ``[L, R]``, over ``load_steps`` steps, or
    ``None`` where none was measured.
    """

    MESSAGE: ClassVar = operator_pb2.GetBalanceResponse

    points: Annotated[tuple[BalancePoint, ...], fields.UpTo(MOST_POINTS)] = ()
    rank_loads_LR: Annotated[Int32 | None, packed(None, None, least=0, most=1000 * fields.MOST_RANKS)] = None
    load_steps: fields.WindowSteps = 0
    last_decision: PastPlan | None = None
    last_plan: PastPlan | None = None


@dataclass(frozen=True)
class ServedModel:
    """Placement of a deployment, as watchers of its heat learn of it.

    ``nodes_R`` is the node of each rank; ``pending_steps`` bounds how far the fastest rank may be ahead, and the steps
    of one report. ``log2phy_RLE`` are the tables of all source ranks, ``[R, L, E]`` or ``[R, L, E, D]``; ``None`` where
    they are too large (``MOST_WATCHED_ENTRIES``), or not sent.
    """

    MESSAGE: ClassVar = operator_pb2.ServedModel

    shape: Shape
    nodes_R: Annotated[tuple[int, ...], fields.each("ranks", fields.MOST_RANKS)]
    placement: Annotated[Placement, "physical_to_logical", placed]
    layer_epochs: fields.LayerEpochs
    pending_steps: Annotated[int, fields.below(MOST_PENDING_STEPS + 1, least=1)]
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

    MESSAGE: ClassVar = operator_pb2.SwitchedLayer

    layer: Annotated[int, fields.below("layers")]
    epoch: fields.Version
    phy2log_RS: Annotated[Int32, "physical_to_logical", packed("ranks", "slots")]
    log2phy_RE: Annotated[Int32 | None, packed("ranks", "experts", "entries")] = None


def encode_served(served: ServedModel) -> operator_pb2.ServedModel:
    """Return the message, without tables that are too large for it."""
    tables_RLE = served.log2phy_RLE
    is_large = tables_RLE is not None and tables_RLE.size > MOST_WATCHED_ENTRIES
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
    experts = check_count(message.experts, "placement.experts", fields.MOST_EXPERTS + 1, least=1)
    check_count(message.epoch, "placement.epoch", fields.LAST_VERSION)
    check_count(message.digest, "placement.digest", fields.LAST_DIGEST)
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


_PARTS: dict[Any, tuple[type[Any], int]] = {
    operator_pb2.DeploymentStatus: (DeploymentStatus, _MOST_DEPLOYMENTS),
    operator_pb2.LayerStatus: (LayerStatus, fields.MOST_LAYERS),
    operator_pb2.AgentStatus: (AgentStatus, fields.MOST_RANKS),
    operator_pb2.PastPlan: (PastPlan, MOST_PLANS),
}
"""Values that answers consist of, and the most of them in one."""


def checked_answer(message: Any) -> Any:
    """Return a service's answer as it may be shown: fields within bounds, texts fit for a terminal.

    Raises
    ------
    WireError
        A field cannot be what it is; the text names it.
    """
    if isinstance(message, operator_pb2.GetPlacementResponse):
        decode_placement(message)
        return message
    if isinstance(message, operator_pb2.GetBalanceResponse):
        return encode(decode(Balance, message))
    if isinstance(message, operator_pb2.RebalanceResponse):
        check_count(message.plan_id, "rebalance.plan_id", fields.LAST_VERSION)
        message.outcome = fields.printable(message.outcome, fields.LONGEST_LINE)
    for name, descriptor in type(message).DESCRIPTOR.fields_by_name.items():
        if descriptor.message_type is None:
            continue
        kind, most = _PARTS[descriptor.message_type._concrete_class]
        value = getattr(message, name)
        if isinstance(value, Message):
            value.CopyFrom(encode(decode(kind, value, name=name)))
            continue
        check_count(len(value), f"the length of {name}", most + 1)
        for number, part in enumerate(value):
            part.CopyFrom(encode(decode(kind, part, name=f"{name}[{number}]")))
    return message


def as_document(message: Any) -> dict[str, Any]:
    """Every field by its name, messages within as documents, for JSON.

    64-bit numbers stay numbers, digests are hexadecimal text, packed arrays nested lists; what is optional or a message
    and absent is ``None``. Raises ``WireError`` where a packed array within does not hold what it claims.
    """
    return {field.name: _document_value(message, field) for field in message.DESCRIPTOR.fields}


def _document_value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [as_document(item) if field.message_type else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is None:
        return f"{value:#018x}" if field.name == "digest" else value
    if isinstance(value, tensor_pb2.PackedArray):
        return unpack(value, [None] * len(value.shape), field.name).tolist()
    return as_document(value)
