"""Invalid, oversized or forged requests."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np

from eplb_core.wire.codec import pack
from eplb_core.wire.generated import agent_pb2, operator_pb2
from tests.attacks import target as to
from tests.attacks.target import LIVE, Target
from tests.control.fake_group import FakeGroup, heat_report, hello_of, refusal_of, skewed_heat

Code = grpc.StatusCode
PAUSE = operator_pb2.PauseRequest(deployment="decode")
LIST = operator_pb2.ListDeploymentsRequest()
MIB = 1 << 20


def spoilt_heat(first_step: int = 0, **changes: Any) -> agent_pb2.HeatReport:
    report = heat_report(LIVE, 0, 0, skewed_heat(8))
    report.first_step = first_step
    for field, value in changes.items():
        getattr(report, field).CopyFrom(value)
    return report


async def status_after(target: Target, **message: Any) -> grpc.StatusCode:
    """Send this message from rank 0 of a complete group; return the status of the rejection."""
    async with FakeGroup(target.service.address) as group:
        await group.join()
        await group.ranks[0].say(**message)
        code, _ = await group.ranks[0].refusal()
        return code


TOO_LARGE = agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(error="x" * (to.MESSAGE_BYTES + 1)))


async def status_after_hello(target: Target, *requests: agent_pb2.ConnectRequest) -> grpc.StatusCode:
    """Send a Hello and then ``requests``; return the status of the rejection."""
    hello = agent_pb2.ConnectRequest(hello=hello_with())
    code, _ = await refusal_of(target.service.address, hello, *requests)
    return code


def hello_with(rank: int = 0, **changes: Any) -> agent_pb2.Hello:
    hello = hello_of(LIVE, 0, **changes)
    hello.rank = rank
    return hello


def shaped_hello(layers: int, experts: int, slots: int) -> agent_pb2.Hello:
    hello = hello_with(deployment="fat", ep_size=1)
    hello.shape.layers = layers
    hello.shape.experts = experts
    hello.shape.slots = slots
    hello.placement.ClearField("layer_epochs")
    hello.placement.layer_epochs.extend([0] * layers)
    hello.placement.local_physical_to_logical.CopyFrom(
        pack(np.tile(np.arange(slots, dtype=np.int32), (layers, 1)))
    )
    hello.placement.log2phy.CopyFrom(pack(np.tile(np.arange(experts, dtype=np.int32), (layers, 1))))
    return hello


def raw_call(target: Target, method: str, body: bytes, metadata: Any = None) -> Any:
    return target.channel.unary_unary(method)(body, metadata=metadata, timeout=60)
