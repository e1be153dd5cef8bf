"""What comes over the wire: good bytes of every message, and what reads them."""

from __future__ import annotations

import struct

import numpy as np
from google.protobuf.message import DecodeError

from eplb_service.control.core.errors import RefusedError
from eplb_service.wire.codec import pack
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.hello import Shape, encode_hello
from eplb_service.wire.plan import encode_plan
from eplb_service.wire.status import decode_heartbeat, decode_plan_status
from tests.control.core.story import Story
from tests.swap.world import EXPERTS, LAYERS, LINEAR, RANKS, SLOTS, World
from worker_agent.identity import Identity
from worker_agent.swap.ballot import BALLOT_WIDTH, Ballot, Outcome, Progress
from worker_agent.swap.installed import Installed

IDENTITY = Identity("default", "group", 1, RANKS, "here", (0, 1, 2), LAYERS, EXPERTS, SLOTS, 64)
INSTALLED = Installed.first(1, LINEAR, LINEAR.default_log2phy()[1])
SHAPE = Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64)
_BALLOT = struct.Struct(f"<{BALLOT_WIDTH}q")

WIRE_ERRORS = (WireError, RefusedError, DecodeError)


def plan_seeds() -> list[bytes]:
    return [encode_plan(World().plan(1, [(0, 0), (1, 0)])[1]).SerializeToString()]


def hello_seeds() -> list[bytes]:
    return [encode_hello(IDENTITY.hello(INSTALLED)).SerializeToString()]


def heat_seeds() -> list[bytes]:
    counts = pack(np.arange(4 * LAYERS * SLOTS, dtype=np.int32).reshape(4, LAYERS, SLOTS))
    message = agent_pb2.HeatReport(
        first_step=3, layer_epochs=[0] * LAYERS, slot_counts=counts, step_phases=b"\x01\x02\x03\x02"
    )
    return [message.SerializeToString()]


def array_seeds() -> list[bytes]:
    small, large = np.arange(10).reshape(2, 5), np.zeros((400, 5), dtype=np.int64)
    return [pack(small).SerializeToString(), pack(large).SerializeToString()]


def message_seeds() -> list[bytes]:
    statuses = [
        agent_pb2.PlanStatus(plan_id=1, layer=0, state=agent_pb2.PLAN_STATE_ACCEPTED),
        agent_pb2.PlanStatus(plan_id=1, layer=0, state=agent_pb2.PLAN_STATE_ABORTED, reason="link"),
    ]
    messages = [agent_pb2.ConnectRequest(plan_status=status) for status in statuses]
    messages.append(agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(step=4, epoch=1, error="none")))
    return [message.SerializeToString() for message in messages]


def hear(data: bytes) -> None:
    """Reports about a plan and heartbeats reach a deployment that has offered a plan."""
    message = agent_pb2.ConnectRequest.FromString(data)
    story = Story()
    story.joins()
    story.offers(0, 1)
    for rank in (2, 0):
        if message.HasField("plan_status"):
            story.deployment.plan_status(rank, decode_plan_status(message.plan_status), 1.0)
        if message.HasField("heartbeat"):
            story.deployment.heartbeat(rank, decode_heartbeat(message.heartbeat))
    story.waits(1.0)


def ballot_seeds() -> list[bytes]:
    ballot = Ballot(Progress.READY, plan=7, installed=1, abort=False)
    return [_BALLOT.pack(*ballot.encode())]


def read_ballot(data: bytes) -> object:
    fields = [struct.unpack_from("<q", data, at)[0] for at in range(0, len(data) - 7, 8)]
    return Outcome.decode(fields).result
