"""A toy inference host with an adapter: one MoE layer of H x H experts on every rank of a gloo group.

Each rank counts the experts that its tokens chose and the tokens that its slots received, maps its tokens with its own
``log2phy``, and calls the agent once per forward pass. Start a service with ``eplb serve``, then run
``python examples/toy_host.py 127.0.0.1:50551 --ranks 2``. ``service_with_three_ranks.py`` does both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings

EXPERTS = 8
SLOTS = 5
HIDDEN = 16
TOKENS = 32
HEAT_ROWS = 64


class ToyLayer:
    """One MoE layer with the attributes that an agent needs (``LiveLayer``) and a top-1 forward pass."""

    source_load: torch.Tensor | None
    shares_tokens = False  # each rank routes its own tokens, with its own table

    def __init__(self, experts_EHH: torch.Tensor, placement: Placement, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.weights_SHH = experts_EHH[torch.tensor(placement.phy2log_LRS[0, rank])].clone()
        self.expert_map = torch.tensor(placement.expert_map(rank)[0])
        self.log2phy = torch.tensor(placement.default_log2phy()[rank, 0])
        self.moe_load = torch.zeros(HEAT_ROWS, SLOTS, dtype=torch.int32)
        self.source_load = torch.zeros(HEAT_ROWS, EXPERTS, dtype=torch.int32)
        self.load_counter = torch.zeros((), dtype=torch.int64)

    def expert_weights(self) -> list[torch.Tensor]:
        """Return every tensor that moves with an expert; the first axis is the slot."""
        return [self.weights_SHH]

    def forward(self, hidden_TH: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[T, H]`` of this rank's own tokens. All ranks call this together."""
        row = int(self.load_counter) % HEAT_ROWS
        self.source_load[row] = torch.bincount(chosen_T, minlength=EXPERTS)
        # The source rank looks up the replica that serves a token, before dispatch.
        physical_T = self.log2phy[chosen_T].long()
        everyones_hidden = hidden_TH.new_empty(self.ranks * TOKENS, HIDDEN)
        everyones_physical = physical_T.new_empty(self.ranks * TOKENS)
        dist.all_gather_into_tensor(everyones_hidden, hidden_TH)
        dist.all_gather_into_tensor(everyones_physical, physical_T)
        local = everyones_physical // SLOTS == self.rank
        slots = everyones_physical[local] % SLOTS
        self.moe_load[row] = torch.bincount(slots, minlength=SLOTS)
        self.load_counter += 1
        output = torch.zeros_like(everyones_hidden)
        output[local] = torch.einsum("th,thg->tg", everyones_hidden[local], self.weights_SHH[slots])
        dist.all_reduce(output)
        return output[self.rank * TOKENS : (self.rank + 1) * TOKENS]


def serve(service: str, steps: int, after_switch: int) -> tuple[float, int]:
    """Serve ``steps`` steps, but stop ``after_switch`` steps after the layer's first switch.

    Parameters
    ----------
    service
        Address of the service, ``host:port``.
    steps, after_switch
        Limits on the number of steps.

    Returns
    -------
    tuple of float and int
        Largest difference between the outputs and those computed with the experts directly, and the number of switches.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    experts_EHH = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
    layer = ToyLayer(experts_EHH, Placement.linear(1, EXPERTS, ranks, SLOTS), rank, ranks)
    agent = Agent.start([layer], dist.group.WORLD, AgentSettings(service=service, deployment="toy"))
    draws = torch.Generator().manual_seed(1 + rank)
    popularity_E = torch.linspace(1.0, 0.05, EXPERTS) ** 3
    largest_error = 0.0
    while steps > 0:
        hidden_TH = torch.randn(TOKENS, HIDDEN, generator=draws)
        chosen_T = torch.multinomial(popularity_E, TOKENS, replacement=True, generator=draws)
        output_TH = layer.forward(hidden_TH, chosen_T)
        agent.step()
        expected_TH = torch.einsum("th,thg->tg", hidden_TH, experts_EHH[chosen_T])
        largest_error = max(largest_error, float((output_TH - expected_TH).abs().max()))
        # Every rank switches a layer at the same step, so all of them stop at the same step.
        steps = min(steps - 1, after_switch) if agent.stats.layers_switched else steps - 1
    switched = agent.stats.layers_switched
    agent.close()
    return largest_error, switched


def serve_ranks(service: str, ranks: int, steps: int, after_switch: int) -> list[tuple[float, int]]:
    """Run ``serve`` in one process per rank and return the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            (rank, ranks, f"{folder}/rendezvous", service, steps, after_switch) for rank in range(ranks)
        ]
        with multiprocessing.get_context("spawn").Pool(ranks) as pool:
            return pool.starmap(_run_rank, arguments)


def _run_rank(
    rank: int, ranks: int, rendezvous: str, service: str, steps: int, after_switch: int
) -> tuple[float, int]:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    result = serve(service, steps, after_switch)
    dist.destroy_process_group()
    return result


def main() -> None:
    """Serve on the number of ranks given on the command line until the service has switched the layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("service", help="address of the service, host:port")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    results = serve_ranks(options.service, options.ranks, steps=20_000, after_switch=200)
    print(f"{results[0][1]} switches, largest output error {max(error for error, _ in results):.1g}")


if __name__ == "__main__":
    main()

# Output of the last line, with two ranks:
#   1 switches, largest output error 2e-06
