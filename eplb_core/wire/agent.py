"""Messages between an agent and the service: who a rank is, what it is asked for, and what it reports but heat."""

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

MIN_HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS = 0.05, 60.0
MAX_BLOCKS = 8
"""Bound on ``one_in``: blocks further apart would hardly be of one window."""
MAX_REPORT_STEPS = 1 << 16
"""Steps that a service may ask for in one report."""


def _at_least_one(value: int, _field: str, _sizes: fields.Sizes) -> int:
    """Read 0, which peers send that do not know the field, as 1."""
    return value or 1


def _interval(seconds: float, field: str, _sizes: fields.Sizes) -> float:
    """Bring an interval within bounds in which an agent neither spins nor falls silent."""
    if math.isnan(seconds):
        raise WireError(f"{field} is not a number")
    return min(max(seconds, MIN_HEARTBEAT_SECONDS), MAX_HEARTBEAT_SECONDS)


@dataclass(frozen=True)
class Shape:
    """Sizes, and what else all ranks of a deployment share.

    ``width`` is D, the entries for each expert of the dealing tables that the host reads (tables of one have no axis
    for it); ``rank_bound`` says that experts may not leave their ranks. With ``entry_by_row`` the host picks an
    entry by the token's row in the batch, not in turn.
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

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by name, as other fields' annotations refer to them."""
        sizes = {name: getattr(self, name) for name in ("ranks", "layers", "experts", "slots")}
        return {**sizes, "entries": self.width}

    def check(self, field: str) -> None:
        """Raise ``WireError`` where no placement of these sizes can exist, or tables would be too large."""
        layers, experts, ranks = self.layers, self.experts, self.ranks
        entries = ranks * layers * experts * self.width
        if entries > fields.MAX_TABLE_ENTRIES or layers * max(experts, ranks) > fields.MAX_LAYER_ENTRIES:
            raise WireError(
                f"{field}: {layers} layers x {experts} experts on {ranks} ranks, tables of {self.width}, are past what "
                f"is taken: {fields.MAX_TABLE_ENTRIES} for ranks x layers x experts x entries, "
                f"{fields.MAX_LAYER_ENTRIES} for layers x experts and layers x ranks"
            )
        try:
            check_shape(experts, ranks, self.slots)
        except PlacementError as error:
            raise WireError(f"{field}: {error}") from error


@dataclass(frozen=True)
class Hello:
    """One rank and what it serves.

    Ranks of one ``token_group`` see the same tokens; ``group_id`` is drawn once per forming of the EP group.
    ``slots_LS`` is the logical expert in each slot, ``log2phy_LE`` its table, ``[L, E]``, or ``[L, E, D]`` where it
    deals. ``device`` is the name of the rank's device in torch; empty on a CPU.
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
        """R, beside the shape in the message."""
        return self.shape.ranks

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest."""
        return self.epoch, self.digest

    def check(self, field: str) -> None:
        """Raise ``WireError`` where the fields contradict one another."""
        if self.rank >= self.ep_size:
            raise WireError(f"{field}.rank is {self.rank}, but ep_size is {self.ep_size}; ranks count from 0")
        if not self.group_id:
            raise WireError(f"{field}.group_id is empty; it names one forming of the EP group")
        if max(self.layer_epochs) > self.epoch:
            raise WireError(
                f"{field}.layer_epochs: a layer changed at epoch {max(self.layer_epochs)}, past epoch {self.epoch}"
            )


def mixed_releases(releases: Mapping[int, str]) -> str | None:
    """Name the ranks that run each release of the agent, by rank; ``None`` if all run one."""
    ranks = {
        release: ", ".join(str(rank) for rank, other in sorted(releases.items()) if other == release)
        for release in sorted(set(releases.values()))
    }
    if len(ranks) < 2:
        return None
    named = "; ".join(f"{release or 'unknown'} on ranks {which}" for release, which in ranks.items())
    return f"the ranks run different releases of the agent ({named}); install one release on all"


@dataclass(frozen=True)
class Reporting:
    """Share of its heat that an agent reports. A block is as many steps as a report has, counted from step 0.

    With ``source_sums`` own tokens are summed over each report, where slots are counted too; of ``one_in`` blocks one
    is reported, the same one by all ranks; ``report_steps`` is 0 for the number in the Welcome.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Reporting

    source_sums: bool = False
    one_in: Annotated[int, _at_least_one, fields.below(MAX_BLOCKS + 1, least=1)] = 1
    report_steps: Annotated[int, fields.below(MAX_REPORT_STEPS + 1)] = 0

    def wants(self, block: int) -> bool:
        """Return whether the block of this number is reported."""
        return block % self.one_in == 0


EVERYTHING = Reporting()
"""Every step in full: what agents report where no service asks for less."""


@dataclass(frozen=True)
class Welcome:
    """Requests of the service to an agent; ``reporting`` goes on until another ``Reporting`` comes."""

    MESSAGE: ClassVar[type[Any]] = agent_pb2.Welcome
    protocol_version: ClassVar[int] = PROTOCOL_VERSION

    service_version: fields.Name
    leader_term: fields.Version
    report_steps: Annotated[int, fields.below(MAX_REPORT_STEPS + 1, least=1)]
    heartbeat_seconds: Annotated[float, _interval]
    reporting: Reporting = EVERYTHING


class PlanState(enum.IntEnum):
    """Outcome of a plan, or of one of its layers, on one rank; the numbers are the wire's."""

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
    """Request from the service to drop a plan. Uncommitted layers keep their placement."""

    MESSAGE: ClassVar[type[Any]] = agent_pb2.CallOff

    plan_id: fields.Version


@dataclass(frozen=True)
class PlanStatus:
    """Outcome of a plan on one rank; ``layer`` is 0 where the state is of the whole plan.

    ``epoch`` and ``digest`` are what the rank serves after it, ``step`` the step boundary at which it happened.
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
    """A rank is alive, at a step, and serves a version; ``error`` says why it takes no part at present.

    ``calls`` of the agent by its host since its start took ``call_micros``, ``vote_micros`` of them in votes. Bytes are
    held for experts that wait for their commit, and in which the layers count heat; ``None`` where not reported.
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
    """Return the Hello; raises ``ProtocolVersionError`` where the agent speaks another version, or ``WireError``."""
    _check_protocol(message.protocol_version, "the agent")
    ranks = check_count(message.ep_size, "hello.ep_size", fields.MAX_RANKS + 1, least=1)
    return decode(Hello, message, {"ranks": ranks})


def decode_welcome(message: agent_pb2.Welcome) -> Welcome:
    """Return the Welcome, ``heartbeat_seconds`` brought within its bounds; raises as ``decode_hello`` does."""
    _check_protocol(message.protocol_version, "the service")
    return decode(Welcome, message)


def _check_protocol(version: int, peer: str) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"{peer} speaks protocol version {version}, this side {PROTOCOL_VERSION}; install the same release on "
            "both sides"
        )
