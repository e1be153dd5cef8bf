"""The service asks ranks for no more heat than somebody needs, and for less where it cannot take all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest_asyncio

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.health import problems
from eplb_service.control.core.report_size import ReportSize
from eplb_service.control.core.shedding import Shedding
from eplb_service.control.core.watches import Watches
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.wire.codec import pack
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from tests.control.fake_group import LAYERS, FakeGroup, heat_report, skewed_heat
from tests.control.server.test_forget import metrics
from tests.control.server.test_service import settings, until


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with running_service(settings()) as running:
        yield running


def deployment_of(service: RunningService) -> Deployment:
    return service.plane.deployments["decode"]


async def asked(group: FakeGroup) -> list[tuple[bool, int]]:
    """What each rank is asked for next."""
    messages = [await asyncio.wait_for(rank.call.read(), 20) for rank in group.ranks]
    return [(message.reporting.source_sums, message.reporting.one_in) for message in messages]


async def test_sums_are_asked_for_and_every_step_while_somebody_watches(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        welcomes = await group.join()
        assert all(welcome.reporting.source_sums for welcome in welcomes)
        operator = operator_pb2_grpc.OperatorServiceStub(group.channel)
        call = operator.WatchHeat(operator_pb2.WatchHeatRequest(deployment="decode"))
        assert (await call.read()).HasField("served")
        assert await asked(group) == [(False, 1)] * len(group.ranks)
        # A report that was on its way is not for the watcher: one trace has own tokens by step, or has none.
        early = heat_report(group.live, 0, 0, skewed_heat(8))
        early.ClearField("source_counts")
        early.source_sums.CopyFrom(pack(np.ones((LAYERS, 8), dtype=np.int32)))
        await group.ranks[0].say(heat_report=early)
        await group.ranks[0].say(heat_report=heat_report(group.live, 0, 8, skewed_heat(8)))
        first = await call.read()
        assert (first.heat.report.first_step, first.heat.report.HasField("source_counts")) == (8, True)
        call.cancel()
        assert await asked(group) == [(True, 1)] * len(group.ranks)


async def test_reports_grow_where_ranks_are_asked_to_follow_their_number() -> None:
    async with running_service(settings(report_steps="auto")) as service, FakeGroup(service.address) as group:
        welcomes = await group.join()
        assert {(one.report_steps, one.reporting.report_steps) for one in welcomes} == {(16, 16)}
        deployment = deployment_of(service)
        await until(lambda: deployment.live is not None)
        deployment.watches = Watches(report_size=ReportSize(64, most=64))
        service.plane.tick()
        messages = [await asyncio.wait_for(rank.call.read(), 20) for rank in group.ranks]
        assert [message.reporting.report_steps for message in messages] == [64] * len(group.ranks)
        # Whoever watches receives own tokens step by step, in short reports.
        operator = operator_pb2_grpc.OperatorServiceStub(group.channel)
        call = operator.WatchHeat(operator_pb2.WatchHeatRequest(deployment="decode"))
        await call.read()
        messages = [await asyncio.wait_for(rank.call.read(), 20) for rank in group.ranks]
        assert [message.reporting.report_steps for message in messages] == [16] * len(group.ranks)
        call.cancel()
        messages = [await asyncio.wait_for(rank.call.read(), 20) for rank in group.ranks]
        assert [message.reporting.report_steps for message in messages] == [64] * len(group.ranks)
        # 64 steps at once enter the window by and by.
        group.step = 64
        await group.send_heat(skewed_heat(64))
        await until(lambda: deployment.heat is not None and deployment.heat.assembled == 64)
        assert deployment.totals.steps_received == 64


async def test_a_service_that_records_asks_for_every_step(tmp_path: Path) -> None:
    async with running_service(settings(record=tmp_path)) as service, FakeGroup(service.address) as group:
        assert not any(welcome.reporting.source_sums for welcome in await group.join())


async def test_what_cannot_be_taken_is_shed_alike_by_all_ranks_and_reported(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join()
        deployment = deployment_of(service)
        await until(lambda: deployment.live is not None)
        deployment.watches = Watches(shedding=replace(Shedding(), one_in=4, looked_at=float("inf")))
        service.plane.tick()
        assert await asked(group) == [(True, 4)] * len(group.ranks)
        assert ["of every 4 reports they send one" in problem for problem in problems(deployment)] == [True]
        assert 'eplb_heat_one_in{deployment="decode"} 4.0' in await metrics(service)
        # Plans go out all the same.
        for block in range(0, 16, 4):
            group.step = 8 * block
            await group.send_heat(skewed_heat(8))
        assert len(await group.hear_plan()) == len(group.ranks)
        deployment.watches = Watches()
        service.plane.tick()
        assert await asked(group) == [(True, 1)] * len(group.ranks)
        assert problems(deployment) == []
