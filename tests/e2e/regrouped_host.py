"""Ranks whose layers are balanced, then move to a smaller group of ranks and to a larger one."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from eplb_lab.layer import DenseMoE, ExpertParallelMoE, MoEShape, seeded_experts
from tests.agent import live
from worker_agent.agent import Agent

LAYERS = 2
TOKENS = 24
_MOST_SECONDS = 120.0


def serve(service: str, sizes: tuple[int, ...]) -> list[dict[str, object]]:
    """Serve in groups of these sizes, one after the other. Return the facts for each group that included this rank."""
    rank = dist.get_rank()
    facts = []
    groups = [dist.new_group(list(range(size))) for size in sizes]
    layers: list[ExpertParallelMoE] = []
    for size, group in zip(sizes, groups, strict=True):
        slots = -(-live.EXPERTS // size) + 1
        phy2log_RS = Placement.linear(1, live.EXPERTS, size, slots).phy2log_LRS[0]
        if rank < size:
            shapes = [
                MoEShape(index, live.EXPERTS, live.HIDDEN, live.INTERMEDIATE) for index in range(LAYERS)
            ]
            if layers:
                for layer in layers:
                    layer.regroup(group, phy2log_RS, seeded_experts(layer.shape))
            else:
                layers = [
                    ExpertParallelMoE(shape, phy2log_RS, seeded_experts(shape), ep_group=group)
                    for shape in shapes
                ]
            facts.append(balanced(layers, group, service))
        dist.barrier()
    return facts


def balanced(
    layers: list[ExpertParallelMoE], group: dist.ProcessGroup, service: str, **settings: object
) -> dict[str, object]:
    """Run steps until a layer has switched, and compare each step's outputs with the dense layer's."""
    agent = Agent.start(layers, group, live.settings(service=service, deployment="regrouped", **settings))
    dense = [DenseMoE(layer.shape, seeded_experts(layer.shape)) for layer in layers]
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    popular_E = -0.8 * torch.arange(live.EXPERTS).float()
    worst = 0.0
    end = time.monotonic() + _MOST_SECONDS
    switched = 0
    while not switched and time.monotonic() < end:
        hidden_TH = torch.randn(TOKENS, live.HIDDEN, generator=generator)
        logits_TE = torch.randn(TOKENS, live.EXPERTS, generator=generator) + popular_E
        weights_TK, ids_TK = logits_TE.topk(live.TOP_K)
        for layer, twin in zip(layers, dense, strict=True):
            step = hidden_TH, ids_TK.to(torch.int32), weights_TK.softmax(-1)
            worst = max(worst, float((layer(*step) - twin(*step)).abs().max()))
        agent.step()
        # All ranks must leave the loop at the same step.
        all_switched = torch.tensor(agent.stats.layers_switched)
        dist.all_reduce(all_switched, dist.ReduceOp.MIN, group=group)
        switched = int(all_switched)
    halted = agent.halted
    agent.close()
    return {"ranks": dist.get_world_size(group), "switched": switched, "worst": worst, "halted": halted}
