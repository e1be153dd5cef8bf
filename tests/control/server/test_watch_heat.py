"""Who watches a deployment's heat gets what its ranks counted, whole and across switches, and is never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import pytest_asyncio

from eplb_service.cli.main import run
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.outgoing import heat_feed
from eplb_service.control.server.outgoing.heat_feed import Watcher
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.io.open_trace import open_trace
from eplb_service.io.trace import PHASES
from eplb_service.placement import Int32
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from tests.cli.published import held
from tests.control.fake_group import (
    EXPERTS,
    LAYERS,
    RANKS,
    FakeGroup,
    first_placement,
    heat_report,
    live_of,
    skewed_heat,
)
from tests.control.server.test_service import settings, until


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with running_service(settings()) as running:
        yield running


async def recording(service: RunningService, *arguments: str, watched: bool = True) -> asyncio.Task[int]:
    """``eplb trace record`` under way, once the service hands heat to it."""
    feed = service.plane.feed
    task = asyncio.create_task(
        asyncio.to_thread(run, ["trace", "record", *arguments, "--address", service.address])
    )
    if watched:
        await until(lambda: any(feed._watchers.values()))
    return task


@pytest.mark.parametrize("by_slot", [True, False], ids=["slots-counted", "slots-derived"])
async def test_a_recording_holds_what_the_ranks_counted_across_a_switch(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_slot: bool
) -> None:
    out = tmp_path / "decode.zarr"
    async with FakeGroup(service.address, by_slot=by_slot) as group:
        await group.join()
        task = await recording(service, "decode", "--out", str(out), "--steps", "40")
        for number in range(4):
            await group.send_heat(skewed_heat(8, seed=number))
        await group.carry_out(await group.hear_plan())
        await group.send_heat(skewed_heat(16, seed=4))
        assert await task == 0
    assert f"{out}: 40 steps recorded" in capsys.readouterr().out
    trace = open_trace(out)
    heat_TLE = np.concatenate(
        [*(skewed_heat(8, seed=number) for number in range(4)), skewed_heat(16, seed=4)]
    )[:40]
    assert np.array_equal(trace.heat(0, trace.steps), RANKS * heat_TLE)
    loads_TLR = trace.served_loads(0, 40)
    assert loads_TLR is not None
    assert np.array_equal(loads_TLR[:32], loads_sent(live_of(first_placement()), heat_TLE[:32]))
    assert np.array_equal(loads_TLR[32:], loads_sent(group.live, heat_TLE[32:]))
    assert not np.array_equal(group.live.placement.phy2log_LRS, first_placement().phy2log_LRS)
    sources_TRLE = trace.source_rows(0, 40)
    assert sources_TRLE is not None
    assert np.array_equal(sources_TRLE, np.broadcast_to(heat_TLE[:, None], (40, RANKS, LAYERS, EXPERTS)))
    assert np.array_equal(trace.tokens(0, 40), RANKS * heat_TLE[:, 0].sum(axis=1))
    assert {PHASES[phase] for phase in trace.phase_numbers(0, 40)} == {"decode"}
    assert trace.facts.nodes_R == (0, 0, 1, 1)


def loads_sent(live: LivePlacement, heat_TLE: Int32) -> Int32:
    """Tokens that each rank receives where every rank has those of ``heat_TLE``, int32 ``[T, L, R]``."""
    loads_TLR = np.zeros((len(heat_TLE), LAYERS, RANKS), dtype=np.int32)
    slots = live.placement.slots
    for (source, layer, expert), slot in np.ndenumerate(live.log2phy_RLE):
        assert source < RANKS
        loads_TLR[:, layer, slot // slots] += heat_TLE[:, layer, expert]
    return loads_TLR


async def test_a_trace_is_gone_on_with_only_where_it_fits(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.zarr"
    arguments = ("decode", "--out", str(out), "--steps", "8")
    async with FakeGroup(service.address) as group:
        await group.join()
        for again in ((), ("--append", "--json")):
            task = await recording(service, *arguments, *again)
            await group.send_heat(skewed_heat(8))
            assert await task == 0
    _, printed = capsys.readouterr().out.split("\n", 1)
    recorded = held("trace record", printed)
    assert recorded == {"out": str(out), "steps": 8, "lost_steps": 0, "dropped_reports": 0}
    assert open_trace(out).steps == 16
    assert await (await recording(service, *arguments, watched=False)) == 2
    assert "exists; choose another name, or remove it first; --append goes on" in capsys.readouterr().err
    await until(lambda: not service.plane.deployments["decode"].connected)
    other = live_of(first_placement().with_layer(0, first_placement().phy2log_LRS[0][::-1]))
    async with FakeGroup(service.address, other) as group:
        await group.join(group_id="second")
        assert await (await recording(service, *arguments, "--append", watched=False)) == 2
    assert "another placement under the same epochs" in capsys.readouterr().err
    assert open_trace(out).steps == 16


async def test_time_ends_a_recording_and_nothing_recorded_is_reported(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.zarr"
    arguments = ("decode", "--out", str(out), "--seconds", "0.5")
    assert await (await recording(service, *arguments, watched=False)) == 2
    assert "no deployment 'decode'" in capsys.readouterr().err
    async with FakeGroup(service.address) as group:
        await group.join()
        assert await (await recording(service, *arguments, watched=False)) == 2
        assert "no step of 'decode' was recorded" in capsys.readouterr().err
        task = await recording(service, *arguments, "--append")
        await group.send_heat(skewed_heat(8))
        assert await task == 0
    assert open_trace(out).steps == 8


async def test_a_service_that_stops_leaves_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eplb_service.cli.trace import record as trace_record

    out, take, taken = tmp_path / "decode.zarr", trace_record._take, list[str | None]()

    def counted(trace: object, message: operator_pb2.WatchHeatResponse) -> None:
        take(trace, message)  # type: ignore[arg-type]
        taken.append(message.WhichOneof("message"))

    monkeypatch.setattr(trace_record, "_take", counted)
    async with running_service(settings()) as service, FakeGroup(service.address) as group:
        await group.join()
        task = await recording(service, "decode", "--out", str(out))
        await group.send_heat(skewed_heat(8))
        await until(lambda: taken.count("heat") == RANKS)
        await group.leave()
    assert await task == 2
    reported = capsys.readouterr().err
    assert "8 steps recorded before the service went away" in reported
    assert "the service is stopping" in reported
    assert open_trace(out).steps == 8


async def test_ctrl_c_ends_with_a_whole_trace(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eplb_service.cli.trace import record as trace_record

    out, take = tmp_path / "decode.zarr", trace_record._take

    def until_enough(trace: object, message: operator_pb2.WatchHeatResponse) -> None:
        take(trace, message)  # type: ignore[arg-type]
        if message.heat.report.first_step == 8 and message.heat.rank == RANKS - 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(trace_record, "_take", until_enough)
    async with FakeGroup(service.address) as group:
        await group.join()
        task = await recording(service, "decode", "--out", str(out))
        for _ in range(2):
            await group.send_heat(skewed_heat(8))
        assert await task == 0
    assert open_trace(out).steps == 16


async def test_a_slow_watcher_loses_reports_and_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    report = heat_report(live_of(first_placement()), 0, 0, skewed_heat(8))
    monkeypatch.setattr(heat_feed, "MOST_WAITING_BYTES", 2 * report.ByteSize())
    watcher = Watcher("here")
    for _ in range(5):
        watcher.put_heat(0, report)
    watcher.put(operator_pb2.WatchHeatResponse(switched=operator_pb2.SwitchedLayer(layer=1)))
    heard = [await watcher.next() for _ in range(3)]
    assert [message.WhichOneof("message") for message in heard] == ["heat", "heat", "switched"]
    assert [message.dropped_reports for message in heard] == [3, 3, 3]
    watcher.put_heat(0, report)
    assert (await watcher.next()).heat.report == report
    watcher.end("over")
    with pytest.raises(StatusError, match="over"):
        await watcher.next()


async def test_only_so_many_watch_and_only_with_the_token() -> None:
    async with running_service(settings(auth_token="secret")) as service:
        channel = grpc.aio.insecure_channel(service.address)
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.WatchHeatRequest(deployment="decode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchHeat(request).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        service.plane._known.add("decode")
        metadata = (("authorization", "Bearer secret"),)
        calls = [stub.WatchHeat(request, metadata=metadata) for _ in range(heat_feed.MOST_WATCHERS_OF_A_HOST)]
        feed = service.plane.feed
        await until(lambda: sum(map(len, feed._watchers.values())) == heat_feed.MOST_WATCHERS_OF_A_HOST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchHeat(request, metadata=metadata).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: not any(feed._watchers.values()))
        await channel.close()
