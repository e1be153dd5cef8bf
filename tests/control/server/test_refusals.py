"""An invalid message ends its stream with a status that describes the problem.

Ranks that contradict a group are rejected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from eplb_core.placement import Placement
from eplb_core.wire.codec import pack
from eplb_core.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from eplb_service.control.core.health import problems
from eplb_service.control.server.plane import deployments
from eplb_service.control.server.service import RunningService, run_service
from tests.control.fake_group import (
    LAYERS,
    RANKS,
    SLOTS,
    FakeGroup,
    FakeRank,
    first_placement,
    heat_report,
    hello_of,
    live_of,
    skewed_heat,
)
from tests.control.server.service_under_test import settings, tick, until

Spoil = Callable[[agent_pb2.Hello], None]


def spoil_shape(field: str, value: int) -> Spoil:
    return lambda hello: setattr(hello.shape, field, value)


def spoil_field(name: str, value: Any) -> Spoil:
    return lambda hello: setattr(hello, name, value)


LIVE = live_of(first_placement())
CONFLICTING = live_of(first_placement().with_layers([(1, first_placement().phy2log_LRS[1][::-1])]))
INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTRADICTS = grpc.StatusCode.FAILED_PRECONDITION


@pytest_asyncio.fixture
async def channel(service: RunningService) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as opened:
        yield opened


def make_huge(hello: agent_pb2.Hello) -> None:
    hello.ep_size = 4096
    hello.shape.layers = 512
    hello.shape.experts = 4096
    hello.shape.slots = 512


async def rejection_of(rank: FakeRank, **message: Any) -> tuple[grpc.StatusCode, str]:
    await rank.say(**message)
    return await rank.refusal()


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (spoil_field("protocol_version", 99), CONTRADICTS, "protocol version 99"),
        (spoil_shape("layers", 600), INVALID, "hello.shape.layers is 600; expected 1 to 512"),
        (make_huge, INVALID, "are too large"),
        (spoil_shape("bytes_per_expert", 7), CONTRADICTS, "bytes_per_expert 7 instead of 1000"),
        (
            lambda hello: hello.CopyFrom(hello_of(CONFLICTING, 1)),
            CONTRADICTS,
            "rank 1 is at epoch 0 (digest",
        ),
        (spoil_field("group_id", "second"), CONTRADICTS, "does not belong to the group of rank 0"),
    ],
)
async def test_a_hello_that_is_invalid_or_contradicts_the_group_is_rejected(
    service: RunningService, channel: grpc.aio.Channel, spoil: Spoil, code: grpc.StatusCode, message: str
) -> None:
    first = FakeRank(channel, 0)
    await first.greet(hello_of(LIVE, 0))
    hello = hello_of(LIVE, 1)
    spoil(hello)
    status, text = await rejection_of(FakeRank(channel, 1), hello=hello)
    assert (status, message in text) == (code, True), text
    assert [member.rank for member in service.plane.deployments["decode"].connected] == [0]


async def test_slots_that_do_not_match_the_reported_digest_are_rejected(channel: grpc.aio.Channel) -> None:
    ranks = [FakeRank(channel, rank) for rank in range(RANKS)]
    for rank in ranks[:-1]:
        await rank.greet(hello_of(LIVE, rank.rank))
    last = hello_of(LIVE, RANKS - 1)
    last.placement.local_physical_to_logical.CopyFrom(
        pack(np.tile(np.array([5, 6, 7], np.int32), (LAYERS, 1)))
    )
    code, text = await rejection_of(ranks[-1], hello=last)
    assert code == CONTRADICTS
    assert "do not form a valid placement" in text or "digest" in text


async def test_a_deployment_beyond_the_maximum_is_rejected(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "MAX_DEPLOYMENTS", 2)
    # Keep a reference to every rank, because a stream is cancelled when its rank is garbage-collected.
    first, second, third = (FakeRank(channel, 0) for _ in range(3))
    await first.greet(hello_of(LIVE, 0, deployment="one"))
    await second.greet(hello_of(LIVE, 0, deployment="two"))
    code, text = await rejection_of(third, hello=hello_of(LIVE, 0, deployment="three"))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "its maximum" in text


async def test_departed_deployments_are_evicted_unless_they_had_a_plan_or_are_paused(
    service: RunningService, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "MAX_DEPLOYMENTS", 4)
    deployments_by_name = service.plane.deployments
    single_rank = live_of(Placement.linear(LAYERS, SLOTS, 1, SLOTS))

    async def connect_and_leave(name: str) -> None:
        rank = FakeRank(channel, 0)
        await rank.greet(hello_of(single_rank, 0, deployment=name))
        rank.call.cancel()
        await until(lambda: not deployments_by_name[name].connected)
        assert deployments_by_name[name].known
        tick(service.plane)

    for name in ("planned", "paused", "older", "newer"):
        await connect_and_leave(name)
    deployments_by_name["planned"].totals = deployments_by_name["planned"].totals.plus(layers_switched=1)
    service.plane.set_paused(deployments_by_name["paused"], True)
    await connect_and_leave("first")
    assert list(deployments_by_name) == ["planned", "paused", "newer", "first"]
    for number in range(4):
        await connect_and_leave(f"junk-{number}")
    assert list(deployments_by_name)[:2] == ["planned", "paused"]
    deployments_by_name["junk-2"].paused = deployments_by_name["junk-3"].paused = True
    code, text = await rejection_of(
        FakeRank(channel, 0), hello=hello_of(single_rank, 0, deployment="one-more")
    )
    assert (code, "`eplb forget NAME`" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_malformed_heat_and_a_first_message_other_than_hello_are_rejected(
    channel: grpc.aio.Channel,
) -> None:
    code, text = await rejection_of(FakeRank(channel, 0), heartbeat=agent_pb2.Heartbeat())
    assert (code, "must be a Hello" in text) == (INVALID, True)
    rank = FakeRank(channel, 0)
    await rank.greet(hello_of(LIVE, 0))
    report = heat_report(LIVE, 0, 0, skewed_heat(2))
    report.slot_counts.CopyFrom(pack(np.full((2, LAYERS, SLOTS), -1)))
    code, text = await rejection_of(rank, heat_report=report)
    assert code == INVALID
    assert "heat_report.slot_counts: counts range from -1" in text


async def test_operators_get_the_reason_for_a_rejected_call(
    service: RunningService, channel: grpc.aio.Channel
) -> None:
    operator = operator_pb2_grpc.OperatorServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="no deployment 'nope'") as caught:
        await operator.GetStatus(operator_pb2.GetStatusRequest(deployment="nope"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    rank = FakeRank(channel, 0)
    await rank.greet(hello_of(LIVE, 0))
    for call, request in (
        (operator.Rebalance, operator_pb2.RebalanceRequest(deployment="decode")),
        (operator.GetPlacement, operator_pb2.GetPlacementRequest(deployment="decode")),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="not all ranks have reported") as caught:
            await call(request)
        assert caught.value.code() == CONTRADICTS
    answer = await operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))
    assert list(answer.status.problems) == ["1 of 4 ranks connected, missing ranks 1, 2, 3"]


async def test_concurrent_rebalance_calls_share_one_decision(
    service: RunningService, group: FakeGroup
) -> None:
    await group.send_heat(skewed_heat(8))
    await until(lambda: service.plane.deployments["decode"].totals.steps_received == 8)
    request = operator_pb2.RebalanceRequest(deployment="decode")
    first, second = await asyncio.gather(group.operator.Rebalance(request), group.operator.Rebalance(request))
    assert first.plan_id == second.plan_id > 0


async def test_a_second_agent_with_the_same_rank_and_a_different_group_id_is_rejected(
    service: RunningService, group: FakeGroup
) -> None:
    code, text = await rejection_of(FakeRank(group.channel, 2), hello=hello_of(LIVE, 2, group_id="second"))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert "rank 2 is already connected" in text
    assert len(service.plane.deployments["decode"].connected) == RANKS


async def test_a_ranks_new_stream_replaces_its_old_stream(service: RunningService, group: FakeGroup) -> None:
    old_rank = group.ranks[2]
    group.ranks[2] = FakeRank(group.channel, 2)
    await group.ranks[2].greet(hello_of(LIVE, 2))
    code, text = await old_rank.refusal()
    assert code == grpc.StatusCode.ABORTED
    assert "connected again" in text
    deployment = service.plane.deployments["decode"]
    await until(lambda: len(deployment.connected) == RANKS)
    group.step = 5
    await group.heartbeat()
    await until(lambda: deployment.group is not None and deployment.group.members[2].step == 5)


async def test_an_incomplete_group_is_replaced_by_another_group_after_a_timeout(
    service: RunningService,
) -> None:
    async with FakeGroup(service.address) as group:
        squatter = FakeRank(group.channel, 0)
        await squatter.greet(hello_of(LIVE, 0, group_id="incomplete"))
        deployment = service.plane.deployments["decode"]
        tick = deployment.tick
        deployment.tick = lambda now: None  # keep the service's own ticks from moving the clock
        for now in (1e6, 1e6 + 59):
            tick(now)
            assert (await rejection_of(FakeRank(group.channel, 1), hello=hello_of(LIVE, 1)))[0] == CONTRADICTS
        tick(1e6 + 61)
        await group.join()
        assert (await squatter.refusal())[0] == grpc.StatusCode.ABORTED
        assert len(deployment.connected) == RANKS
        assert deployment.live is not None


async def test_a_rejected_hello_is_a_problem_only_for_a_while(
    service: RunningService, group: FakeGroup
) -> None:
    hello = hello_of(LIVE, 0, ep_size=8)
    hello.rank = 7
    assert (await rejection_of(FakeRank(group.channel, 7), hello=hello))[0] == CONTRADICTS
    deployment = service.plane.deployments["decode"]
    assert any("rank 7 was rejected" in problem for problem in problems(deployment))
    now = time.monotonic()
    deployment.tick(now)
    deployment.tick(now + 61)
    assert not deployment.attendance.rejections


async def test_a_silent_agent_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_service.control.server.agents._SILENCE_SECONDS", 0.1)
    async with (
        run_service(settings(heartbeat_seconds=0.05)) as running,
        FakeGroup(running.address) as group,
    ):
        await group.join()
        code, text = await group.ranks[0].refusal()
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no message arrived" in text
        deployment = running.plane.deployments["decode"]
        assert "rank" in problems(deployment)[0]
        await until(lambda: not deployment.connected)
        assert problems(deployment)[0] == f"0 of {RANKS} ranks connected, missing ranks 0, 1, 2, 3"
