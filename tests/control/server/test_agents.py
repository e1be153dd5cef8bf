"""A stream ends when asked to, heat that has piled up loses no step, and plans go out by turns, the newest alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
import pytest_asyncio

from eplb_core.wire.agent import decode_hello
from eplb_core.wire.plan import SharedPlan
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import HELD_SECONDS
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.agents import AgentService, _first_of
from eplb_service.control.server.listening import StatusError
from eplb_service.control.server.outgoing import streams as outgoing_streams
from eplb_service.control.server.outgoing.streams import RankStream, Streams, _PlanSending
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.service import RunningService, running_service
from tests.control.fake_group import (
    RANKS,
    FakeGroup,
    FakeRank,
    first_placement,
    heat_report,
    hello_of,
    live_of,
    skewed_heat,
)
from tests.control.server.service_under_test import settings, until


async def _listen(heard: list[str]) -> None:
    """Loses its first cancellation, as ``asyncio.wait_for`` does where a message comes in at the same moment."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        heard.append("a message")
    await asyncio.sleep(60)


async def test_a_stream_ends_though_a_message_comes_in_as_it_is_cancelled() -> None:
    stream, heard = RankStream(), list[str]()
    asyncio.get_running_loop().call_later(0.01, stream.end, grpc.StatusCode.ABORTED, "say Hello again")
    with pytest.raises(StatusError, match="say Hello again"):
        await asyncio.wait_for(_first_of(_listen(heard), stream.ended()), 5)
    assert heard == ["a message"]


async def test_what_ends_a_stream_is_reported_and_the_others_are_over() -> None:
    ended = []

    async def fails() -> None:
        raise ValueError("a message says nothing")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    with pytest.raises(ValueError, match="says nothing"):
        await _first_of(waits(), fails())
    assert ended == ["waits"]


class _Plane:
    """Notes what is asked of it; three times there are more whole steps to put together."""

    settings = SimpleNamespace(heartbeat_seconds=2.0)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def put_together(self, _: object) -> bool:
        self.asked.append("put together")
        return self.asked.count("put together") <= 3

    def heat_report(self, *_: object) -> None:
        self.asked.append("report")


async def test_steps_that_wait_are_put_together_by_parts_before_the_next_report_is_taken() -> None:
    """One that would push them out of the ring would otherwise have all of them put together at once."""
    plane, live = _Plane(), live_of(first_placement())
    deployment = SimpleNamespace(limits=SimpleNamespace(pending_steps=8), is_ahead=lambda *_: False)
    service = AgentService(cast("ControlPlane", plane), cast("Quotas", None))
    message = heat_report(live, 0, 0, skewed_heat(2))
    stream = RankStream()
    stream.heard_at = time.monotonic()
    await service._receive_heat(
        cast("Deployment", deployment), decode_hello(hello_of(live, 0)), stream, message
    )
    assert plane.asked == ["put together"] * 4 + ["report", "put together"]


REPORTS, STEPS = 24, 8
"""Three times as many steps as reports of this length may be apart."""


async def send(group: FakeGroup, rank: int) -> None:
    """All that one rank has to report."""
    for number in range(REPORTS):
        report = heat_report(group.live, rank, number * STEPS, skewed_heat(STEPS))
        await group.ranks[rank].say(heat_report=report)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with running_service(settings(decision_interval=4096)) as running:
        yield running


async def test_a_backlog_that_is_read_rank_after_rank_is_whole(
    service: RunningService, group: FakeGroup
) -> None:
    for rank in range(RANKS):
        await send(group, rank)
    decode = service.plane.deployments["decode"]
    await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
    assert decode.totals.steps_lost == 0


