"""``eplb prove`` records and scores a live deployment, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from eplb_service.cli.main import run
from eplb_service.control.server.service import RunningService
from eplb_service.io.open_trace import open_trace
from tests.cli.published import checked_document
from tests.control.fake_group import LAYERS, RANKS, FakeGroup, skewed_heat
from tests.control.server.service_under_test import until


async def serve(group: FakeGroup) -> None:
    """Send heat as a model would, until cancelled."""
    number = 0
    while True:
        await group.send_heat(skewed_heat(8, seed=number))
        number += 1
        await asyncio.sleep(0.02)


async def test_a_live_deployment_is_recorded_and_scored(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.zarr"
    arguments = ["--window", "16", "--interval", "16", "--steps", "96", "--recording", str(kept), "--json"]
    async with FakeGroup(service.address) as group:
        await group.join()
        before = group.live
        serving = asyncio.create_task(serve(group))
        await until(lambda: service.plane.deployments["decode"].session.worth is not None)
        command = ["prove", "decode", "--address", service.address, *arguments, "--workers", "1"]
        assert await asyncio.to_thread(run, command) == 0
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    deployment = service.plane.deployments["decode"]
    assert not deployment.paused
    assert group.live is before
    document = checked_document("prove", capsys.readouterr().out)
    arms = [arm["arm"] for arm in document["arms"]]
    assert arms == ["off", "deepseek", "ours", "as served", "forced balance"]
    assert (document["layers"], document["ranks"]) == (LAYERS, RANKS)
    assert document["measured"].startswith("The service reports for its newest steps: ")
    assert open_trace(kept).steps == 96


async def test_invalid_arguments_are_reported_before_anything_is_recorded(
    service: RunningService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = ["prove", "decode", "--address", service.address]
    for arguments, problem in (
        ([], "no deployment 'decode'"),
        (["--steps", "300"], "44 steps follow the first window, but a proof needs at least 64"),
        (["--heat", "trace.npz"], "give either --heat"),
        (["--recording", str(tmp_path / "heat.npz")], "must end in .zarr"),
        (["--balancer", "greedy"], "--balancer contains 'greedy'"),
    ):
        assert await asyncio.to_thread(run, [*beside, *arguments]) == 2
        assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
