"""A rolling upgrade: ranks of the release before, and of the one to come, are served by this service like its own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from eplb_core.wire.agent import EVERYTHING, decode_welcome
from eplb_core.wire.codec import PROTOCOL_VERSION
from eplb_core.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from eplb_service.control.server.service import running_service
from tests.control.fake_group import FakeGroup, FakeRank, skewed_heat
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings

NEWER_FIELD = bytes([0xF2, 0x7D, 3]) + b"new"
"""Field 2014 with three bytes, as a later release may have one."""
NOT_KNOWN_BEFORE = {
    "heat_report": ("step_micros", "source_sums"),
    "heartbeat": ("calls", "staging_bytes", "ring_bytes"),
}
"""Fields that agents of earlier releases do not send."""


def of_the_release_before(kind: str, message: Message) -> Message:
    for field in NOT_KNOWN_BEFORE.get(kind, ()):
        message.ClearField(field)
    return message


def of_the_release_to_come(_kind: str, message: Message) -> Message:
    later = type(message)()
    later.ParseFromString(message.SerializeToString() + NEWER_FIELD)
    assert later.SerializeToString().endswith(NEWER_FIELD)
    return later


@pytest.mark.parametrize("spoken", [of_the_release_before, of_the_release_to_come])
async def test_ranks_of_another_release_are_balanced(spoken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say = FakeRank.say

    async def in_its_form(self: FakeRank, **message: Any) -> None:
        [(kind, content)] = message.items()
        await say(self, **{kind: spoken(kind, content)})

    monkeypatch.setattr(FakeRank, "say", in_its_form)
    async with running_service(settings()) as service, FakeGroup(service.address) as group:
        # They pass over what they are asked for, and report every step in full.
        await group.join()
        await group.send_heat(skewed_heat(8))
        await group.heartbeat()
        async with grpc.aio.insecure_channel(service.address) as channel:
            operator = operator_pb2_grpc.OperatorServiceStub(channel)
            asked = operator_pb2.GetStatusRequest(deployment="decode")
            while (await operator.GetStatus(asked)).status.steps_received < 8:
                await asyncio.sleep(0.05)
            await operator.Rebalance(operator_pb2.RebalanceRequest(deployment="decode"))
            plans = await group.hear_plan()
            await group.carry_out(plans)
            while (await operator.GetStatus(asked)).status.layers_switched < len(plans[0].layers):
                await asyncio.sleep(0.05)
            status = (await operator.GetStatus(asked)).status
    assert len(plans[0].layers) > 0
    assert status.epoch == group.live.epoch > 0
    assert status.agents_connected == len(group.ranks)


@pytest.mark.parametrize("more", [b"", NEWER_FIELD], ids=["before", "to come"])
def test_a_service_of_another_release_is_understood_by_an_agent(more: bytes) -> None:
    welcome = agent_pb2.Welcome(
        protocol_version=PROTOCOL_VERSION, service_version="other", report_steps=16, heartbeat_seconds=2.0
    )
    heard = decode_welcome(agent_pb2.Welcome.FromString(welcome.SerializeToString() + more))
    assert (heard.report_steps, heard.heartbeat_seconds) == (16, 2.0)
    assert heard.reporting == EVERYTHING
