"""Streams end on request, a heat backlog loses no steps, and only the newest plan is sent, to a few ranks at a time."""

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
from eplb_service.control.server.listening import CallError
from eplb_service.control.server.outgoing import streams as outgoing_streams
from eplb_service.control.server.outgoing.streams import RankStream, Streams, _PlanSending
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.service import RunningService, run_service
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


async def _listen(messages: list[str]) -> None:
    """Ignore the first cancellation, as ``asyncio.wait_for`` does if a message arrives at the same moment."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        messages.append("a message")
    await asyncio.sleep(60)


async def test_a_stream_ends_even_if_a_message_arrives_during_its_cancellation() -> None:
    stream = RankStream()
    messages = list[str]()
    asyncio.get_running_loop().call_later(0.01, stream.end, grpc.StatusCode.ABORTED, "say Hello again")
    with pytest.raises(CallError, match="say Hello again"):
        await asyncio.wait_for(_first_of(_listen(messages), stream.ended()), 5)
    assert messages == ["a message"]


async def test_the_first_error_of_a_stream_is_raised_and_its_other_tasks_are_cancelled() -> None:
    ended = []

    async def fails() -> None:
        raise ValueError("the message is empty")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    with pytest.raises(ValueError, match="the message is empty"):
        await _first_of(waits(), fails())
    assert ended == ["waits"]


class _Plane:
    """A control plane that records its calls and has complete steps for the first three calls of ``assemble_steps``."""

    settings = SimpleNamespace(heartbeat_seconds=2.0)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def assemble_steps(self, _: object) -> bool:
        self.calls.append("assemble")
        return self.calls.count("assemble") <= 3

    def heat_report(self, *_: object) -> None:
        self.calls.append("report")


async def test_pending_steps_are_assembled_in_batches_before_the_next_report() -> None:
    """Otherwise, a report that pushes pending steps out of the ring would assemble all of them at once."""
    plane = _Plane()
    live = live_of(first_placement())
    deployment = SimpleNamespace(limits=SimpleNamespace(pending_steps=8), is_ahead=lambda *_: False)
    service = AgentService(cast("ControlPlane", plane), cast("Quotas", None))
    message = heat_report(live, 0, 0, skewed_heat(2))
    stream = RankStream()
    stream.heard_at = time.monotonic()
    await service._receive_heat(
        cast("Deployment", deployment), decode_hello(hello_of(live, 0)), stream, message
    )
    assert plane.calls == ["assemble"] * 4 + ["report", "assemble"]


REPORTS = 24
STEPS = 8
"""Number of steps per report. Together, the reports cover three times as many steps as the ranks may be apart."""


async def send(group: FakeGroup, rank: int) -> None:
    """Send all reports from one rank."""
    for number in range(REPORTS):
        report = heat_report(group.live, rank, number * STEPS, skewed_heat(STEPS))
        await group.ranks[rank].say(heat_report=report)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with run_service(settings(decision_interval=4096)) as running:
        yield running


async def test_a_backlog_read_one_rank_after_another_loses_no_step(
    service: RunningService, group: FakeGroup
) -> None:
    for rank in range(RANKS):
        await send(group, rank)
    decode = service.plane.deployments["decode"]
    await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
    assert decode.totals.steps_lost == 0


async def test_heat_sent_before_the_last_rank_connects_is_not_lost(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        group.ranks = [FakeRank(group.channel, rank) for rank in range(RANKS)]
        for rank in group.ranks:
            if rank is group.ranks[-1]:
                # Wait as long as an agent does before it retries. In the meantime, the other ranks' heat is in transit.
                await asyncio.sleep(HELD_SECONDS / 10)
            await rank.greet(hello_of(group.live, rank.rank))
            await send(group, rank.rank)
        decode = service.plane.deployments["decode"]
        await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
        assert decode.totals.steps_lost == 0


async def test_a_rank_without_reports_delays_the_other_ranks_only_once(
    service: RunningService, group: FakeGroup
) -> None:
    started_at = time.monotonic()
    for rank in range(1, RANKS):
        await send(group, rank)
    decode = service.plane.deployments["decode"]
    # Two thirds of the other ranks' reports are too far ahead of the silent rank to be accepted.
    time_limit = 8 * HELD_SECONDS
    await until(lambda: {member.step for member in decode.connected[1:]} == {REPORTS * STEPS}, time_limit)
    assert time.monotonic() - started_at >= HELD_SECONDS
    assert decode.totals.steps_received == 0


class _Plan:
    """A plan whose encoded copy for each rank is the rank's number."""

    def response(self, rank: int) -> bytes:
        return bytes([rank])


