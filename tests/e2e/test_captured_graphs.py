"""Tests that switching layers in a captured GPU graph does not change the outputs.

On a CPU, the pass is not captured.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from eplb_service.control.server.service import run_service
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings
from tests.e2e import captured_host
from tests.ranks import run_ranks

_GPU = [
    pytest.mark.device,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here"),
]
HOSTS = [
    pytest.param("cpu", "float32", 8, 0),
    pytest.param("cpu", "lists", 8, 4),
    pytest.param("cuda:0", "float32", 40, 4, marks=_GPU),
    pytest.param("cuda:0", "float8", 40, 0, marks=_GPU),
]


async def _served(*options):
    """Return the ranks' facts and the service's final deployment."""
    async with run_service(settings()) as service:
        facts = await asyncio.to_thread(run_ranks, 2, captured_host.serve, service.address, *options)
        return facts, service.plane.deployments["captured"]


@pytest.mark.parametrize(("device", "experts", "switches", "ahead"), HOSTS)
async def test_outputs_do_not_change_while_layers_switch(device, experts, switches, ahead):
    facts, deployment = await _served(device, experts, switches, ahead)
    for fact in facts:
        assert fact["halted"] is None
        assert len(fact["committed"]) == fact["switched"] >= switches
        assert fact["worst"] < 1e-4
        assert fact["same_addresses"]
    # Measured transfers and commits set the move price. Here, they send a few hundred bytes over loopback on a busy
    # machine.
    costs = deployment.switch_log.costs()
    price = deployment.session.move_price
    assert 1e-6 < costs.expert_seconds < 10
    assert 0 < costs.commit_seconds < 1
    assert price.kind in ("partly measured", "measured")
    assert "ms per expert (measured)" in price.reason


@pytest.mark.parametrize(("device", "experts", "switches", "ahead"), HOSTS)
async def test_weights_or_derived_tensors_that_do_not_move_are_detected(device, experts, switches, ahead):
    facts, _ = await _served(device, experts, switches, ahead, True)
    assert min(fact["worst"] for fact in facts) > 1e-2


@_GPU[0]
@_GPU[1]
def test_a_step_never_waits_for_the_device():
    assert run_ranks(2, captured_host.step_without_waiting, 200) == [None, None]
