"""Requests in parts take bounded memory, of a host and of all; who comes beyond that waits, and is refused in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.core.health import problems
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.wire.codec import PART_BYTES, in_parts
from eplb_service.wire.generated import agent_pb2
from tests.control.fake_group import FakeGroup, first_placement, hello_of, live_of, refusal_of
from tests.control.server.test_service import settings, until

LIVE = live_of(first_placement())
MIB = 1 << 20


async def _soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_given_in_order_and_a_greedy_host_holds_up_no_other() -> None:
    room = Quotas(1, 1, 100, 25)
    given: list[str] = []
    ends: dict[str, asyncio.Event] = {}

    async def ask(name: str, host: str, size: int) -> None:
        ends[name] = asyncio.Event()
        async with room.memory(host, size):
            given.append(name)
            await ends[name].wait()

    asked = [("a1", "a", 25), ("a2", "a", 5), ("b", "b", 25), ("c", "c", 20), ("d", "d", 20), ("e", "e", 25)]
    tasks = [asyncio.ensure_future(ask(*one)) for one in asked]
    await _soon()
    # The host a has its share, and e waits for room behind nobody.
    assert given == ["a1", "b", "c", "d"]
    assert room.held == 90
    tasks[5].cancel()
    await _soon()
    ends["a1"].set()
    await _soon()
    assert given[4:] == ["a2"]
    assert room.held == 70
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert room.held == 0
    assert not room._held_by
    assert not room._waiting


async def test_a_large_request_is_not_starved_by_small_ones() -> None:
    room = Quotas(1, 1, 100, 100)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(room.memory("a", 60))
        large = asyncio.ensure_future(held.enter_async_context(room.memory("b", 50)))
        await _soon()
        small = asyncio.ensure_future(held.enter_async_context(room.memory("c", 10)))
        await _soon()
        assert not large.done()
        assert not small.done()
        assert room.held == 60
        large.cancel()
        await small
        assert room.held == 70
        with pytest.raises(asyncio.CancelledError):
            await large


async def test_whoever_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_service.control.server.access.quotas._TURN_SECONDS", 0.01)
    room = Quotas(1, 1, 10, 10)
    async with room.memory("a", 10):
        with pytest.raises(ExhaustedError, match="10 bytes are under way from this host and 10 in all"):
            async with room.memory("a", 1):
                raise AssertionError
    async with room.memory("a", 10):
        assert room.held == 10
    assert room.held == 0


def _large(size: int) -> list[agent_pb2.ConnectRequest]:
    request = agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(digest=LIVE.digest, error="x" * size))
    return list(in_parts(request))


def _hello() -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(hello=hello_of(LIVE, 0))


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningService]:
    monkeypatch.setattr("eplb_service.control.server.settings._REQUESTS_IN_FLIGHT", 2)
    async with running_service(settings(max_message_bytes=MIB)) as running:
        yield running


async def test_a_request_in_parts_is_heard(service: RunningService, group: FakeGroup) -> None:
    await group.ranks[0].say(heartbeat=agent_pb2.Heartbeat(digest=LIVE.digest, error="x" * (MIB - 100)))
    await until(lambda: any("xxx" in problem for problem in problems(service.plane.deployments["decode"])))


async def test_requests_that_are_no_requests(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _large(3 * PART_BYTES)
    exhausted, invalid = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT
    for said, expected, reason in (
        (_large(MIB), exhausted, "that max_message_bytes allows"),
        (whole[:1], invalid, "was broken off"),
        ([whole[0], _hello()], invalid, "was broken off"),
        ([whole[0], whole[0]], invalid, "part.bytes_left is"),
        (whole[1:], invalid, ""),
    ):
        code, text = await refusal_of(service.address, _hello(), *said)
        assert (code, reason in text) == (expected, True), text
    # Not before: whatever else the machine does, those above are refused for what they say.
    monkeypatch.setattr("eplb_service.control.server.agents._WHOLE_SECONDS", 0.2)
    async with FakeGroup(service.address) as group:
        await group.join()
        await group.ranks[0].call.write(whole[0])
        code, text = await group.ranks[0].refusal()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not all arrive" in text
    await until(lambda: not service.plane.deployments["decode"].connected)


async def test_a_host_that_breaks_off_many_requests_gets_its_share_and_gives_it_back(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        with monkeypatch.context() as hurried:
            hurried.setattr("eplb_service.control.server.agents._WHOLE_SECONDS", 1.5)
            hurried.setattr("eplb_service.control.server.access.quotas._TURN_SECONDS", 0.05)
            for rank in group.ranks:
                await rank.call.write(_large(MIB - 100)[0])
            codes = {(await rank.refusal())[0] for rank in group.ranks}
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    async with FakeGroup(service.address) as group:
        await group.join()
        await group.ranks[1].say(heartbeat=agent_pb2.Heartbeat(digest=LIVE.digest, error="y" * (MIB - 100)))
        await until(
            lambda: any("yyy" in problem for problem in problems(service.plane.deployments["decode"]))
        )