PLAN = cast("SharedPlan", _Plan())
RANK_COUNT = 6


class Scene:
    """Ranks whose reads are controlled by the test."""

    def __init__(self, concurrency: int) -> None:
        self.sending = _PlanSending(PLAN, asyncio.Semaphore(concurrency), RANK_COUNT)
        self.started_ranks: list[int] = []
        self.reads = [asyncio.Event() for _ in range(RANK_COUNT)]
        self.tasks = [
            asyncio.ensure_future(self.sending.send(rank, self._write)) for rank in range(RANK_COUNT)
        ]

    async def _write(self, data: bytes) -> None:
        self.started_ranks.append(data[0])
        await self.reads[data[0]].wait()

    async def run_pending_tasks(self) -> list[int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return self.started_ranks

    async def end(self) -> None:
        for event in self.reads:
            event.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_copies_of_a_plan_are_sent_in_rank_order_within_the_concurrency_limit() -> None:
    scene = Scene(2)
    assert await scene.run_pending_tasks() == [0, 1]
    scene.reads[1].set()
    assert await scene.run_pending_tasks() == [0, 1, 2]
    scene.tasks[0].cancel()
    assert await scene.run_pending_tasks() == [0, 1, 2, 3], "a rank whose stream has ended frees its turn"
    scene.tasks[4].cancel()
    scene.reads[2].set()
    assert await scene.run_pending_tasks() == [0, 1, 2, 3, 5]
    await scene.end()


async def test_an_ended_plan_is_not_sent_to_further_ranks() -> None:
    scene = Scene(2)
    await scene.run_pending_tasks()
    scene.sending.over = True
    scene.reads[0].set()
    assert await scene.run_pending_tasks() == [0, 1]
    await scene.end()
    assert scene.started_ranks == [0, 1]


async def test_a_rank_that_does_not_read_keeps_its_turn_only_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_streams, "_MAX_TURN_SECONDS", 0.01)
    scene = Scene(1)
    started_ranks = await scene.run_pending_tasks()
    assert started_ranks == list(range(len(started_ranks)))
    for _ in range(1000):
        if len(scene.started_ranks) == RANK_COUNT:
            break
        await asyncio.sleep(0.01)
    assert scene.started_ranks == list(range(RANK_COUNT))
    assert not any(task.done() for task in scene.tasks)
    assert not scene.sending.out.is_set()
    await scene.end()
    assert scene.sending.out.is_set()


def test_a_newer_plan_replaces_the_one_that_is_being_sent() -> None:
    streams = Streams()
    ranks = [RankStream() for _ in range(3)]
    for rank in (2, 0, 1):
        streams.add("decode", rank, ranks[rank])
    prefill_stream = RankStream()
    streams.add("prefill", 0, prefill_stream)
    streams.send("decode", PLAN)
    streams.send("prefill", PLAN)
    streams.send("decode", PLAN)
    queued = [[rank.outbox.get_nowait() for _ in range(2)] for rank in ranks]
    assert [[sending.over for sending, _ in copies] for copies in queued] == [[True, False]] * 3
    assert [copies[0][1] for copies in queued] == [0, 1, 2]
    streams.withdraw("decode")
    assert queued[0][1][0].over
    assert queued[0][1][0].out.is_set()
    assert not prefill_stream.outbox.get_nowait()[0].over
