"""Ranks send only the heat that the service needs and can process. A slow watcher never delays the service."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from eplb_core.placement import Int32
from eplb_core.wire.codec import pack
from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.cli import trace_record
from eplb_service.cli.main import run
from eplb_service.control.core import flow
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import Shedding
from eplb_service.control.core.health import problems
from eplb_service.control.server.listening import CallError
from eplb_service.control.server.outgoing import heat_feed
from eplb_service.control.server.outgoing.heat_feed import _Watcher
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.io.open_trace import open_trace
from eplb_service.io.trace import PHASES
from tests.cli.published import checked_document
from tests.control.fake_group import (
    BYTES_PER_EXPERT,
    EXPERTS,
    LAYERS,
    RANKS,
    FakeGroup,
    first_placement,
    heat_report,
    live_of,
    skewed_heat,
)
from tests.control.server.http_client import scrape
from tests.control.server.service_under_test import settings, tick, until


def deployment_of(service: RunningService) -> Deployment:
    return service.plane.deployments["decode"]


async def reporting_requests(group: FakeGroup) -> list[tuple[bool, int]]:
    """Return each rank's next reporting request: whether it asks for source sums, and n for one in n reports."""
    messages = [await rank.hear_reporting() for rank in group.ranks]
    return [(message.source_sums, message.one_in) for message in messages]


