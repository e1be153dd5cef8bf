"""A deployment that is gone is forgotten by an order, or by itself after long; one that is there never is."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import pytest

from eplb_service.control.server.service import RunningService, running_service
from tests.cli.published import held
from tests.control.fake_group import FakeGroup, skewed_heat
from tests.control.server.test_operate import eplb
from tests.control.server.test_service import settings, tick, until


async def metrics(service: RunningService) -> str:
    url = f"http://{service.metrics_address}/metrics"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())


async def test_an_order_removes_history_metrics_and_pause(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    await group.send_heat(skewed_heat(8))
    await until(lambda: service.plane.deployments["decode"].totals.steps_received == 8)
    assert await eplb(group, "pause", "decode") == 0
    tick(service.plane)
    assert 'deployment="decode"' in await metrics(service)
    assert await eplb(group, "forget", "decode") == 2
    assert "ranks 0, 1, 2, 3 of 'decode' still connected" in capsys.readouterr().err
    await group.leave()
    await until(lambda: not service.plane.deployments["decode"].connected)
    assert await eplb(group, "forget", "decode", "--json") == 0
    captured = capsys.readouterr()
    assert held("forget", captured.out) == {"deployment": "decode", "forgotten": True}
    audits = [line for line in captured.err.splitlines() if '"call": "Forget"' in line]
    assert ['"result": "done"' in line for line in audits] == [True]
    tick(service.plane)
    assert 'deployment="decode"' not in await metrics(service)
    assert await eplb(group, "status", "decode") == 2
    await group.join()
    assert not service.plane.deployments["decode"].paused
    assert service.plane.deployments["decode"].totals.steps_received == 0


async def test_who_is_forgotten_in_the_midst_of_a_tick_is_looked_after_no_more(
    service: RunningService, group: FakeGroup
) -> None:
    await group.leave()
    plane = service.plane
    await until(lambda: not plane.deployments["decode"].connected)
    ticking = plane.ticking()
    next(ticking)
    plane.forget("decode")
    for _ in ticking:
        pass
    assert 'deployment="decode"' not in await metrics(service)


@pytest.mark.parametrize("paused", [False, True])
async def test_whoever_does_not_come_back_is_forgotten_unless_paused(paused: bool) -> None:
    async with (
        running_service(settings(forget_after_seconds=60)) as service,
        FakeGroup(service.address) as group,
    ):
        await group.join()
        plane = service.plane
        deployment = plane.deployments["decode"]
        plane.set_paused(deployment, paused)
        tick(plane)
        assert deployment.attendance.departed_since is None, "its ranks are here"
        await group.leave()
        await until(lambda: not deployment.connected)
        tick(plane)
        since = deployment.attendance.departed_since
        assert since is not None
        assert "decode" in plane.deployments, "they may come back"
        deployment.attendance = replace(deployment.attendance, departed_since=since - 61)
        tick(plane)
        assert ("decode" in plane.deployments) is paused
