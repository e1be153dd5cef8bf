"""Messages between an agent and the service, except heat reports and plans."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from eplb_core.placement import MAX_ENTRIES, Int32, PlacementError, check_shape
from eplb_core.wire import fields
from eplb_core.wire.codec import PROTOCOL_VERSION, decode, packed
from eplb_core.wire.fields import ProtocolVersionError, WireError, check_count
from eplb_core.wire.generated import agent_pb2

MIN_HEARTBEAT_SECONDS = 0.05
MAX_HEARTBEAT_SECONDS = 60.0
MAX_BLOCKS = 8
"""Maximum value of ``Reporting.one_in``. A larger value would leave too few reported blocks in a window."""
MAX_REPORT_STEPS = 1 << 16
"""Maximum number of steps in one heat report."""


def _at_least_one(value: int, _field: str, _sizes: fields.Sizes) -> int:
    """Treat 0 as 1, because peers that run older releases do not send the field."""
    return value or 1


def _interval(seconds: float, field: str, _sizes: fields.Sizes) -> float:
    """Clamp the heartbeat interval, so that an agent neither busy-loops nor falls silent."""
    if math.isnan(seconds):
        raise WireError(f"{field} is not a number")
    return min(max(seconds, MIN_HEARTBEAT_SECONDS), MAX_HEARTBEAT_SECONDS)


def _ratio(value: float, field: str, _sizes: fields.Sizes) -> float:
    """Return a PAR; raises ``WireError`` unless it is finite and at most the maximum number of ranks."""
    if not 0 <= value <= fields.MAX_RANKS:
        raise WireError(f"{field} is {value}; expected a number from 0 to {fields.MAX_RANKS}")
    return value


@dataclass(frozen=True)
class Shape:
    """Sizes and properties that all ranks of a deployment share.

    Parameters
    ----------
    ranks
        R, number of ranks.
    layers
        L, number of layers.
    experts
        E, logical experts per layer.
    slots
        S, slots per rank and layer.
    bytes_per_expert
        Size of an expert's weights in one layer.
    width
        D, entries per expert in the dealing tables that the host reads. Tables with D = 1 have no entries axis.
    rank_bound
        True if experts cannot move to a different rank.
    entry_by_row
        True if the host selects a token's table entry by the token's row in the batch instead of using the entries in
        turn.
    observed
        True if the agents only observe. Such agents also set ``rank_bound``, so that older services make no plans.
    splits_by_step
        True if the host chooses replicas according to each step's own counts, so that tables have no effect.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.ModelShape

    ranks: Annotated[int, fields.below(fields.MAX_RANKS + 1, least=1)]
    layers: Annotated[int, fields.below(fields.MAX_LAYERS + 1, least=1)]
    experts: Annotated[int, fields.below(fields.MAX_EXPERTS + 1, least=1)]
    slots: Annotated[int, fields.below(fields.MAX_SLOTS + 1, least=1)]
    bytes_per_expert: fields.Bytes
    width: Annotated[int, "dealing_width", _at_least_one, fields.below(MAX_ENTRIES + 1, least=1)] = 1
    rank_bound: bool = False
    entry_by_row: bool = False
    observed: bool = False
    splits_by_step: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes, keyed by the names that field annotations use."""
        sizes = {name: getattr(self, name) for name in ("ranks", "layers", "experts", "slots")}
        return {**sizes, "entries": self.width}

    def check(self, field: str) -> None:
        """Raise ``WireError`` if no placement can have these sizes or if the tables would be too large."""
        entries = self.ranks * self.layers * self.experts * self.width
        layer_entries = self.layers * max(self.experts, self.ranks)
        if entries > fields.MAX_TABLE_ENTRIES or layer_entries > fields.MAX_LAYER_ENTRIES:
            raise WireError(
                f"{field}: {self.layers} layers x {self.experts} experts on {self.ranks} ranks with {self.width} "
                f"table entries per expert are too large; the limits are {fields.MAX_TABLE_ENTRIES} for ranks x layers "
                f"x experts x entries, and {fields.MAX_LAYER_ENTRIES} for layers x experts and layers x ranks"
            )
        try:
            check_shape(self.experts, self.ranks, self.slots)
        except PlacementError as error:
            raise WireError(f"{field}: {error}") from error


@dataclass(frozen=True)
class Hello:
    """First message of a rank: its identity and current layout.

    Parameters
    ----------
    deployment
        Name of the deployment.
    rank
        Index of the rank in the EP group.
    node
        Name of the rank's node.
    token_group
        Token group of the rank. Ranks of the same group see the same tokens.
    group_id
        Random id of the EP group, generated each time the group forms.
    shape
        Sizes of the deployment.
    epoch
        Epoch of the layout.
    digest
        Digest of the placement, over all ranks.
    layer_epochs
        Epoch at which each layer last changed, ``[L]``.
    slots_LS
        int32 ``[L, S]``, the logical expert in each of the rank's slots.
    log2phy_LE
        int32 ``[L, E]`` or ``[L, E, D]``, the rank's tables.
    agent_version
        Release of the agent.
    highest_term
        Highest leader term that the rank has received.
    device
        PyTorch's name for the rank's device; empty on a CPU.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Hello
    protocol_version: ClassVar[int] = PROTOCOL_VERSION

    deployment: fields.Deployment
    rank: Annotated[int, fields.below(fields.MAX_RANKS)]
    node: fields.Name
    token_group: Annotated[int, fields.below(fields.MAX_RANKS)]
    group_id: fields.Name
    shape: Shape
    epoch: Annotated[fields.Version, "placement.epoch"]
    digest: Annotated[fields.Digest, "placement.digest"]
    layer_epochs: Annotated[fields.LayerEpochs, "placement.layer_epochs"]
    slots_LS: Annotated[Int32, "placement.local_physical_to_logical", packed("layers", "slots")]
    log2phy_LE: Annotated[Int32, "placement.log2phy", packed("layers", "experts", "entries")]
    agent_version: fields.Name = ""
    highest_term: fields.Version = 0
    device: fields.Name = ""

    @property
    def ep_size(self) -> int:
        """Number of ranks, R, which the message carries outside the shape."""
        return self.shape.ranks

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest of the layout."""
        return self.epoch, self.digest

    def check(self, field: str) -> None:
        """Raise ``WireError`` if the fields contradict each other."""
        if self.rank >= self.ep_size:
            raise WireError(
                f"{field}.rank is {self.rank}, but ep_size is {self.ep_size}; ranks are numbered from 0"
            )
        if not self.group_id:
            raise WireError(f"{field}.group_id is empty; draw a new id each time the EP group forms")
        if max(self.layer_epochs) > self.epoch:
            raise WireError(
                f"{field}.layer_epochs: a layer changed at epoch {max(self.layer_epochs)}, after the layout's epoch "
                f"{self.epoch}"
            )


def mixed_releases(releases: Mapping[int, str]) -> str | None:
    """Return a message that lists the ranks by agent release, or ``None`` if all ranks run the same release.

    Parameters
    ----------
    releases
        Agent release of each rank; an empty string if unknown.

    Examples
    --------
    >>> mixed_releases({0: "1.2", 1: "1.2", 2: "1.3"})
    'the ranks run different agent releases (1.2 on ranks 0, 1; 1.3 on ranks 2); install the same release on all ranks'
    """
    ranks_by_release: dict[str, list[str]] = {release: [] for release in sorted(set(releases.values()))}
    for rank, release in sorted(releases.items()):
        ranks_by_release[release].append(str(rank))
    if len(ranks_by_release) < 2:
        return None
    listing = "; ".join(
        f"{release or 'unknown'} on ranks {', '.join(ranks)}" for release, ranks in ranks_by_release.items()
    )
    return f"the ranks run different agent releases ({listing}); install the same release on all ranks"


@dataclass(frozen=True)
class Reporting:
    """Selection of the heat that agents report.

    Steps are divided into blocks of ``report_steps``, counted from step 0, so the blocks are the same on all ranks.

    Parameters
    ----------
    source_sums
        True to send one sum of source heat per report instead of one count per step. It has no effect unless the host
        also counts tokens by slot.
    one_in
        Report one in ``one_in`` blocks and drop the others.
    report_steps
        Steps per block; 0 to use the number from the Welcome.

    Examples
    --------
    >>> [block for block in range(9) if Reporting(one_in=4).wants(block)]
    [0, 4, 8]
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Reporting

    source_sums: bool = False
    one_in: Annotated[int, _at_least_one, fields.below(MAX_BLOCKS + 1, least=1)] = 1
    report_steps: Annotated[int, fields.below(MAX_REPORT_STEPS + 1)] = 0

    def wants(self, block: int) -> bool:
        """Return True if the block with this number is reported."""
        return block % self.one_in == 0


