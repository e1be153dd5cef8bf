"""What an agent reports while it serves: ``PlanStatus`` of each layer of a plan, and ``Heartbeat``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from eplb_service.wire.fields import (
    LAST_DIGEST,
    LAST_MICROS,
    LAST_STEP,
    LAST_VERSION,
    MOST_BYTES,
    MOST_LAYERS,
    WireError,
    check_count,
    check_seconds,
    check_stated_bytes,
    printable,
)
from eplb_service.wire.generated import agent_pb2


class PlanState(enum.IntEnum):
    """What became of a plan, or of one of its layers, on one rank; the numbers are the wire's."""

    ACCEPTED = 1
    REFUSED = 2
    TRANSFERRED = 3
    COMMITTED = 4
    ABORTED = 5


@dataclass(frozen=True)
class PlanStatus:
    """What became of a plan on one rank.

    Parameters
    ----------
    plan_id, state, layer
        Of which plan, what, and of which layer; that is 0 where the state is of the whole plan.
    reason
        Why, where the state is ABORTED or REFUSED.
    epoch, digest
        Version that the rank serves after it.
    bytes_received, transfer_seconds, commit_seconds
        What it cost, where the state says that it was done.
    step
        Step boundary at which it happened.
    """

    plan_id: int
    state: PlanState
    layer: int = 0
    reason: str = ""
    epoch: int = 0
    digest: int = 0
    bytes_received: int = 0
    transfer_seconds: float = 0.0
    commit_seconds: float = 0.0
    step: int = 0


@dataclass(frozen=True)
class Heartbeat:
    """A rank is alive.

    Parameters
    ----------
    step
        That it is at.
    epoch, digest
        Version that it serves.
    error
        Why it no longer takes part; empty while all is well.
    calls, call_micros, vote_micros
        Calls of the agent by its host since its start, microseconds that they took, and those of them in votes.
    staging_bytes, ring_bytes
        Held for experts that wait for their commit, and in which the layers count heat; ``None`` from agents that do
        not report them.
    """

    step: int = 0
    epoch: int = 0
    digest: int = 0
    error: str = ""
    calls: int = 0
    call_micros: int = 0
    vote_micros: int = 0
    staging_bytes: int | None = None
    ring_bytes: int | None = None


def encode_plan_status(status: PlanStatus) -> agent_pb2.PlanStatus:
    """The message."""
    return agent_pb2.PlanStatus(
        plan_id=status.plan_id,
        layer=status.layer,
        state=status.state.value,  # type: ignore[arg-type]
        reason=printable(status.reason),
        epoch=status.epoch,
        digest=status.digest,
        bytes_received=status.bytes_received,
        transfer_seconds=status.transfer_seconds,
        commit_seconds=status.commit_seconds,
        step=status.step,
    )


def decode_plan_status(message: agent_pb2.PlanStatus) -> PlanStatus:
    """The status; raises ``WireError`` naming the field that cannot be what it is."""
    try:
        state = PlanState(message.state)
    except ValueError:
        raise WireError(f"plan_status.state is {message.state}, none that is known") from None
    return PlanStatus(
        plan_id=check_count(message.plan_id, "plan_status.plan_id", LAST_VERSION),
        layer=check_count(message.layer, "plan_status.layer", MOST_LAYERS),
        state=state,
        reason=printable(message.reason),
        epoch=check_count(message.epoch, "plan_status.epoch", LAST_VERSION),
        digest=check_count(message.digest, "plan_status.digest", LAST_DIGEST),
        bytes_received=check_count(message.bytes_received, "plan_status.bytes_received", MOST_BYTES),
        transfer_seconds=check_seconds(message.transfer_seconds, "plan_status.transfer_seconds"),
        commit_seconds=check_seconds(message.commit_seconds, "plan_status.commit_seconds"),
        step=check_count(message.step, "plan_status.step", LAST_STEP),
    )


def encode_heartbeat(heartbeat: Heartbeat) -> agent_pb2.Heartbeat:
    """The message."""
    return agent_pb2.Heartbeat(
        step=heartbeat.step,
        epoch=heartbeat.epoch,
        digest=heartbeat.digest,
        error=printable(heartbeat.error),
        calls=heartbeat.calls,
        call_micros=heartbeat.call_micros,
        vote_micros=heartbeat.vote_micros,
        staging_bytes=heartbeat.staging_bytes,
        ring_bytes=heartbeat.ring_bytes,
    )


def decode_heartbeat(message: agent_pb2.Heartbeat) -> Heartbeat:
    """The heartbeat; raises ``WireError`` naming the field that cannot be what it is."""
    return Heartbeat(
        step=check_count(message.step, "heartbeat.step", LAST_STEP),
        epoch=check_count(message.epoch, "heartbeat.epoch", LAST_VERSION),
        digest=check_count(message.digest, "heartbeat.digest", LAST_DIGEST),
        error=printable(message.error),
        calls=check_count(message.calls, "heartbeat.calls", LAST_STEP),
        call_micros=check_count(message.call_micros, "heartbeat.call_micros", LAST_MICROS),
        vote_micros=check_count(message.vote_micros, "heartbeat.vote_micros", LAST_MICROS),
        staging_bytes=check_stated_bytes(message, "staging_bytes", "heartbeat"),
        ring_bytes=check_stated_bytes(message, "ring_bytes", "heartbeat"),
    )
