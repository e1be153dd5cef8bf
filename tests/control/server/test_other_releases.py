"""During a rolling upgrade, this service works with ranks that run the previous or the next release."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from eplb_core.wire.agent import EVERYTHING, decode_welcome
from eplb_core.wire.codec import PROTOCOL_VERSION
from eplb_core.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from eplb_service.control.server.service import run_service
from tests.control.fake_group import FakeGroup, FakeRank, skewed_heat
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings

NEWER_FIELD = bytes([0xF2, 0x7D, 3]) + b"new"
"""Field 2014 with three bytes, such as a later release might add."""
NEWER_FIELDS = {
    "heat_report": ("step_micros", "source_sums"),
    "heartbeat": ("calls", "staging_bytes", "ring_bytes"),
}
"""Fields that agents from earlier releases do not send, by message."""


def as_previous_release(kind: str, message: Message) -> Message:
    for field in NEWER_FIELDS.get(kind, ()):
        message.ClearField(field)
    return message


def as_next_release(_kind: str, message: Message) -> Message:
    later = type(message)()
    later.ParseFromString(message.SerializeToString() + NEWER_FIELD)
    assert later.SerializeToString().endswith(NEWER_FIELD)
    return later


@pytest.mark.parametrize("convert", [as_previous_release, as_next_release])
async def test_ranks_from_a_different_release_are_balanced(
    convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = FakeRank.say

    async def say_converted(self: FakeRank, **message: Any) -> None:
        [(kind, content)] = message.items()
        await say(self, **{kind: convert(kind, content)})

    monkeypatch.setattr(FakeRank, "say", say_converted)
    async with run_service(settings()) as service, FakeGroup(service.address) as group:
        # These ranks ignore reporting requests and report every step in full.
        await group.join()
        await group.send_heat(skewed_heat(8))
        await group.heartbeat()
        async with grpc.aio.insecure_channel(service.address) as channel:
            operator = operator_pb2_grpc.OperatorServiceStub(channel)
            request = operator_pb2.GetStatusRequest(deployment="decode")
            while (await operator.GetStatus(request)).status.steps_received < 8:
                await asyncio.sleep(0.05)
            await operator.Rebalance(operator_pb2.RebalanceRequest(deployment="decode"))
            plans = await group.hear_plan()
            await group.carry_out(plans)
            while (await operator.GetStatus(request)).status.layers_switched < len(plans[0].layers):
                await asyncio.sleep(0.05)
            status = (await operator.GetStatus(request)).status
    assert len(plans[0].layers) > 0
    assert status.epoch == group.live.epoch > 0
    assert status.agents_connected == len(group.ranks)


@pytest.mark.parametrize("extension", [b"", NEWER_FIELD], ids=["previous", "next"])
def test_an_agent_understands_a_service_from_a_different_release(extension: bytes) -> None:
    welcome = agent_pb2.Welcome(
        protocol_version=PROTOCOL_VERSION, service_version="other", report_steps=16, heartbeat_seconds=2.0
    )
    decoded = decode_welcome(agent_pb2.Welcome.FromString(welcome.SerializeToString() + extension))
    assert (decoded.report_steps, decoded.heartbeat_seconds) == (16, 2.0)
    assert decoded.reporting == EVERYTHING
