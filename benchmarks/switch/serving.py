"""Serves with and without an agent by turns, idle and while layers are switched: what the agent takes of a step."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.switch.ratios import Ratio
from eplb_service.placement import Int32, Placement, default_log2phy
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.agent import Agent
from worker_agent.checked_plan import CheckedPlan
from worker_agent.moe import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent.settings import AgentSettings

STEP_SECONDS = 0.005
LAYERS, EXPERTS, SLOTS, TOKENS, TOP_K = 4, 16, 10, 16, 2


def swapped_RS(old_RS: Int32, turn: int) -> Int32:
    """Each rank gets two of the next rank's experts that it lacks, in place of two that have another home there."""
    new_RS = old_RS.copy()
    ranks, slots = old_RS.shape
    for rank in range(ranks):
        other = (rank + 1) % ranks
        lacking = [expert for expert in old_RS[other].tolist() if expert not in old_RS[rank]]
        spare = [slot for slot in range(slots) if (old_RS == old_RS[rank, slot]).sum() == 1]
        if not lacking or not spare:
            continue
        new_RS[rank, spare[turn % len(spare)]] = lacking[turn % len(lacking)]
    lost = set(range(EXPERTS)) - set(new_RS.ravel().tolist())
    return old_RS if lost else new_RS


def plan_for(agent: Agent, layer: int, new_RS: Int32, plan_id: int) -> CheckedPlan:
    """What a service would send this rank."""
    installed, rank = agent.installed, agent.identity.rank
    old_RS = installed.placement.phy2log_LRS[layer]
    moves = []
    for (to_rank, slot), expert in np.ndenumerate(new_RS):
        if old_RS[to_rank, slot] != expert:
            source = np.argwhere(old_RS == expert)[0].tolist()
            moves.append((*source, to_rank, slot, int(expert)))
    tables_RE = default_log2phy(new_RS, EXPERTS)
    digests = tuple(table_digest(row) for row in tables_RE)
    moves_M5 = np.array(moves, dtype=np.int32).reshape(-1, 5)
    update = RankLayer(layer, new_RS, tables_RE[rank], digests, moves_M5)
    plan = RankPlan.of(plan_id, 1, installed.epoch, installed.digest, (update,))
    return CheckedPlan(plan, installed.digest)


def layers_of(hidden: int, intermediate: int, ranks: int) -> list[ExpertParallelMoE]:
    """Live layers of this rank."""
    first_RS = Placement.linear(1, EXPERTS, ranks, SLOTS).phy2log_LRS[0]
    shapes = [MoEShape(layer, EXPERTS, hidden, intermediate) for layer in range(LAYERS)]
    return [
        ExpertParallelMoE(shape, first_RS, seeded_experts(shape), ep_group=dist.group.WORLD, heat_rows=64)
        for shape in shapes
    ]