async def test_ranks_send_source_counts_per_step_only_while_heat_is_watched(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        welcomes = await group.join()
        assert all(welcome.reporting.source_sums for welcome in welcomes)
        call = group.operator.WatchHeat(operator_pb2.WatchHeatRequest(deployment="decode"))
        assert (await call.read()).HasField("served")
        assert await reporting_requests(group) == [(False, 1)] * len(group.ranks)
        # This report was sent before the request, without source counts. The watcher does not receive it, because a
        # trace has source counts for all steps or for none.
        early = heat_report(group.live, 0, 0, skewed_heat(8))
        early.ClearField("source_counts")
        early.source_sums.CopyFrom(pack(np.ones((LAYERS, 8), dtype=np.int32)))
        await group.ranks[0].say(heat_report=early)
        await group.ranks[0].say(heat_report=heat_report(group.live, 0, 8, skewed_heat(8)))
        first = await call.read()
        assert (first.heat.report.first_step, first.heat.report.HasField("source_counts")) == (8, True)
        call.cancel()
        assert await reporting_requests(group) == [(True, 1)] * len(group.ranks)


async def test_large_groups_send_long_reports_unless_heat_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_RANKS_PER_STEP", 0.065)
    many = settings(report_steps="auto", window_steps=256, decision_interval=256)
    async with run_service(many) as service, FakeGroup(service.address) as group:
        welcomes = await group.join()
        assert {(welcome.report_steps, welcome.reporting.report_steps) for welcome in welcomes} == {(64, 64)}
        deployment = deployment_of(service)
        await until(lambda: deployment.live is not None)
        # A watcher receives source counts per step, in short reports.
        call = group.operator.WatchHeat(operator_pb2.WatchHeatRequest(deployment="decode"))
        await call.read()
        messages = [await rank.hear_reporting() for rank in group.ranks]
        assert [message.report_steps for message in messages] == [16] * len(group.ranks)
        call.cancel()
        messages = [await rank.hear_reporting() for rank in group.ranks]
        assert [message.report_steps for message in messages] == [64] * len(group.ranks)
        # The 64 steps in a single report enter the window gradually.
        group.step = 64
        await group.send_heat(skewed_heat(64))
        await until(lambda: deployment.heat is not None and deployment.heat.assembled == 64)
        assert deployment.totals.steps_received == 64


async def test_all_ranks_shed_the_same_reports_and_the_shedding_is_reported(
    service: RunningService, group: FakeGroup
) -> None:
    deployment = deployment_of(service)
    await until(lambda: deployment.live is not None)
    deployment.shedding = replace(Shedding(), one_in=4, looked_at=float("inf"))
    tick(service.plane)
    assert await reporting_requests(group) == [(True, 4)] * len(group.ranks)
    assert ["they send only one in 4 reports" in problem for problem in problems(deployment)] == [True]
    assert (await scrape(service))["eplb_heat_one_in", ("decode",)] == 4
    # Plans must still be made and sent.
    for block in range(0, 16, 4):
        group.step = 8 * block
        await group.send_heat(skewed_heat(8))
    assert len(await group.hear_plan()) == len(group.ranks)
    deployment.shedding = Shedding()
    tick(service.plane)
    assert await reporting_requests(group) == [(True, 1)] * len(group.ranks)
    assert problems(deployment) == []


async def recording(service: RunningService, *arguments: str, watched: bool = True) -> asyncio.Task[int]:
    """Start ``eplb trace record`` and, if ``watched``, wait until the service sends it heat."""
    feed = service.plane.feed
    # The service takes a moment to notice that the previous watcher is gone.
    await until(lambda: not feed._watchers)
    task = asyncio.create_task(
        asyncio.to_thread(run, ["trace", "record", *arguments, "--address", service.address])
    )
    if watched:
        await until(lambda: bool(feed._watchers))
    return task


@pytest.mark.parametrize("by_slot", [True, False], ids=["slots-counted", "slots-derived"])
async def test_a_recording_contains_the_ranks_counts_before_and_after_a_commit(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_slot: bool
) -> None:
    out = tmp_path / "watched.zarr"
    async with FakeGroup(service.address, by_slot=by_slot) as group:
        await group.join()
        task = await recording(service, "decode", "--out", str(out), "--steps", "40")
        for number in range(4):
            await group.send_heat(skewed_heat(8, seed=number))
        await group.carry_out(await group.hear_plan())
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        await group.send_heat(skewed_heat(8, seed=4))
        await until(lambda: deployment.totals.steps_received == 40)
        assert await task == 0
    assert f"{out}: 40 steps recorded" in capsys.readouterr().out
    assert not np.array_equal(group.live.placement.phy2log_LRS, first_placement().phy2log_LRS)
    heat_TLE = np.concatenate([skewed_heat(8, seed=number) for number in range(5)])
    trace = open_trace(out)
    assert np.array_equal(trace.heat(0, trace.steps), RANKS * heat_TLE)
    loads_TLR = trace.served_loads(0, 40)
    assert loads_TLR is not None
    assert np.array_equal(loads_TLR[:32], loads_sent(live_of(first_placement()), heat_TLE[:32]))
    assert np.array_equal(loads_TLR[32:], loads_sent(group.live, heat_TLE[32:]))
    sources_TRLE = trace.source_rows(0, 40)
    assert sources_TRLE is not None
    assert np.array_equal(sources_TRLE, np.broadcast_to(heat_TLE[:, None], (40, RANKS, LAYERS, EXPERTS)))
    assert np.array_equal(trace.tokens(0, 40), RANKS * heat_TLE[:, 0].sum(axis=1))
    assert {PHASES[phase] for phase in trace.phase_numbers(0, 40)} == {"decode"}
    facts = trace.facts
    assert (facts.nodes_R, facts.bytes_per_expert) == ((0, 0, 1, 1), BYTES_PER_EXPERT)
    assert facts.split == "tables"


def loads_sent(live: DeployedLayout, heat_TLE: Int32) -> Int32:
    """Return the tokens that each rank receives if every rank sends ``heat_TLE``, int32 ``[T, L, R]``."""
    loads_TLR = np.zeros((len(heat_TLE), LAYERS, RANKS), dtype=np.int32)
    slots = live.placement.slots
    for (source, layer, expert), slot in np.ndenumerate(live.log2phy_RLE):
        assert source < RANKS
        loads_TLR[:, layer, slot // slots] += heat_TLE[:, layer, expert]
    return loads_TLR


async def test_a_recording_continues_a_trace_only_if_the_placement_fits(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.zarr"
    arguments = ("decode", "--out", str(out), "--steps", "8")
    async with FakeGroup(service.address) as group:
        await group.join()
        for options in ((), ("--append", "--json")):
            task = await recording(service, *arguments, *options)
            await group.send_heat(skewed_heat(8))
            assert await task == 0
    _, printed = capsys.readouterr().out.split("\n", 1)
    recorded = checked_document("trace record", printed)
    assert recorded == {"out": str(out), "steps": 8, "lost_steps": 0, "dropped_reports": 0}
    assert open_trace(out).steps == 16
    assert await (await recording(service, *arguments, watched=False)) == 2
    reported = capsys.readouterr().err
    assert "exists; choose another name, remove it first, or continue the trace with --append" in reported
    await until(lambda: not service.plane.deployments["decode"].connected)
    changed = live_of(first_placement().with_layers([(0, first_placement().phy2log_LRS[0][::-1])]))
    async with FakeGroup(service.address, changed) as group:
        await group.join(group_id="second")
        assert await (await recording(service, *arguments, "--append", watched=False)) == 2
    assert "has a different placement of layer 0 at epoch 0" in capsys.readouterr().err
    assert open_trace(out).steps == 16


async def test_a_recording_ends_after_its_time_limit_and_reports_an_empty_trace(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.zarr"
    arguments = ("decode", "--out", str(out), "--seconds", "0.5")
    assert await (await recording(service, *arguments, watched=False)) == 2
    assert "no deployment 'decode'" in capsys.readouterr().err
    async with FakeGroup(service.address) as group:
        await group.join()
        assert await (await recording(service, *arguments, watched=False)) == 2
        reported = capsys.readouterr().err
        assert "'decode' is idle: it has not served any requests yet" in reported
        assert "no step of 'decode' was recorded" in reported
        task = await recording(service, *arguments[:-1], "3", "--append")
        await group.send_heat(skewed_heat(8))
        assert await task == 0
    assert open_trace(out).steps == 8


HeatMessages = list[operator_pb2.WatchHeatResponse]


@pytest.fixture
def recorded_messages(monkeypatch: pytest.MonkeyPatch) -> HeatMessages:
    """Return the messages that a recording receives. Ctrl-C ends the recording at the last rank's second report."""
    take = trace_record._record_message
    messages = HeatMessages()

    def record_and_interrupt(trace: object, message: operator_pb2.WatchHeatResponse) -> object:
        recorder = take(trace, message)  # type: ignore[arg-type]
        messages.append(message)
        if message.heat.report.first_step == 8 and message.heat.rank == RANKS - 1:
            raise KeyboardInterrupt
        return recorder

    monkeypatch.setattr(trace_record, "_record_message", record_and_interrupt)
    return messages


async def test_a_recording_keeps_its_steps_if_the_service_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded_messages: HeatMessages
) -> None:
    out = tmp_path / "decode.zarr"
    async with run_service(settings()) as service, FakeGroup(service.address) as group:
        await group.join()
        task = await recording(service, "decode", "--out", str(out))
        await group.send_heat(skewed_heat(8))
        await until(lambda: sum(message.HasField("heat") for message in recorded_messages) == RANKS)
        await group.leave()
    assert await task == 2
    reported = capsys.readouterr().err
    assert "8 steps recorded before the connection was lost" in reported
    assert "the service is stopping" in reported
    assert open_trace(out).steps == 8


@pytest.mark.usefixtures("recorded_messages")
async def test_ctrl_c_ends_a_recording_with_a_complete_trace(
    service: RunningService, group: FakeGroup, tmp_path: Path
) -> None:
    out = tmp_path / "decode.zarr"
    task = await recording(service, "decode", "--out", str(out))
    for _ in range(2):
        await group.send_heat(skewed_heat(8))
    assert await task == 0
    assert open_trace(out).steps == 16


async def test_a_slow_watcher_loses_reports_and_learns_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    report = heat_report(live_of(first_placement()), 0, 0, skewed_heat(8))
    monkeypatch.setattr(heat_feed, "MAX_WAITING_BYTES", 2 * report.ByteSize())
    watcher = _Watcher("host")
    for _ in range(5):
        watcher.put_heat(0, report)
    watcher.put(operator_pb2.WatchHeatResponse(switched=operator_pb2.SwitchedLayer(layer=1)))
    messages = [await watcher.next() for _ in range(3)]
    assert [message.WhichOneof("message") for message in messages] == ["heat", "heat", "switched"]
    assert [message.dropped_reports for message in messages] == [3, 3, 3]
    watcher.put_heat(0, report)
    assert (await watcher.next()).heat.report == report
    watcher.end("over")
    with pytest.raises(CallError, match="over"):
        await watcher.next()


async def test_watchers_need_the_token_and_their_number_is_limited() -> None:
    async with run_service(settings(auth_token="secret")) as service:
        channel = grpc.aio.insecure_channel(service.address)
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.WatchHeatRequest(deployment="decode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchHeat(request).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        service.plane._known.add("decode")
        metadata = (("authorization", "Bearer secret"),)
        calls = [stub.WatchHeat(request, metadata=metadata) for _ in range(heat_feed.MAX_WATCHERS_PER_HOST)]
        feed = service.plane.feed
        await until(lambda: sum(map(len, feed._watchers.values())) == heat_feed.MAX_WATCHERS_PER_HOST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchHeat(request, metadata=metadata).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: not any(feed._watchers.values()))
        await channel.close()
