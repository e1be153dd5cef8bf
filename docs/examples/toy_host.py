"""A toy inference host with an adapter: one MoE layer of H x H experts on every rank of a gloo group.

Each rank counts what its tokens chose and what its slots received, maps its tokens by its own ``log2phy``, and calls
the agent once per forward pass. ``tests/docs/test_adapter.py`` runs it beside a real service.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

EXPERTS, SLOTS, HIDDEN, TOKENS, HEAT_ROWS = 8, 5, 16, 32, 64


class ToyLayer:
    """What an agent needs of a layer (``LiveLayer``), and its forward pass, top-1."""

    source_load: torch.Tensor | None
    shares_tokens = False  # each rank routes its own tokens, by its own table

    def __init__(self, experts_EHH: torch.Tensor, placement: Placement, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.weights_SHH = experts_EHH[torch.tensor(placement.phy2log_LRS[0, rank])].clone()
        self.expert_map = torch.tensor(placement.expert_map(rank)[0])
        self.log2phy = torch.tensor(placement.default_log2phy()[rank, 0])
        self.moe_load = torch.zeros(HEAT_ROWS, SLOTS, dtype=torch.int32)
        self.source_load = torch.zeros(HEAT_ROWS, EXPERTS, dtype=torch.int32)
        self.load_counter = torch.zeros((), dtype=torch.int64)

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that moves with an expert, slot first."""
        return [self.weights_SHH]

    def forward(self, hidden_TH: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
        """Outputs ``[T, H]`` of this rank's own tokens; a collective."""
        row = int(self.load_counter) % HEAT_ROWS
        self.source_load[row] = torch.bincount(chosen_T, minlength=EXPERTS)
        # Which replica serves a token is looked up at its source, before dispatch.
        physical_T = self.log2phy[chosen_T].long()
        everyones_hidden = hidden_TH.new_empty(self.ranks * TOKENS, HIDDEN)
        everyones_physical = physical_T.new_empty(self.ranks * TOKENS)
        dist.all_gather_into_tensor(everyones_hidden, hidden_TH)
        dist.all_gather_into_tensor(everyones_physical, physical_T)
        mine = everyones_physical // SLOTS == self.rank
        slots = everyones_physical[mine] % SLOTS
        self.moe_load[row] = torch.bincount(slots, minlength=SLOTS)
        self.load_counter += 1
        output = torch.zeros_like(everyones_hidden)
        output[mine] = torch.einsum("th,thg->tg", everyones_hidden[mine], self.weights_SHH[slots])
        dist.all_reduce(output)
        return output[self.rank * TOKENS : (self.rank + 1) * TOKENS]


def serve(service: str, steps: int, after_switch: int) -> tuple[float, int]:
    """Serve ``steps`` steps, or ``after_switch`` more once the layer was switched.

    The largest difference to the experts themselves, and how often the layer was switched.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts_EHH = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    layer = ToyLayer(experts_EHH, Placement.linear(1, EXPERTS, ranks, SLOTS), rank, ranks)
    agent = Agent.start([layer], dist.group.WORLD, AgentSettings(service=service, deployment="toy"))
    draws = torch.Generator().manual_seed(1 + rank)
    popularity_E = torch.linspace(1.0, 0.05, EXPERTS) ** 3
    worst = 0.0
    while steps > 0:
        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=draws)
        chosen_T = torch.multinomial(popularity_E, TOKENS, replacement=True, generator=draws)
        output_TH = layer.forward(hidden_TH, chosen_T)
        agent.step()
        expected_TH = torch.einsum("th,thg->tg", hidden_TH, experts_EHH[chosen_T])
        worst = max(worst, float((output_TH - expected_TH).abs().max()))
        # Every rank switches a layer at the same step, so all of them leave at the same one.
        steps = min(steps - 1, after_switch) if agent.stats.layers_switched else steps - 1
    switched = agent.stats.layers_switched
    agent.close()
    return worst, switched
