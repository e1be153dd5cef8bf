"""How an agent and the service introduce themselves: ``Hello`` goes up, ``Welcome`` comes down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eplb_service.placement import MOST_ENTRIES, Int32, PlacementError, check_shape
from eplb_service.wire.codec import PROTOCOL_VERSION, pack, unpack
from eplb_service.wire.fields import (
    LAST_DIGEST,
    LAST_VERSION,
    MOST_BYTES,
    MOST_EXPERTS,
    MOST_LAYER_ENTRIES,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SLOTS,
    MOST_TABLE_ENTRIES,
    ProtocolVersionError,
    WireError,
    check_count,
    check_deployment,
    check_epochs,
    check_name,
)
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.reporting import (
    EVERYTHING,
    MOST_REPORT_STEPS,
    Reporting,
    decode_reporting,
    encode_reporting,
)

FEWEST_HEARTBEAT_SECONDS, MOST_HEARTBEAT_SECONDS = 0.05, 60.0
"""What an agent makes of any other interval: it neither spins nor falls silent."""


@dataclass(frozen=True)
class Shape:
    """Sizes, and what else all ranks of a deployment share.

    Parameters
    ----------
    ranks, layers, experts, slots
        R, L, E and S.
    bytes_per_expert
        Of one expert of one layer.
    width
        D, entries for each expert of the dealing tables that the host reads; tables of one have no axis for it.
    rank_bound
        Whether experts may not leave their ranks.
    """

    ranks: int
    layers: int
    experts: int
    slots: int
    bytes_per_expert: int
    width: int = 1
    rank_bound: bool = False

    @property
    def table(self) -> tuple[int, ...]:
        """Shape of one rank's table of one layer, ``[E]`` or ``[E, D]``."""
        return (self.experts,) if self.width == 1 else (self.experts, self.width)


