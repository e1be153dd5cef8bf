"""Step times with and without an agent, measured alternately, while the agent is idle and while it switches layers."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.switch.ratios import Ratio, by_turns, means_of
from eplb_core.placement import Int32, Placement
from eplb_lab.layer import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings
from worker_agent.swap.rank_layout import restoring_plan

STEP_SECONDS = 0.005
LAYERS = 4
EXPERTS = 16
SLOTS = 10
TOKENS = 16
TOP_K = 2


class Server:
    """Layers with an agent, and the same layers without one. They run forward passes alternately."""

    def __init__(self, hidden: int, intermediate: int, ranks: int) -> None:
        self.live, self.still = (_layers(hidden, intermediate, ranks) for _ in range(2))
        settings = AgentSettings(service="127.0.0.1:9", node="here")
        self.agent = Agent.start(self.live, dist.group.WORLD, settings)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.hidden = hidden
        self.vote_seconds: list[float] = []
        self.switch_seconds: list[float] = []
        vote = self.agent._switch.vote

        def timed_vote(step: int) -> None:
            before = self.agent.stats.layers_switched
            began = time.perf_counter()
            vote(step)
            seconds = time.perf_counter() - began
            self.vote_seconds.append(seconds)
            if self.agent.stats.layers_switched > before:
                self.switch_seconds.append(seconds)

        self.agent._switch.vote = timed_vote  # type: ignore[method-assign]

    def pairs(self, count: int, plans: bool) -> tuple[list[float], list[float]]:
        """Return the step times with and without the agent. If ``plans`` is true, a plan is always in progress."""
        on = []
        off = []
        for turn in range(-(-count // 24)):
            if plans:
                self._offer(turn)
            pairs = min(24, count - 24 * turn)
            with_agent, without = by_turns(
                lambda: self._step(self.live), lambda: self._step(self.still), pairs
            )
            on += with_agent
            off += without
        return on, off

    def _step(self, layers: list[ExpertParallelMoE]) -> None:
        """Run a forward pass, padded to the duration of a decode step, and the agent's step."""
        began = time.perf_counter()
        hidden_TH = torch.randn(TOKENS, self.hidden, generator=self.generator)
        for layer in layers:
            order_TE = torch.rand(TOKENS, EXPERTS, generator=self.generator).argsort(dim=1)
            layer(hidden_TH, order_TE[:, :TOP_K], torch.full((TOKENS, TOP_K), 1 / TOP_K))
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - began)))
        if layers is self.live:
            self.agent.step()

    def _offer(self, turn: int) -> None:
        """Enqueue a plan for the next layer, as the service would."""
        installed = self.agent.installed
        phy2log_LRS = installed.placement.phy2log_LRS.copy()
        phy2log_LRS[turn % LAYERS] = _swapped_RS(phy2log_LRS[turn % LAYERS], turn)
        target = Placement(phy2log_LRS, EXPERTS)
        plan = restoring_plan(installed, target, self.agent.identity.token_groups, leader_term=1)
        if plan is not None:
            self.agent._stream.plans.put((plan, installed.digest))


def _layers(hidden: int, intermediate: int, ranks: int) -> list[ExpertParallelMoE]:
    first_RS = Placement.linear(1, EXPERTS, ranks, SLOTS).phy2log_LRS[0]
    shapes = [MoEShape(layer, EXPERTS, hidden, intermediate) for layer in range(LAYERS)]
    return [
        ExpertParallelMoE(shape, first_RS, seeded_experts(shape), ep_group=dist.group.WORLD, heat_rows=64)
        for shape in shapes
    ]


def _swapped_RS(old_RS: Int32, turn: int) -> Int32:
    """Return a placement in which each rank replaces a single-replica expert with one that only the next rank holds.

    On two ranks, this exchanges two experts. The placement is returned unchanged if an expert would lose its last
    replica.
    """
    new_RS = old_RS.copy()
    ranks, slots = old_RS.shape
    for rank in range(ranks):
        neighbour = (rank + 1) % ranks
        missing = [expert for expert in old_RS[neighbour].tolist() if expert not in old_RS[rank]]
        spare = [slot for slot in range(slots) if (old_RS == old_RS[rank, slot]).sum() == 1]
        if missing and spare:
            new_RS[rank, spare[turn % len(spare)]] = missing[turn % len(missing)]
    return new_RS if set(new_RS.ravel().tolist()) == set(range(EXPERTS)) else old_RS


def serving(hidden: int, intermediate: int, ranks: int, pairs: int) -> tuple[list[Ratio], dict[str, object]]:
    """Measure step times with and without the agent, while it is idle and while it switches layers."""
    server = Server(hidden, intermediate, ranks)
    server.pairs(20, plans=False)
    server.vote_seconds.clear()
    on, off = server.pairs(pairs, plans=False)
    # Number of steps between two votes while no rank has a plan.
    interval = 4 * AgentSettings().vote_interval
    voting = means_of(server.vote_seconds, interval)
    switching_on, switching_off = server.pairs(pairs, plans=True)
    ratios = [
        Ratio.of(
            "idle vote, amortised over its interval / 5 ms step", voting, [STEP_SECONDS] * len(voting), 0.01
        ),
        Ratio.of("step p50, agent idle / no agent", on, off, 1.03),
        Ratio.of("step p50, agent switching / no agent", switching_on, switching_off, 1.05),
    ]
    stats = server.agent.stats
    figures: dict[str, object] = {
        "vote_us_per_step_median": 1e6 * float(np.median(voting)),
        "commit_adds_ms_to_its_step_p50": 1e3 * float(np.median(server.switch_seconds)),
        "commit_adds_ms_to_its_step_p90": 1e3 * float(np.percentile(server.switch_seconds, 90)),
        "install_ms_mean": 1e3 * stats.install_seconds / stats.layers_switched,
        "layers_switched": stats.layers_switched,
    }
    server.agent.drain()
    server.agent.close()
    return ratios, figures