@dataclass(frozen=True)
class Balance:
    """Balance of the deployment as measured by the service, for the engine's log.

    Parameters
    ----------
    par
        Mean PAR of the layers over the newest steps.
    steps
        Number of these steps.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Balance

    par: Annotated[float, _ratio]
    steps: fields.Step


EVERYTHING = Reporting()
"""Full reporting of every step, which is the default unless the service requests less."""


@dataclass(frozen=True)
class Welcome:
    """The service's response to a Hello.

    Parameters
    ----------
    service_version
        Release of the service.
    leader_term
        Leader term of the service for the deployment.
    report_steps
        Steps per heat report.
    heartbeat_seconds
        Interval between heartbeats, in seconds.
    reporting
        Selection of heat to report until the service sends a new ``Reporting``.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Welcome
    protocol_version: ClassVar[int] = PROTOCOL_VERSION

    service_version: fields.Name
    leader_term: fields.Version
    report_steps: Annotated[int, fields.below(MAX_REPORT_STEPS + 1, least=1)]
    heartbeat_seconds: Annotated[float, _interval]
    reporting: Reporting = EVERYTHING


class PlanState(enum.IntEnum):
    """State of a plan, or of one of its layers, on one rank. The values are the same as in the wire format."""

    ACCEPTED = 1
    REFUSED = 2
    TRANSFERRED = 3
    COMMITTED = 4
    ABORTED = 5
    CALLED_OFF = 6

    @property
    def drops_layers(self) -> bool:
        """True if the plan has ended on the rank and its uncommitted layers will not switch."""
        return self in (PlanState.REFUSED, PlanState.ABORTED, PlanState.CALLED_OFF)


