"""A host with a tensor per expert, a scale beside it, and no counts per slot is balanced like any other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.service import running_service
from eplb_service.placement import Placement
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.test_service import settings
from tests.ranks import run_ranks
from worker_agent.agent import Agent
from worker_agent.live_layer import ExpertWeights
from worker_agent.settings import AgentSettings

pytestmark = pytest.mark.e2e

EXPERTS, SLOTS, HIDDEN, TOKENS, ROWS, RANKS = 8, 5, 16, 32, 64, 2
AFTER_SWITCH, NEVER = 200, 10**9


class ListLayer:
    """One layer of int8 experts with a scale each, as lists of tensors; no rank knows what its slots received."""

    moe_load = None
    shares_tokens = False

    def __init__(self, experts_EHH: torch.Tensor, scales_E: torch.Tensor, rank: int) -> None:
        placement = Placement.linear(1, EXPERTS, RANKS, SLOTS)
        here = placement.phy2log_LRS[0, rank].tolist()
        self._rank = rank
        self.weights = [experts_EHH[expert].clone() for expert in here]
        self.scales = [scales_E[expert].clone().reshape(1) for expert in here]
        self.expert_map = torch.tensor(placement.expert_map(rank)[0])
        self.log2phy = torch.tensor(placement.default_log2phy()[rank, 0])
        self.source_load = torch.zeros(ROWS, EXPERTS, dtype=torch.int32)
        self.load_counter = torch.zeros((), dtype=torch.int64)
        self.dequantised_SHH = torch.empty(0)
        self.refresh()

    def expert_weights(self) -> list[ExpertWeights]:
        return [self.weights, self.scales]

    def refresh(self) -> None:
        """What the kernel reads is derived from the weights: an agent cannot know of it."""
        self.dequantised_SHH = torch.stack(
            [weight.float() * scale for weight, scale in zip(self.weights, self.scales, strict=True)]
        )

    def forward(self, hidden_TH: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
        row = int(self.load_counter) % ROWS
        self.source_load[row] = torch.bincount(chosen_T, minlength=EXPERTS)
        self.load_counter += 1
        physical_T = self.log2phy[chosen_T].long()
        hidden, physical = hidden_TH.new_empty(RANKS * TOKENS, HIDDEN), physical_T.new_empty(RANKS * TOKENS)
        dist.all_gather_into_tensor(hidden, hidden_TH)
        dist.all_gather_into_tensor(physical, physical_T)
        mine = physical // SLOTS == self._rank
        output = torch.zeros_like(hidden)
        output[mine] = torch.einsum("th,thg->tg", hidden[mine], self.dequantised_SHH[physical[mine] % SLOTS])
        dist.all_reduce(output)
        return output[self._rank * TOKENS : (self._rank + 1) * TOKENS]


def _serve(service: str, most_steps: int, follow: bool, switches: int, hot_steps: int) -> dict[str, Any]:
    """Serve until the layer has switched so often, and on for a while; other experts are hot every ``hot_steps``."""
    rank, draws = dist.get_rank(), torch.Generator().manual_seed(1 + dist.get_rank())
    same = torch.Generator().manual_seed(0)
    experts_EHH = torch.randint(-127, 128, (EXPERTS, HIDDEN, HIDDEN), dtype=torch.int8, generator=same)
    scales_E = torch.rand(EXPERTS, generator=same) / 64
    layer = ListLayer(experts_EHH, scales_E, rank)
    tensors = [*layer.weights, *layer.scales, layer.expert_map, layer.log2phy]
    addresses = [tensor.data_ptr() for tensor in tensors]
    refreshed: list[int] = []

    def on_commit(index: int) -> None:
        refreshed.append(index)
        if follow:
            layer.refresh()

    settings = AgentSettings(service=service, deployment="lists", verify_transfers=True)
    agent = Agent.start([layer], dist.group.WORLD, settings, on_commit=on_commit)
    popularity_E = torch.linspace(1.0, 0.05, EXPERTS) ** 3
    dense_EHH = experts_EHH.float() * scales_E[:, None, None]
    worst, step, left = 0.0, 0, most_steps
    while left > 0:
        # Every rank switches the layer at the same step.
        left = min(left - 1, AFTER_SWITCH) if agent.stats.layers_switched >= switches else left - 1
        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=draws)
        hot_E = popularity_E.roll(3 * (step // hot_steps))
        chosen_T = torch.multinomial(hot_E, TOKENS, replacement=True, generator=draws)
        output_TH = layer.forward(hidden_TH, chosen_T)
        agent.step()
        expected_TH = torch.einsum("th,thg->tg", hidden_TH, dense_EHH[chosen_T])
        worst = max(worst, float((output_TH - expected_TH).abs().max()))
        step += 1
    agent.close()
    return {
        "worst": worst,
        "switched": agent.stats.layers_switched,
        "refreshed": refreshed,
        "same_addresses": addresses == [tensor.data_ptr() for tensor in tensors],
    }


async def _balanced(
    follow: bool, switches: int = 1, hot_steps: int = NEVER
) -> tuple[list[dict[str, Any]], Deployment]:
    """Facts of the ranks, and the service's deployment in the end."""
    async with running_service(settings()) as service:
        arguments = (RANKS, _serve, service.address, 8000, follow, switches, hot_steps)
        facts = await asyncio.to_thread(run_ranks, *arguments)
        return facts, service.plane.deployments["lists"]


async def test_lists_of_weights_move_and_outputs_stay() -> None:
    facts, _ = await _balanced(follow=True)
    assert max(fact["worst"] for fact in facts) < 1e-3
    for fact in facts:
        assert fact["switched"] >= 1
        assert fact["refreshed"] == [0] * fact["switched"]
        assert fact["same_addresses"]


@pytest.mark.slow
async def test_what_is_derived_from_weights_must_follow_the_commit() -> None:
    facts, _ = await _balanced(follow=False)
    assert {fact["switched"] for fact in facts} != {0}
    assert max(fact["worst"] for fact in facts) > 1e-3


@pytest.mark.slow
async def test_live_ranks_transfers_and_commits_come_to_price_moves() -> None:
    facts, deployment = await _balanced(follow=True, switches=6, hot_steps=96)
    costs, price = deployment.switch_log.costs(), deployment.decisions.move_price
    assert min(fact["switched"] for fact in facts) >= 6
    assert costs.expert_seconds is not None
    assert costs.commit_seconds is not None
    # A few hundred bytes over loopback, however busy the machine is.
    assert 1e-6 < costs.expert_seconds < 10
    assert 0 < costs.commit_seconds < 1
    assert price is not None
    assert price.kind in ("partly measured", "measured")
    assert "GB/s per rank (measured, " in price.reason
