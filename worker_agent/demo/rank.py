"""One rank process of the demo: ``python -m worker_agent.demo.rank TASK.json RANK``.

Every step runs the same routed tokens through two sets of layers with the same weights: *live* ones, which an agent
balances, and *still* ones, which nobody touches. Progress goes to stdout as JSON lines, one every few steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from worker_agent.agent import Agent
from worker_agent.demo.joining import await_service, joined
from worker_agent.demo.progress import Progress
from worker_agent.demo.routing import choices_per_token, deal, longest_part, own_part
from worker_agent.demo.task import DemoTask
from worker_agent.moe import ExpertParallelMoE, LayerOptions, MoEShape, seeded_experts
from worker_agent.settings import AgentSettings


class DemoRank:
    """Both sets of layers, and the agent of one."""

    def __init__(self, task: DemoTask, rank: int, group: dist.ProcessGroup) -> None:
        self.task = task
        self.rank = rank
        self.group = group
        self.counts_TLE = np.load(task.counts)
        self.top_k = choices_per_token(self.counts_TLE)
        _, layers, experts = self.counts_TLE.shape
        placement = Placement.linear(layers, experts, task.ranks, task.slots)
        self.live = [self._layer(layer, placement, task.split) for layer in range(layers)]
        self.still = [self._layer(layer, placement, "tables") for layer in range(layers)]
        shares_tokens = self.live[0].shares_tokens
        settings = AgentSettings(service=task.service, deployment=task.deployment)
        self.agent = Agent.start(self.live, self.group, settings, token_group=0 if shares_tokens else None)
        self.progress = Progress(rank, self.agent, self.live, self.still)

    def serve(self) -> None:
        """All steps of the trace, reporting on the way."""
        await_service(self.agent)
        for step in range(self.counts_TLE.shape[0]):
            self._one_step(step)
            if (step + 1) % self.task.report_every == 0:
                self.progress.report()
        self.progress.report()
        self.agent.close()

    def _layer(self, layer: int, placement: Placement, split: str) -> ExpertParallelMoE:
        shape = MoEShape(layer, placement.experts, self.task.hidden, self.task.intermediate)
        return ExpertParallelMoE(
            shape,
            placement.phy2log_LRS[layer],
            seeded_experts(shape, self.task.seed),
            dispatcher=self.task.dispatcher,
            ep_group=self.group,
            options=LayerOptions(split=split),
            dealing_width=self.task.dealing_width,
        )

    def _one_step(self, step: int) -> None:
        routed = [self._routed(step, layer) for layer in range(len(self.live))]
        lengths = [longest_part(counts_E, self.top_k, self.task.ranks) for counts_E in self.counts_TLE[step]]
        # By turns, so that neither set always finds warm caches.
        first, second = (self.live, self.still) if step % 2 else (self.still, self.live)
        outputs, seconds = {}, {}
        for layers in (first, second):
            began = time.perf_counter()
            outputs[id(layers)] = [
                layer(*tokens, length=length)
                for layer, tokens, length in zip(layers, routed, lengths, strict=True)
            ]
            if layers is self.live:
                self.agent.step(tokens=len(routed[0][1]))
            seconds[id(layers)] = time.perf_counter() - began
        for live, still in zip(outputs[id(self.live)], outputs[id(self.still)], strict=True):
            self.progress.compare(live, still)
        self.progress.add_step(seconds[id(self.live)], seconds[id(self.still)])

    def _routed(self, step: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's tokens of one layer: hidden ``[T, H]``, expert ids and weights ``[T, K]``."""
        rng = np.random.default_rng([self.task.seed, step, layer])
        ids_TK = own_part(deal(self.counts_TLE[step, layer], self.top_k, rng), self.rank, self.task.ranks)
        own = np.random.default_rng([self.task.seed, step, layer, self.rank])
        hidden_TH = own.standard_normal((ids_TK.shape[0], self.task.hidden), dtype=np.float32)
        weights_TK = own.random(ids_TK.shape, dtype=np.float32) + 0.1
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        return torch.from_numpy(hidden_TH), torch.from_numpy(ids_TK), torch.from_numpy(weights_TK)


def main() -> None:
    """Join the other ranks and serve."""
    task, rank = DemoTask.read(Path(sys.argv[1])), int(sys.argv[2])
    with joined(task, rank) as group:
        DemoRank(task, rank, group).serve()


if __name__ == "__main__":
    main()
