"""What a service reports of a deployment to operators: the whole, its layers and agents, the placement in force."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.placement import Int32, Placement, PlacementError
from eplb_service.wire.codec import pack, unpack
from eplb_service.wire.fields import (
    LAST_DIGEST,
    LAST_STEP,
    LAST_VERSION,
    LONGEST_MESSAGE,
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SLOTS,
    MOST_WINDOW_STEPS,
    WireError,
    check_count,
    check_deployment,
    check_measured,
    check_name,
    check_ratio,
    check_stated_bytes,
    check_time,
    printable,
)
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.move_price import PricedMoves, decode_move_price, encode_move_price
from eplb_service.wire.worth import Worth, decode_worth, encode_worth

MOST_PROBLEMS = 2 * MOST_RANKS
_MOST_TOTAL = LAST_VERSION + 1


@dataclass(frozen=True)
class DeploymentStatus:
    """A deployment as a whole; sizes are 0 while they are not known.

    Parameters
    ----------
    layers, experts, ranks, slots
        Its shape.
    epoch, digest
        Version of the placement in force.
    par
        Realised peak-to-average ratio of the window; 0 while the window is empty.
    steps_received, steps_lost, layers_switched, experts_moved, bytes_moved
        Totals over its life.
    plan_id
        Plan under way; 0 where there is none.
    problems
        What is wrong, one line each.
    leader_term
        Of the service, for this deployment.
    worth
        What balancing is worth; ``None`` until a decision has judged its steps.
    move_price
        What the last decision's moves were priced at; ``None`` until one has solved anything.
    """

    deployment: str
    layers: int = 0
    experts: int = 0
    ranks: int = 0
    slots: int = 0
    agents_connected: int = 0
    epoch: int = 0
    digest: int = 0
    par: float = 0.0
    window_steps: int = 0
    steps_received: int = 0
    steps_lost: int = 0
    layers_switched: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    paused: bool = False
    plan_id: int = 0
    last_decision: str = ""
    problems: tuple[str, ...] = ()
    leader_term: int = 0
    worth: Worth | None = None
    move_price: PricedMoves | None = None


@dataclass(frozen=True)
class LayerStatus:
    """One layer: its realised ratio, what the last plan for it promised (0: none), and when it last changed."""

    layer: int
    par: float
    planned_par: float
    epoch: int


@dataclass(frozen=True)
class AgentStatus:
    """One rank's agent as it last reported, and for how many seconds it has been silent, or ``None``.

    ``staging_bytes`` and ``ring_bytes`` are held for experts that wait for their commit, and in which the layers count
    heat; ``None`` where the agent does not report them.
    """

    rank: int
    node: str
    connected: bool
    step: int
    epoch: int
    error: str
    agent_version: str
    dropped_steps: int
    silent_seconds: float | None = None
    staging_bytes: int | None = None
    ring_bytes: int | None = None


@dataclass(frozen=True)
class DeploymentReport:
    """All that is reported of one deployment."""

    status: DeploymentStatus
    layers: tuple[LayerStatus, ...]
    agents: tuple[AgentStatus, ...]


@dataclass(frozen=True)
class PlacementInForce:
    """What is served: ``log2phy_RLE`` are the tables of all ranks, int32 ``[R, L, E]``, or ``[R, L, E, D]``."""

    epoch: int
    digest: int
    placement: Placement
    log2phy_RLE: Int32


def encode_deployment_status(status: DeploymentStatus) -> operator_pb2.DeploymentStatus:
    """The message."""
    fields = {
        **vars(status),
        "last_decision": _text(status.last_decision),
        "problems": [_text(problem) for problem in status.problems[:MOST_PROBLEMS]],
        "worth": None if status.worth is None else encode_worth(status.worth),
        "move_price": None if status.move_price is None else encode_move_price(status.move_price),
    }
    return operator_pb2.DeploymentStatus(**fields)


def decode_deployment_status(message: operator_pb2.DeploymentStatus) -> DeploymentStatus:
    """The status; raises ``WireError`` naming the field that cannot be what it is."""
    check_count(len(message.problems), "status.problems", MOST_PROBLEMS + 1)
    return DeploymentStatus(
        deployment=check_deployment(message.deployment, "status.deployment"),
        layers=check_count(message.layers, "status.layers", MOST_LAYERS + 1),
        experts=check_count(message.experts, "status.experts", MOST_EXPERTS + 1),
        ranks=check_count(message.ranks, "status.ranks", MOST_RANKS + 1),
        slots=check_count(message.slots, "status.slots", MOST_SLOTS + 1),
        agents_connected=check_count(message.agents_connected, "status.agents_connected", MOST_RANKS + 1),
        epoch=check_count(message.epoch, "status.epoch", LAST_VERSION),
        digest=check_count(message.digest, "status.digest", LAST_DIGEST),
        par=check_ratio(message.par, "status.par"),
        window_steps=check_count(message.window_steps, "status.window_steps", MOST_WINDOW_STEPS + 1),
        steps_received=check_count(message.steps_received, "status.steps_received", _MOST_TOTAL),
        steps_lost=check_count(message.steps_lost, "status.steps_lost", _MOST_TOTAL),
        layers_switched=check_count(message.layers_switched, "status.layers_switched", _MOST_TOTAL),
        experts_moved=check_count(message.experts_moved, "status.experts_moved", _MOST_TOTAL),
        bytes_moved=check_count(message.bytes_moved, "status.bytes_moved", _MOST_TOTAL),
        paused=message.paused,
        plan_id=check_count(message.plan_id, "status.plan_id", LAST_VERSION),
        last_decision=_text(message.last_decision),
        problems=tuple(map(_text, message.problems)),
        leader_term=check_count(message.leader_term, "status.leader_term", LAST_VERSION),
        worth=decode_worth(message.worth) if message.HasField("worth") else None,
        move_price=decode_move_price(message.move_price) if message.HasField("move_price") else None,
    )


def encode_layer_status(status: LayerStatus) -> operator_pb2.LayerStatus:
    """The message."""
    return operator_pb2.LayerStatus(**vars(status))


def decode_layer_status(message: operator_pb2.LayerStatus) -> LayerStatus:
    """One layer; raises as ``decode_deployment_status`` does."""
    return LayerStatus(
        layer=check_count(message.layer, "layer_status.layer", MOST_LAYERS),
        par=check_ratio(message.par, "layer_status.par"),
        planned_par=check_measured(message.planned_par, "layer_status.planned_par"),
        epoch=check_count(message.epoch, "layer_status.epoch", LAST_VERSION),
    )


def encode_agent_status(status: AgentStatus) -> operator_pb2.AgentStatus:
    """The message."""
    return operator_pb2.AgentStatus(**{**vars(status), "error": _text(status.error)})


def decode_agent_status(message: operator_pb2.AgentStatus) -> AgentStatus:
    """One agent; raises as ``decode_deployment_status`` does."""
    silent = message.silent_seconds if message.HasField("silent_seconds") else None
    return AgentStatus(
        rank=check_count(message.rank, "agent_status.rank", MOST_RANKS),
        node=check_name(message.node, "agent_status.node"),
        connected=message.connected,
        step=check_count(message.step, "agent_status.step", 2 * LAST_STEP),
        epoch=check_count(message.epoch, "agent_status.epoch", LAST_VERSION),
        error=_text(message.error),
        agent_version=check_name(message.agent_version, "agent_status.agent_version"),
        dropped_steps=check_count(message.dropped_steps, "agent_status.dropped_steps", LAST_STEP),
        silent_seconds=None if silent is None else check_time(silent, "agent_status.silent_seconds"),
        staging_bytes=check_stated_bytes(message, "staging_bytes", "agent_status"),
        ring_bytes=check_stated_bytes(message, "ring_bytes", "agent_status"),
    )


def decode_report(message: operator_pb2.GetStatusResponse) -> DeploymentReport:
    """All of one deployment; raises as ``decode_deployment_status`` does."""
    check_count(len(message.layers), "report.layers", MOST_LAYERS + 1)
    check_count(len(message.agents), "report.agents", MOST_RANKS + 1)
    return DeploymentReport(
        decode_deployment_status(message.status),
        tuple(map(decode_layer_status, message.layers)),
        tuple(map(decode_agent_status, message.agents)),
    )


def encode_report(report: DeploymentReport) -> operator_pb2.GetStatusResponse:
    """The message."""
    return operator_pb2.GetStatusResponse(
        status=encode_deployment_status(report.status),
        layers=map(encode_layer_status, report.layers),
        agents=map(encode_agent_status, report.agents),
    )


def encode_placement(served: PlacementInForce) -> operator_pb2.GetPlacementResponse:
    """The message."""
    return operator_pb2.GetPlacementResponse(
        epoch=served.epoch,
        digest=served.digest,
        experts=served.placement.experts,
        physical_to_logical=pack(served.placement.phy2log_LRS),
        log2phy=pack(served.log2phy_RLE),
    )


def decode_placement(message: operator_pb2.GetPlacementResponse) -> PlacementInForce:
    """What is served; raises as ``decode_deployment_status`` does."""
    experts = check_count(message.experts, "placement.experts", MOST_EXPERTS + 1, least=1)
    phy2log_LRS = unpack(message.physical_to_logical, (None, None, None), "placement.physical_to_logical")
    try:
        placement = Placement(phy2log_LRS, experts)
    except PlacementError as error:
        raise WireError(f"placement.physical_to_logical: {error}") from error
    size = (placement.ranks, placement.layers, experts)
    entries = () if len(message.log2phy.shape) == len(size) else (None,)
    log2phy_RLE = unpack(message.log2phy, (*size, *entries), "placement.log2phy")
    try:
        placement.check_log2phy(log2phy_RLE)
    except PlacementError as error:
        raise WireError(f"placement.log2phy: {error}") from error
    return PlacementInForce(
        check_count(message.epoch, "placement.epoch", LAST_VERSION),
        check_count(message.digest, "placement.digest", LAST_DIGEST),
        placement,
        log2phy_RLE,
    )


def _text(text: str) -> str:
    return printable(text, LONGEST_MESSAGE)