async def test_heat_of_ranks_that_come_before_the_last_one_is_not_lost(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        group.ranks = [FakeRank(group.channel, rank) for rank in range(RANKS)]
        for rank in group.ranks:
            if rank is group.ranks[-1]:
                # As long as agents take to try again; the heat of the others is on its way meanwhile.
                await asyncio.sleep(HELD_SECONDS / 10)
            await rank.greet(hello_of(group.live, rank.rank))
            await send(group, rank.rank)
        decode = service.plane.deployments["decode"]
        await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
        assert decode.totals.steps_lost == 0


async def test_a_rank_that_reports_nothing_holds_the_others_up_but_once(
    service: RunningService, group: FakeGroup
) -> None:
    began = time.monotonic()
    for rank in range(1, RANKS):
        await send(group, rank)
    decode = service.plane.deployments["decode"]
    # Two thirds of their reports are ahead of the silent rank.
    once = 8 * HELD_SECONDS
    await until(lambda: {member.step for member in decode.connected[1:]} == {REPORTS * STEPS}, once)
    assert time.monotonic() - began >= HELD_SECONDS
    assert decode.totals.steps_received == 0


class _Plan:
    """A plan whose copies name their rank."""

    def response(self, rank: int) -> bytes:
        return bytes([rank])


PLAN, SENT_TO = cast("SharedPlan", _Plan()), 6


class Scene:
    """Ranks that read only when they are let."""

    def __init__(self, at_a_time: int) -> None:
        self.sending = _PlanSending(PLAN, asyncio.Semaphore(at_a_time), SENT_TO)
        self.begun: list[int] = []
        self.reads = [asyncio.Event() for _ in range(SENT_TO)]
        self.tasks = [asyncio.ensure_future(self.sending.send(rank, self._write)) for rank in range(SENT_TO)]

    async def _write(self, data: bytes) -> None:
        self.begun.append(data[0])
        await self.reads[data[0]].wait()

    async def soon(self) -> list[int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return self.begun

    async def end(self) -> None:
        for event in self.reads:
            event.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_copies_go_out_in_order_as_there_is_room() -> None:
    scene = Scene(2)
    assert await scene.soon() == [0, 1]
    scene.reads[1].set()
    assert await scene.soon() == [0, 1, 2]
    scene.tasks[0].cancel()
    assert await scene.soon() == [0, 1, 2, 3], "a rank whose stream has ended gives its room back"
    scene.tasks[4].cancel()
    scene.reads[2].set()
    assert await scene.soon() == [0, 1, 2, 3, 5]
    await scene.end()


async def test_a_plan_that_is_over_goes_to_nobody_else() -> None:
    scene = Scene(2)
    await scene.soon()
    scene.sending.over = True
    scene.reads[0].set()
    assert await scene.soon() == [0, 1]
    await scene.end()
    assert scene.begun == [0, 1]


async def test_a_rank_that_does_not_read_keeps_its_turn_for_a_while_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_streams, "_MAX_TURN_SECONDS", 0.01)
    scene = Scene(1)
    begun = await scene.soon()
    assert begun == list(range(len(begun)))
    for _ in range(1000):
        if len(scene.begun) == SENT_TO:
            break
        await asyncio.sleep(0.01)
    assert scene.begun == list(range(SENT_TO))
    assert not any(task.done() for task in scene.tasks)
    assert not scene.sending.out.is_set()
    await scene.end()
    assert scene.sending.out.is_set()


def test_a_newer_plan_takes_the_place_of_the_one_that_is_being_sent() -> None:
    streams = Streams()
    ranks = [RankStream() for _ in range(3)]
    for rank in (2, 0, 1):
        streams.add("decode", rank, ranks[rank])
    other = RankStream()
    streams.add("prefill", 0, other)
    streams.send("decode", PLAN)
    streams.send("prefill", PLAN)
    streams.send("decode", PLAN)
    queued = [[rank.outbox.get_nowait() for _ in range(2)] for rank in ranks]
    assert [[sending.over for sending, _ in copies] for copies in queued] == [[True, False]] * 3
    assert [copies[0][1] for copies in queued] == [0, 1, 2]
    streams.withdraw("decode")
    assert queued[0][1][0].over
    assert queued[0][1][0].out.is_set()
    assert not other.outbox.get_nowait()[0].over
