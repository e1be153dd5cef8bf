"""Live layers with agents in a test's ranks, and plans for them as a service would make them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import Int32, Placement, dealt_log2phy, without_single_entries
from eplb_service.wire.heat import HeatReport, StepPhase
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.agent import Agent
from worker_agent.checked_plan import CheckedPlan
from worker_agent.moe import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent.settings import AgentSettings

EXPERTS, SLOTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 5, 16, 8, 2
RANKS = 3
# Nobody listens on the discard port: an agent without a service.
NOWHERE = "127.0.0.1:9"
_MOST_STEPS_MORE = 10_000


def layers_of(
    count: int, phy2log_RS: Int32, dispatcher: str = "all2allv", dealing_width: int = 1
) -> list[ExpertParallelMoE]:
    """``count`` layers with seeded experts, this rank's part of ``phy2log_RS``."""
    shapes = [MoEShape(layer, EXPERTS, HIDDEN, INTERMEDIATE) for layer in range(count)]
    group = dist.group.WORLD
    return [
        ExpertParallelMoE(
            shape,
            phy2log_RS,
            seeded_experts(shape),
            dispatcher=dispatcher,
            ep_group=group,
            heat_rows=16,
            dealing_width=dealing_width,
        )
        for shape in shapes
    ]


def linear_RS(ranks: int) -> Int32:
    """vLLM's first layout."""
    return np.array(Placement.linear(1, EXPERTS, ranks, SLOTS).phy2log_LRS[0])


def shuffled_RS(ranks: int, seed: int) -> Int32:
    """Another valid layer: experts dealt out in a random order, none twice on a rank."""
    order = np.random.default_rng(seed).permutation(EXPERTS)
    return order[linear_RS(ranks)].astype(np.int32)


def settings(**changes: Any) -> AgentSettings:
    """One node, no service, and deadlines that a busy machine meets; a test of a deadline sets its own."""
    values = {
        "service": NOWHERE,
        "node": "here",
        "vote_timeout_seconds": 60,
        "commit_timeout_seconds": 60,
        "transfer_timeout_seconds": 60,
    }
    return AgentSettings(**{**values, **changes})  # type: ignore[arg-type]


def start(layer_count: int, dealing_width: int = 1, **changes: Any) -> tuple[Agent, list[Any], list[Any]]:
    """An agent over linear layers, these layers, and the same ones that no agent touches."""
    rank_RS = linear_RS(dist.get_world_size())
    layers, still = (layers_of(layer_count, rank_RS, dealing_width=dealing_width) for _ in range(2))
    return Agent.start(layers, dist.group.WORLD, settings(**changes)), layers, still


def target(seed: int = 1) -> Any:
    """A layout that ``RANKS`` linear ranks can switch to, int32 ``[R, S]``."""
    return keep_staying_slots(linear_RS(RANKS), shuffled_RS(RANKS, seed))


def from_here(agent: Agent, seed: int) -> Any:
    """One that they can switch to from where they are."""
    return keep_staying_slots(agent.installed.placement.phy2log_LRS[0], shuffled_RS(RANKS, seed))


def plan_for(agent: Agent, changes: dict[int, Int32], plan_id: int = 1, term: int = 1) -> CheckedPlan:
    """What a service would send this agent to bring the layers of ``changes`` there; slots that keep stay."""
    rank, installed = agent.identity.rank, agent.installed
    layers = []
    for layer, new_RS in changes.items():
        old_RS = installed.placement.phy2log_LRS[layer]
        moves = [
            (
                int(np.argwhere(old_RS == expert)[0][0]),
                int(np.argwhere(old_RS == expert)[0][1]),
                r,
                s,
                int(expert),
            )
            for (r, s), expert in np.ndenumerate(new_RS)
            if old_RS[r, s] != expert
        ]
        tables_RE = without_single_entries(dealt_log2phy(new_RS, EXPERTS, agent.identity.width))
        layers.append(
            RankLayer(
                layer=layer,
                phy2log_RS=new_RS,
                log2phy_E=tables_RE[rank],
                log2phy_digests=tuple(table_digest(row) for row in tables_RE),
                moves_M5=np.array(moves, dtype=np.int32).reshape(-1, 5),
            )
        )
    plan = RankPlan.of(plan_id, term, installed.epoch, installed.digest, tuple(layers))
    return CheckedPlan(plan, installed.digest)


def keep_staying_slots(old_RS: Int32, new_RS: Int32) -> Int32:
    """``new_RS`` with its experts in the slots that they already have on their rank."""
    kept = np.full_like(new_RS, -1)
    for rank, experts in enumerate(new_RS):
        stays = np.isin(old_RS[rank], experts)
        kept[rank, stays] = old_RS[rank, stays]
        kept[rank, ~stays] = [expert for expert in experts if expert not in old_RS[rank]]
    return kept


def drive(
    agent: Agent,
    live: list[ExpertParallelMoE],
    still: list[ExpertParallelMoE],
    steps: int,
    between: Callable[[int], None] = lambda _: None,
    epoch: int = 0,
) -> float:
    """Run ``steps`` steps through both sets of layers; the largest difference of their outputs.

    ``between(step)`` runs before each step. Ranks have different token counts, and rank 0 none at every third step.
    Where the agent has not reached ``epoch`` by then, as on a busy machine, goes on until it has, for a minute or so;
    all ranks reach an epoch at the same step, so all end at the same step.
    """
    rank = agent.identity.rank
    generator = torch.Generator().manual_seed(rank)
    worst = 0.0
    for step in range(steps + _MOST_STEPS_MORE):
        if step >= steps and agent.installed.epoch >= epoch:
            break
        between(step)
        tokens = 0 if rank == 0 and step % 3 == 0 else 3 + rank
        hidden_TH = torch.randn(tokens, HIDDEN, generator=generator)
        for one, other in zip(live, still, strict=True):
            order_TE = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)
            weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K)
            expected_TH = other(hidden_TH, order_TE[:, :TOP_K], weights_TK)
            difference = (one(hidden_TH, order_TE[:, :TOP_K], weights_TK) - expected_TH).abs()
            worst = max(worst, float(difference.max()) if tokens else 0.0)
        agent.step()
    return worst


def fail_once_to_stage(agent: Agent) -> None:
    """The first time that an expert is to be staged there is no room."""
    staging = agent._switch.transfers.staging
    reserve = staging.reserve

    def fail_once(*_: Any) -> Any:
        staging.reserve = reserve  # type: ignore[method-assign]
        raise MemoryError("no room to stage")

    staging.reserve = fail_once  # type: ignore[method-assign]


def planned_again(agent: Agent, target_RS: Int32) -> Callable[[int], None]:
    """What happens between steps, for ``drive``: a plan comes, and another once the first has been aborted."""
    plans = iter((1, 2))

    def between(step: int) -> None:
        if step == 2 or (step > 2 and agent.stats.plans_aborted == 1):
            for plan_id in itertools.islice(plans, 1):
                agent._stream.plans.put(plan_for(agent, {0: target_RS}, plan_id))
        time.sleep(0.005)

    return between


def segment(first_step: int, steps: int) -> HeatReport:
    """A segment of empty counts."""
    counts_TLS = np.zeros((steps, 1, SLOTS), dtype=np.int32)
    return HeatReport(first_step, (0,), counts_TLS, np.full(steps, StepPhase.DECODE, dtype=np.uint8))