@dataclass(frozen=True)
class Hello:
    """Who a rank is and what it serves.

    Parameters
    ----------
    token_group
        Ranks that name the same group see the same tokens.
    group_id
        Drawn once per forming of the EP group.
    epoch, digest, layer_epochs
        Version of the placement that the rank serves.
    slots_LS
        Logical expert in each of its slots, int32 ``[L, S]``.
    log2phy_LE
        Its table, int32 ``[L, E]``, or ``[L, E, D]`` where it deals.
    agent_version
        Release of the agent.
    highest_term
        Highest leader term of which the rank has heard.
    """

    deployment: str
    rank: int
    node: str
    token_group: int
    group_id: str
    shape: Shape
    epoch: int
    digest: int
    layer_epochs: tuple[int, ...]
    slots_LS: Int32
    log2phy_LE: Int32
    agent_version: str = ""
    highest_term: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest."""
        return self.epoch, self.digest


@dataclass(frozen=True)
class Welcome:
    """What the service asks of an agent.

    Parameters
    ----------
    service_version
        Release of the service.
    leader_term
        Of the service for this deployment; agents refuse the plans of lower ones.
    report_steps
        Steps per heat report, until a ``Reporting`` names another number.
    heartbeat_seconds
        Seconds between two heartbeats.
    reporting
        How much of its heat it reports, until the service asks otherwise.
    """

    service_version: str
    leader_term: int
    report_steps: int
    heartbeat_seconds: float
    reporting: Reporting = EVERYTHING


def encode_hello(hello: Hello) -> agent_pb2.Hello:
    """The message; slots and table are packed."""
    return agent_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        deployment=hello.deployment,
        rank=hello.rank,
        ep_size=hello.shape.ranks,
        node=hello.node,
        token_group=hello.token_group,
        shape=encode_shape(hello.shape),
        placement=agent_pb2.PlacementState(
            epoch=hello.epoch,
            digest=hello.digest,
            layer_epochs=hello.layer_epochs,
            local_physical_to_logical=pack(hello.slots_LS),
            log2phy=pack(hello.log2phy_LE),
        ),
        agent_version=hello.agent_version,
        highest_term=hello.highest_term,
        group_id=hello.group_id,
    )


def decode_hello(message: agent_pb2.Hello) -> Hello:
    """The Hello, every bound checked before its arrays are opened.

    Raises
    ------
    ProtocolVersionError
        The agent speaks another version.
    WireError
        A field cannot be what it is; the text names it.
    """
    _check_protocol(message.protocol_version, "the agent")
    shape = decode_shape(message.ep_size, message.shape, "hello")
    if not message.group_id:
        raise WireError("hello.group_id is empty; it names one forming of the EP group")
    state = message.placement
    layer_epochs = check_epochs(state.layer_epochs, shape.layers, "hello.layer_epochs")
    epoch = check_count(state.epoch, "hello.epoch", LAST_VERSION)
    if max(layer_epochs) > epoch:
        raise WireError(
            f"hello.layer_epochs: a layer changed at epoch {max(layer_epochs)}, past epoch {epoch}"
        )
    if message.rank >= shape.ranks:
        raise WireError(f"hello.rank is {message.rank}, but ep_size is {shape.ranks}; ranks count from 0")
    return Hello(
        deployment=check_deployment(message.deployment, "hello.deployment"),
        rank=message.rank,
        node=check_name(message.node, "hello.node"),
        token_group=check_count(message.token_group, "hello.token_group", MOST_RANKS),
        group_id=check_name(message.group_id, "hello.group_id"),
        shape=shape,
        epoch=epoch,
        digest=check_count(state.digest, "hello.digest", LAST_DIGEST),
        layer_epochs=layer_epochs,
        agent_version=check_name(message.agent_version, "hello.agent_version"),
        highest_term=check_count(message.highest_term, "hello.highest_term", LAST_VERSION),
        slots_LS=unpack(
            state.local_physical_to_logical, (shape.layers, shape.slots), "hello.local_physical_to_logical"
        ),
        log2phy_LE=unpack(state.log2phy, (shape.layers, *shape.table), "hello.log2phy"),
    )


def encode_welcome(welcome: Welcome) -> agent_pb2.Welcome:
    """The message."""
    return agent_pb2.Welcome(
        protocol_version=PROTOCOL_VERSION,
        service_version=welcome.service_version,
        leader_term=welcome.leader_term,
        report_steps=welcome.report_steps,
        heartbeat_seconds=welcome.heartbeat_seconds,
        reporting=encode_reporting(welcome.reporting),
    )


def decode_welcome(message: agent_pb2.Welcome) -> Welcome:
    """The Welcome, with ``heartbeat_seconds`` brought within its bounds; raises as ``decode_hello`` does."""
    _check_protocol(message.protocol_version, "the service")
    if math.isnan(message.heartbeat_seconds):
        raise WireError("welcome.heartbeat_seconds is not a number")
    return Welcome(
        service_version=check_name(message.service_version, "welcome.service_version"),
        leader_term=check_count(message.leader_term, "welcome.leader_term", LAST_VERSION),
        report_steps=check_count(
            message.report_steps, "welcome.report_steps", MOST_REPORT_STEPS + 1, least=1
        ),
        heartbeat_seconds=min(
            max(message.heartbeat_seconds, FEWEST_HEARTBEAT_SECONDS), MOST_HEARTBEAT_SECONDS
        ),
        reporting=decode_reporting(message.reporting),
    )


def encode_shape(shape: Shape) -> agent_pb2.ModelShape:
    """All sizes but the number of ranks, which messages name apart."""
    return agent_pb2.ModelShape(
        layers=shape.layers,
        experts=shape.experts,
        slots=shape.slots,
        bytes_per_expert=shape.bytes_per_expert,
        # Peers that know no dealing tables know no other host either.
        dealing_width=0 if shape.width == 1 else shape.width,
        rank_bound=shape.rank_bound,
    )


def decode_shape(ranks: int, message: agent_pb2.ModelShape, where: str) -> Shape:
    """Sizes within all bounds, of which a placement can exist; raises ``WireError`` on others."""
    check_count(ranks, f"{where}.ep_size", MOST_RANKS + 1, least=1)
    layers = check_count(message.layers, f"{where}.shape.layers", MOST_LAYERS + 1, least=1)
    experts = check_count(message.experts, f"{where}.shape.experts", MOST_EXPERTS + 1, least=1)
    slots = check_count(message.slots, f"{where}.shape.slots", MOST_SLOTS + 1, least=1)
    width = check_count(message.dealing_width or 1, f"{where}.shape.dealing_width", MOST_ENTRIES + 1, least=1)
    if (
        ranks * layers * experts * width > MOST_TABLE_ENTRIES
        or layers * max(experts, ranks) > MOST_LAYER_ENTRIES
    ):
        raise WireError(
            f"{where}.shape: {layers} layers x {experts} experts on {ranks} ranks, tables of {width}, are past what is "
            f"taken: {MOST_TABLE_ENTRIES} for ranks x layers x experts x entries, {MOST_LAYER_ENTRIES} for layers x "
            "experts and layers x ranks"
        )
    try:
        check_shape(experts, ranks, slots)
    except PlacementError as error:
        raise WireError(f"{where}.shape: {error}") from error
    size = check_count(message.bytes_per_expert, f"{where}.shape.bytes_per_expert", MOST_BYTES)
    return Shape(ranks, layers, experts, slots, size, width, message.rank_bound)


def _check_protocol(version: int, peer: str) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"{peer} speaks protocol version {version}, this side {PROTOCOL_VERSION}; install the same release on "
            "both sides"
        )
