"""A rank that contradicts the others or takes another's seat is turned away by name, and the group goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from eplb_service.control.core.health import problems
from eplb_service.control.server.service import RunningService, running_service
from tests.control.fake_group import (
    RANKS,
    FakeGroup,
    FakeRank,
    first_placement,
    hello_of,
    live_of,
)
from tests.control.server.spoilt import Spoil, field, shape
from tests.control.server.test_service import settings, until

LIVE = live_of(first_placement())
CONTRADICTS = grpc.StatusCode.FAILED_PRECONDITION


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with running_service(settings()) as running:
        yield running


@pytest_asyncio.fixture
async def channel(service: RunningService) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(service.address) as opened:
        yield opened


OTHER = live_of(first_placement().with_layer(1, first_placement().phy2log_LRS[1][::-1]))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shape("bytes_per_expert", 7), "bytes_per_expert 7 instead of 1000"),
        (lambda hello: hello.CopyFrom(hello_of(OTHER, 1)), "rank 1 serves epoch 0 digest"),
        (field("group_id", "second"), "another forming of the group than rank 0"),
    ],
)
async def test_a_rank_that_contradicts_the_others(channel: grpc.aio.Channel, spoil: Spoil, says: str) -> None:
    first, second = FakeRank(channel, 0), FakeRank(channel, 1)
    await first.greet(hello_of(LIVE, 0))
    hello = hello_of(LIVE, 1)
    spoil(hello)
    await second.say(hello=hello)
    code, text = await second.refusal()
    assert (code, says in text) == (CONTRADICTS, True), text


async def test_a_second_agent_with_the_same_rank_of_another_forming(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        second = FakeRank(group.channel, 2)
        await second.say(hello=hello_of(LIVE, 2, group_id="second"))
        code, text = await second.refusal()
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert "rank 2 is connected already" in text
        deployment = service.plane.deployments["decode"]
        assert len(deployment.connected) == RANKS


async def test_a_rank_that_connects_again_is_heard_and_its_old_stream_is_not(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        old, group.ranks[2] = group.ranks[2], FakeRank(group.channel, 2)
        await group.ranks[2].greet(hello_of(LIVE, 2))
        code, text = await old.refusal()
        assert code == grpc.StatusCode.ABORTED
        assert "connected again" in text
        deployment = service.plane.deployments["decode"]
        await until(lambda: len(deployment.connected) == RANKS)
        group.step = 5
        await group.heartbeat()
        await until(lambda: deployment.group is not None and deployment.group.members[2].step == 5)


async def test_ranks_that_wait_in_vain_give_way_to_another_forming(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        squatter = FakeRank(group.channel, 0)
        await squatter.greet(hello_of(LIVE, 0, group_id="of nobody else"))
        deployment = service.plane.deployments["decode"]
        tick, deployment.tick = deployment.tick, lambda now: None  # the service's own clock does not move
        for now in (1e6, 1e6 + 59):
            tick(now)
            rank = FakeRank(group.channel, 1)
            await rank.say(hello=hello_of(LIVE, 1))
            assert (await rank.refusal())[0] == CONTRADICTS
        tick(1e6 + 61)
        await group.join()
        assert (await squatter.refusal())[0] == grpc.StatusCode.ABORTED
        assert len(deployment.connected) == RANKS
        assert deployment.live is not None


async def test_a_refused_hello_leaves_no_lasting_problem(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        stranger = FakeRank(group.channel, 7)
        hello = hello_of(LIVE, 0, ep_size=8)
        hello.rank = 7
        await stranger.say(hello=hello)
        assert (await stranger.refusal())[0] == CONTRADICTS
        deployment = service.plane.deployments["decode"]
        assert any("rank 7 was turned away" in problem for problem in problems(deployment))
        now = time.monotonic()
        deployment.tick(now)
        deployment.tick(now + 61)
        assert not deployment.attendance.refused


async def test_a_silent_agent_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_service.control.server.agents.agent_stream._SILENCE_SECONDS", 0.1)
    async with (
        running_service(settings(heartbeat_seconds=0.05)) as running,
        FakeGroup(running.address) as group,
    ):
        await group.join()
        code, text = await group.ranks[0].refusal()
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "nothing was heard" in text
        await until(lambda: not running.plane.deployments["decode"].connected)
