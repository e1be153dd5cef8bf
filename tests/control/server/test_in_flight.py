"""Streams and partially received requests use bounded memory, per host and in total.

Excess requests are rejected promptly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from eplb_core.wire.codec import PART_BYTES, in_parts
from eplb_core.wire.generated import agent_pb2
from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.core.health import problems
from eplb_service.control.server.access.quotas import Turns
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.telemetry.logs import BoundedLog
from tests.control.fake_group import FakeGroup, FakeRank, first_placement, hello_of, live_of, refusal_of
from tests.control.server.http_client import scrape
from tests.control.server.service_under_test import settings, until

LIVE = live_of(first_placement())
MIB = 1 << 20


async def _run_pending_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_turns_are_granted_in_order_and_a_greedy_host_does_not_delay_others() -> None:
    turns = Turns(6)
    granted = list[str]()
    ends = dict[str, asyncio.Event]()

    async def ask(name: str) -> None:
        ends[name] = asyncio.Event()
        async with turns.turn(name[0]):
            granted.append(name)
            await ends[name].wait()

    tasks = [asyncio.ensure_future(ask(f"{host}{number}")) for host in "abc" for number in range(5)]
    await _run_pending_tasks()
    # Host a gets only its share of the turns, although b and c arrived later.
    assert granted == ["a0", "a1", "a2", "a3", "b0", "b1"]
    tasks[7].cancel()
    ends["a1"].set()
    ends["b0"].set()
    await _run_pending_tasks()
    assert granted[6:] == ["b3", "c0"], "a cancelled request does not delay other requests"
    while not all(task.done() for task in tasks):
        for end in ends.values():
            end.set()
        await _run_pending_tasks()
    assert sorted({*granted, "b2"}) == [f"{host}{number}" for host in "abc" for number in range(5)]


async def test_a_request_that_waits_too_long_for_its_turn_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eplb_service.control.server.access.quotas._TURN_SECONDS", 0.01)
    turns = Turns(1)
    async with turns.turn("a"):
        with pytest.raises(ExhaustedError, match="too many large requests are already being read"):
            async with turns.turn("b"):
                raise AssertionError
    async with turns.turn("c"):
        assert "c" in turns._of_host
    assert "c" not in turns._of_host, "hosts that are gone leave no state behind"


def _large(size: int) -> list[agent_pb2.ConnectRequest]:
    request = agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(digest=LIVE.digest, error="x" * size))
    return list(in_parts(request))


def _hello() -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(hello=hello_of(LIVE, 0))


@pytest.fixture
async def service() -> AsyncIterator[RunningService]:
    async with run_service(settings(max_message_bytes=MIB)) as running:
        yield running


async def test_oversized_incomplete_and_malformed_requests_are_rejected(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _large(3 * PART_BYTES)
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for messages, expected, reason in (
        (_large(MIB), exhausted, "that max_message_bytes allows"),
        ([agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(error="x" * 2 * MIB))], exhausted, ""),
        (parts[:1], invalid, "ended before its last part"),
        ([parts[0], _hello()], invalid, "ended before its last part"),
        ([parts[0], parts[0]], invalid, "part.bytes_left is"),
        (parts[1:], invalid, ""),
    ):
        code, text = await refusal_of(service.address, _hello(), *messages)
        assert (code, reason in text) == (expected, True), text
    # Shorten the time limit only now, so that the requests above fail because of their content, even on a busy host.
    monkeypatch.setattr("eplb_service.control.server.agents._WHOLE_SECONDS", 0.2)
    async with FakeGroup(service.address) as group:
        await group.join()
        await group.ranks[0].call.write(parts[0])
        code, text = await group.ranks[0].refusal()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not all arrive" in text
    await until(lambda: not service.plane.deployments["decode"].connected)


async def test_a_host_gets_its_turns_back_after_all_its_requests_time_out(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        with monkeypatch.context() as patched:
            patched.setattr("eplb_service.control.server.agents._WHOLE_SECONDS", 0.5)
            for rank in group.ranks:
                await rank.call.write(_large(MIB - 100)[0])
            codes = {(await rank.refusal())[0] for rank in group.ranks}
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    async with FakeGroup(service.address) as group:
        await group.join()
        await group.ranks[1].say(heartbeat=agent_pb2.Heartbeat(digest=LIVE.digest, error="y" * (MIB - 100)))
        await until(
            lambda: any("yyy" in problem for problem in problems(service.plane.deployments["decode"]))
        )


async def test_streams_are_limited_in_total_and_per_host_and_rejections_are_counted() -> None:
    for bounds, name in (
        ({"max_streams": 2}, "limit set by max_streams;"),
        ({"max_streams_per_peer": 2}, "limit set by max_streams_per_peer;"),
    ):
        async with run_service(settings(**bounds)) as service:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(service.address, options=options) for _ in range(3)]
            ranks = [FakeRank(channel, 0) for channel in channels]
            ends = [asyncio.ensure_future(rank.refusal()) for rank in ranks]
            # The last stream ends immediately. The service still waits for a Hello on the other streams.
            (ended,), open_streams = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            code, text = ended.result()
            assert (code, name in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            counted = "eplb_refusals_total", ("resource_exhausted",)
            assert (await scrape(service))[counted] == 1
            for task in open_streams:
                task.cancel()
            for channel in channels:
                await channel.close()


def test_log_lines_above_the_rate_limit_are_dropped_and_counted() -> None:
    now = [0.0]
    dropped_lines = []
    log = BoundedLog(lambda: dropped_lines.append(1), clock=lambda: now[0])
    for _ in range(300):
        log.info("stranger")
    assert len(dropped_lines) == 300 - 256
    now[0] = 1.0
    for _ in range(20):
        log.warning("stranger")
    assert len(dropped_lines) == 300 - 256 + 10