@dataclass(frozen=True)
class CallOff:
    """Request from the service to drop a plan. Layers that are not committed keep their placement.

    Parameters
    ----------
    plan_id
        Id of the plan.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.CallOff

    plan_id: fields.Version


@dataclass(frozen=True)
class PlanStatus:
    """Status of a plan or of one of its layers, as reported by a rank.

    Parameters
    ----------
    plan_id
        Id of the plan.
    state
        New state of the plan or layer.
    layer
        Index of the layer; 0 if the state applies to the entire plan.
    reason
        Cause of a failure.
    epoch
        Epoch of the rank's layout in this state.
    digest
        Digest of the rank's placement in this state.
    bytes_received
        Bytes of weights that the rank received.
    transfer_seconds
        Duration of the transfer, in seconds.
    commit_seconds
        Duration of the commit, in seconds.
    step
        Step boundary at which the plan or layer reached the state.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.PlanStatus

    plan_id: fields.Version
    state: PlanState
    layer: fields.Layer = 0
    reason: fields.Text = ""
    epoch: fields.Version = 0
    digest: fields.Digest = 0
    bytes_received: fields.Bytes = 0
    transfer_seconds: fields.Seconds = 0.0
    commit_seconds: fields.Seconds = 0.0
    step: fields.Step = 0


@dataclass(frozen=True)
class Heartbeat:
    """Periodic message that shows that a rank is alive.

    Parameters
    ----------
    step
        Current step of the model.
    epoch
        Epoch of the rank's layout.
    digest
        Digest of the rank's placement.
    error
        Reason why the rank currently does not take part in balancing; empty if it does.
    calls
        Number of calls from the host to the agent since startup.
    call_micros
        Total duration of these calls, in microseconds.
    vote_micros
        Part of ``call_micros`` that was spent on votes.
    staging_bytes
        Size of the staging buffers, in bytes; ``None`` if not reported.
    ring_bytes
        Size of the ring buffers in which the layers count heat, in bytes; ``None`` if not reported.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Heartbeat

    step: fields.Step = 0
    epoch: fields.Version = 0
    digest: fields.Digest = 0
    error: fields.Text = ""
    calls: fields.Step = 0
    call_micros: fields.Micros = 0
    vote_micros: fields.Micros = 0
    staging_bytes: fields.Bytes | None = None
    ring_bytes: fields.Bytes | None = None


def decode_hello(message: agent_pb2.Hello) -> Hello:
    """Decode an agent's Hello.

    Raises
    ------
    ProtocolVersionError
        If the agent uses a different version of the protocol.
    WireError
        If a field is invalid.
    """
    check_protocol(message.protocol_version, "the agent")
    ranks = check_count(message.ep_size, "hello.ep_size", fields.MAX_RANKS + 1, least=1)
    return decode(Hello, message, {"ranks": ranks})


def decode_welcome(message: agent_pb2.Welcome) -> Welcome:
    """Decode a service's Welcome, clamping ``heartbeat_seconds`` to its bounds.

    Raises the same errors as ``decode_hello``.
    """
    check_protocol(message.protocol_version, "the service")
    return decode(Welcome, message)


def check_protocol(version: int, peer: str) -> None:
    """Raise ``ProtocolVersionError`` if the peer's version differs from this side's."""
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"{peer} speaks protocol version {version}, but this side speaks version {PROTOCOL_VERSION}; install the "
            "same release on both sides"
        )
