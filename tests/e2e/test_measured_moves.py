"""A service whose ranks are real agents prices moves by what those measure of their own switches."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist

from eplb_service.control.server.service import running_service
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.test_service import settings
from tests.e2e.test_host_of_lists import EXPERTS, HIDDEN, RANKS, TOKENS, ListLayer
from tests.ranks import run_ranks
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

pytestmark = pytest.mark.e2e

SWITCHES, AFTERWARDS, HOT_STEPS = 6, 64, 96


def _serve(service: str, most_steps: int) -> int:
    """Serve until the layer has switched often enough: other experts are hot every so many steps."""
    draws, same = torch.Generator().manual_seed(1 + dist.get_rank()), torch.Generator().manual_seed(0)
    experts_EHH = torch.randint(-127, 128, (EXPERTS, HIDDEN, HIDDEN), dtype=torch.int8, generator=same)
    layer = ListLayer(experts_EHH, torch.rand(EXPERTS, generator=same) / 64, dist.get_rank())
    agent = Agent.start(
        [layer],
        dist.group.WORLD,
        AgentSettings(service=service, deployment="lists"),
        on_commit=lambda _: layer.refresh(),
    )
    popularity_E = torch.linspace(1.0, 0.05, EXPERTS) ** 3
    left, step = most_steps, 0
    while left > 0:
        left = min(left - 1, AFTERWARDS) if agent.stats.layers_switched >= SWITCHES else left - 1
        hot_E = popularity_E.roll(3 * (step // HOT_STEPS))
        chosen_T = torch.multinomial(hot_E, TOKENS, replacement=True, generator=draws)
        layer.forward(torch.randn(TOKENS, HIDDEN, generator=draws), chosen_T)
        agent.step()
        step += 1
    agent.close()
    return agent.stats.layers_switched


@pytest.mark.slow
async def test_live_ranks_transfers_and_commits_come_to_price_moves() -> None:
    async with running_service(settings()) as service:
        switched = await asyncio.to_thread(run_ranks, RANKS, _serve, service.address, 8000)
        deployment = service.plane.deployments["lists"]
        costs, price = deployment.switch_log.costs(), deployment.decisions.move_price
    assert min(switched) >= SWITCHES
    assert deployment.switch_log.left_out == 0
    assert costs.expert_seconds is not None
    assert costs.commit_seconds is not None
    # A few hundred bytes over loopback, however busy the machine is.
    assert 1e-6 < costs.expert_seconds < 10
    assert 0 < costs.commit_seconds < 1
    assert not costs.bounded
    assert price is not None
    assert price.kind in ("partly measured", "measured")
    assert "GB/s per rank (measured, " in price.reason