class Server:
    """Live layers with an agent beside the same ones left alone; one forward pass of each by turns."""

    def __init__(self, hidden: int, intermediate: int, ranks: int) -> None:
        self.live = layers_of(hidden, intermediate, ranks)
        self.still = layers_of(hidden, intermediate, ranks)
        settings = AgentSettings(service="127.0.0.1:9", node="here")
        self.agent = Agent.start(self.live, dist.group.WORLD, settings)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.hidden = hidden
        self.agent_seconds: list[float] = []
        self.vote_seconds: list[float] = []
        self.switch_seconds: list[float] = []
        """Of the calls in which a layer was committed: both confirmations, the install, the next ballot."""
        vote = self.agent._switch.vote

        def timed_vote(step: int) -> None:
            before, began = self.agent.stats.layers_switched, time.perf_counter()
            vote(step)
            seconds = time.perf_counter() - began
            self.vote_seconds.append(seconds)
            if self.agent.stats.layers_switched > before:
                self.switch_seconds.append(seconds)

        self.agent._switch.vote = timed_vote  # type: ignore[method-assign]

    def step(self, layers: list[ExpertParallelMoE]) -> float:
        """Seconds of a forward pass, padded to a decode step's length, and of the agent's part in it."""
        began = time.perf_counter()
        hidden_TH = torch.randn(TOKENS, self.hidden, generator=self.generator)
        for layer in layers:
            order_TE = torch.rand(TOKENS, EXPERTS, generator=self.generator).argsort(dim=1)
            layer(hidden_TH, order_TE[:, :TOP_K], torch.full((TOKENS, TOP_K), 1 / TOP_K))
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - began)))
        if layers is self.live:
            inside = time.perf_counter()
            self.agent.step()
            self.agent_seconds.append(time.perf_counter() - inside)
        return time.perf_counter() - began

    def pairs(self, count: int, plans: bool) -> tuple[list[float], list[float]]:
        """Step times with and without the agent; with ``plans``, one is under way all the time."""
        seconds: tuple[list[float], list[float]] = ([], [])
        plan_id = 0
        for pair in range(count):
            if plans and pair % 24 == 0:
                plan_id += 1
                layer = plan_id % LAYERS
                old_RS = self.agent.installed.placement.phy2log_LRS[layer]
                self.agent._stream.plans.put(
                    plan_for(self.agent, layer, swapped_RS(old_RS, plan_id), plan_id)
                )
            order = ((0, self.live), (1, self.still)) if pair % 2 else ((1, self.still), (0, self.live))
            for place, layers in order:
                seconds[place].append(self.step(layers))
        return seconds


def _per_vote(seconds: list[float]) -> list[float]:
    """Mean over the steps from one vote to the next, where no rank holds a plan."""
    interval = AgentSettings().idle_vote_interval
    return [
        float(np.mean(seconds[at : at + interval])) for at in range(0, len(seconds) - interval + 1, interval)
    ]


def serving(hidden: int, intermediate: int, ranks: int, pairs: int) -> tuple[list[Ratio], dict[str, object]]:
    """Idle and switching, each with and without the agent in one run."""
    server = Server(hidden, intermediate, ranks)
    tensors = [t for layer in server.live for t in (*layer.expert_weights(), layer.expert_map, layer.log2phy)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    server.pairs(20, plans=False)
    server.agent_seconds.clear()
    server.vote_seconds.clear()
    on, off = server.pairs(pairs, plans=False)
    inside, voting = _per_vote(server.agent_seconds), _per_vote(server.vote_seconds)
    step = [STEP_SECONDS] * len(voting)
    ratios = [
        Ratio.of("idle vote, spread over its steps / 5 ms step", voting, step, 0.01),
        Ratio.of("step p50, agent idle / no agent", on, off, 1.03),
    ]
    switching_on, switching_off = server.pairs(pairs, plans=True)
    ratios.append(Ratio.of("step p50, agent switching / no agent", switching_on, switching_off, 1.05))
    assert addresses == [tensor.data_ptr() for tensor in tensors], "the switch moved a tensor"
    figures: dict[str, object] = {
        f"step_ms_{name}_p{percent}": 1e3 * float(np.percentile(times, percent))
        for name, times in (
            ("idle_on", on),
            ("idle_off", off),
            ("switching_on", switching_on),
            ("switching_off", switching_off),
        )
        for percent in (50, 99)
    }
    stats = server.agent.stats
    figures["vote_us_per_step_median"] = 1e6 * float(np.median(voting))
    figures["whole_agent_us_per_step_median"] = 1e6 * float(np.median(inside))
    figures["commit_adds_ms_to_its_step_p50"] = 1e3 * float(np.median(server.switch_seconds))
    figures["commit_adds_ms_to_its_step_p90"] = 1e3 * float(np.percentile(server.switch_seconds, 90))
    figures["install_ms_mean"] = 1e3 * stats.commit_seconds / stats.layers_switched
    figures["layers_switched"] = server.agent.stats.layers_switched
    server.agent.drain()
    server.agent.close()
    return ratios, figures
