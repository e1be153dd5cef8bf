"""Layers that a GPU replays from a captured graph are switched under it, and answer as before; on a CPU, uncaptured."""

from __future__ import annotations

import asyncio

import pytest
import torch

from eplb_service.control.server.service import running_service
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.test_service import settings
from tests.e2e import captured_host
from tests.ranks import run_ranks

_GPU = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here")
DEVICES = [
    pytest.param("cpu", False, 6),
    pytest.param("cuda:0", False, 40, marks=_GPU),
    pytest.param("cuda:0", True, 40, marks=_GPU),
]


async def _served(
    device: str, quantised: bool, switches: int, leaves_weights: bool
) -> list[tuple[float, int, str | None]]:
    options = (device, quantised, switches, 6000, leaves_weights)
    async with running_service(settings()) as service:
        return await asyncio.to_thread(run_ranks, 2, captured_host.serve, service.address, *options)


@pytest.mark.parametrize(("device", "quantised", "switches"), DEVICES)
async def test_a_captured_pass_answers_as_before_while_its_layers_switch(device, quantised, switches):
    results = await _served(device, quantised, switches, leaves_weights=False)
    assert [halted for _, _, halted in results] == [None, None]
    assert min(switched for _, switched, _ in results) >= switches
    assert max(worst for worst, _, _ in results) < 1e-4


@pytest.mark.parametrize(("device", "quantised", "switches"), DEVICES)
async def test_weights_that_stay_behind_are_seen(device, quantised, switches):
    results = await _served(device, quantised, switches, leaves_weights=True)
    assert min(worst for worst, _, _ in results) > 1e-2


@_GPU
def test_a_step_never_waits_for_the_device():
    assert run_ranks(2, captured_host.step_without_waiting, 200) == [None, None]
