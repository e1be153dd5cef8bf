"""Layers and their agents for the ranks of a test, and plans in the form that a service sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Int32, Placement
from eplb_core.wire.agent import PlanStatus
from eplb_core.wire.heat import HeatReport
from eplb_core.wire.plan import RankPlan
from eplb_lab.layer import ExpertParallelMoE, MoEShape, seeded_experts
from worker_agent import agent as agent_module
from worker_agent import heat as heat_module
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings
from worker_agent.swap import driver as driver_module
from worker_agent.swap import vote as vote_module
from worker_agent.swap.rank_layout import restoring_plan

EXPERTS = 8
SLOTS = 5
HIDDEN = 16
INTERMEDIATE = 8
TOP_K = 2
RANKS = 3
# Nothing listens on the discard port, so the agent runs without a service.
NOWHERE = "127.0.0.1:9"
_MAX_EXTRA_STEPS = 10_000
_CONSTANTS = {
    "heat_deadline_calls": (heat_module, "_DEADLINE_CALLS"),
    "offer_deadline_steps": (driver_module, "_OFFER_DEADLINE_STEPS"),
    "report_steps": (agent_module, "_INITIAL_REPORT_STEPS"),
    "vote_lag": (vote_module, "_VOTE_LAG"),
}
"""Agent constants that tests change in a rank's process, keyed by the name that ``settings`` accepts."""


def layers_of(
    count: int, phy2log_RS: Int32, dispatcher: str = "all2allv", dealing_width: int = 1
) -> list[ExpertParallelMoE]:
    """Return ``count`` layers with seeded experts; this rank's slots hold the experts given by ``phy2log_RS``."""
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
    """Return vLLM's initial placement of one layer, int32 ``[R, S]``."""
    return np.array(Placement.linear(1, EXPERTS, ranks, SLOTS).phy2log_LRS[0])


def shuffled_RS(ranks: int, seed: int) -> Int32:
    """Return a random placement of one layer with no expert twice on a rank, int32 ``[R, S]``."""
    order = np.random.default_rng(seed).permutation(EXPERTS)
    return order[linear_RS(ranks)].astype(np.int32)


def settings(**changes: Any) -> AgentSettings:
    """Return settings for a single node without a service, with timeouts long enough for a busy machine.

    ``changes`` may also contain agent constants (see ``_CONSTANTS``), which are set in this process.
    """
    for name in changes.keys() & _CONSTANTS.keys():
        setattr(*_CONSTANTS[name], changes.pop(name))
    values = {
        "service": NOWHERE,
        "node": "here",
        "vote_timeout_seconds": 60,
        "commit_timeout_seconds": 60,
        "transfer_timeout_seconds": 60,
    }
    return AgentSettings(**{**values, **changes})


def start(
    layer_count: int, dealing_width: int = 1, place: Callable[[Any], Any] = list, **changes: Any
) -> tuple[Agent, list[Any], list[Any]]:
    """Start an agent on linearly placed layers; return it, the layers, and equal reference layers without an agent.

    ``place`` converts the layers to the ones that the agent manages, for example to layers on a device.
    """
    rank_RS = linear_RS(dist.get_world_size())
    layers, still = (layers_of(layer_count, rank_RS, dealing_width=dealing_width) for _ in range(2))
    return Agent.start(place(layers), dist.group.WORLD, settings(**changes)), layers, still


def target(seed: int = 1) -> Any:
    """Return a placement that ``RANKS`` ranks can switch to from the linear one, int32 ``[R, S]``."""
    return keep_staying_slots(linear_RS(RANKS), shuffled_RS(RANKS, seed))


def from_here(agent: Agent, seed: int, layer: int = 0) -> Any:
    """Return a placement that a layer can switch to from its current one, int32 ``[R, S]``."""
    current_RS = agent.installed.placement.phy2log_LRS[layer]
    return keep_staying_slots(current_RS, shuffled_RS(len(current_RS), seed))


def offer(agent: Agent, changes: dict[int, Int32], plan_id: int = 1) -> None:
    """Deliver a plan, as the service would, that changes the layers in ``changes``, in that order."""
    identity = agent.identity
    installed = agent.installed
    phy2log_LRS = installed.placement.phy2log_LRS.copy()
    for layer, new_RS in changes.items():
        phy2log_LRS[layer] = new_RS
    restoring = restoring_plan(installed, Placement(phy2log_LRS, EXPERTS), identity.token_groups, 1)
    layers = sorted(restoring.layers, key=lambda layer: list(changes).index(layer.layer))
    plan = RankPlan.of(plan_id, 1, installed.epoch, installed.digest, tuple(layers))
    agent._stream.plans.put((plan, installed.digest))


def keep_staying_slots(old_RS: Int32, new_RS: Int32) -> Int32:
    """Return ``new_RS``, reordered so that each expert that stays on its rank keeps its current slot."""
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
    """Run ``steps`` steps through both sets of layers and return the largest difference between their outputs.

    ``between(step)`` runs before each step. Token counts differ between ranks, and rank 0 has no tokens on every third
    step. If the agent has not reached ``epoch`` after ``steps`` steps, for example on a busy machine, up to 10,000
    more steps follow. All ranks reach an epoch at the same step, so all of them stop at the same step.
    """
    rank = agent.identity.rank
    generator = torch.Generator().manual_seed(rank)
    worst = 0.0
    for step in range(steps + _MAX_EXTRA_STEPS):
        if step >= steps and agent.installed.epoch >= epoch:
            break
        between(step)
        tokens = 0 if rank == 0 and step % 3 == 0 else 3 + rank
        hidden_TH = torch.randn(tokens, HIDDEN, generator=generator)
        ids_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
        worst = max(worst, difference(live, still, hidden_TH, ids_TK))
        agent.step()
    return worst


def difference(live: list[Any], still: list[Any], hidden_TH: torch.Tensor, ids_TK: torch.Tensor) -> float:
    """Return the largest difference between the outputs of the layers and of the reference layers."""
    weights_TK = torch.full(ids_TK.shape, 1 / TOP_K)
    pairs = zip(live, still, strict=True)
    differences = [
        layer(hidden_TH, ids_TK, weights_TK) - reference(hidden_TH, ids_TK, weights_TK)
        for layer, reference in pairs
    ]
    return max(float(difference_TH.abs().max()) for difference_TH in differences) if len(hidden_TH) else 0.0


def fail_once_to_stage(agent: Agent) -> None:
    """Make the next reservation of staging memory fail."""

    def fail() -> None:
        raise MemoryError("no memory for staging")

    before_next_call(agent._switch.transfers.staging, "reserve", fail)


def before_next_call(owner: object, name: str, do: Callable[[], object]) -> None:
    """Run ``do`` once, just before the next call to the function ``name`` of a module, class or object."""
    function = getattr(owner, name)

    def once(*arguments: Any) -> Any:
        setattr(owner, name, function)
        do()
        return function(*arguments)

    setattr(owner, name, once)


def facts(agent: Agent, worst: float, **extra: Any) -> dict[str, Any]:
    """Close the agent and return its ``facts_so_far``."""
    agent.close()
    return facts_so_far(agent, worst, **extra)


def facts_so_far(agent: Agent, worst: float, **extra: Any) -> dict[str, Any]:
    """Return the largest output difference, the layout's epoch and digest, the halt reason, and the aborted plans."""
    return {
        "worst": worst,
        "epoch": agent.installed.epoch,
        "digest": agent.installed.digest,
        "halted": agent.halted,
        "aborted": agent.stats.plans_aborted,
        **extra,
    }


def check_together(ranks: list[dict[str, Any]], epoch: int | None = None) -> None:
    """Check that no output differed, no rank halted, and all ranks use the same layout (at ``epoch``, if given)."""
    assert max(fact["worst"] for fact in ranks) < 1e-5
    assert len({(fact["epoch"], fact["digest"]) for fact in ranks}) == 1
    assert [fact["halted"] for fact in ranks] == [None] * len(ranks)
    assert epoch is None or ranks[0]["epoch"] == epoch


def reasons(agent: Agent) -> list[str]:
    """Drain the outbox and return the reasons in its plan statuses."""
    return [item.reason for item in waiting(agent) if isinstance(item, PlanStatus) and item.reason]


def waiting(agent: Agent) -> list[Any]:
    """Drain the outbox and return its messages."""
    return list(iter(lambda: agent._outbox.take(timeout=0), None))


def planned_again(agent: Agent, target_RS: Int32) -> Callable[[int], None]:
    """Return a callback for ``drive`` that offers a plan, and offers it again after the first attempt is aborted."""
    offered = 0

    def between(step: int) -> None:
        nonlocal offered
        if step >= 2 and offered <= min(agent.stats.plans_aborted, 1):
            offered += 1
            offer(agent, {0: target_RS}, offered)
        time.sleep(0.005)

    return between


def segment(first_step: int, steps: int) -> HeatReport:
    """Return a heat report whose counts are zero."""
    counts_TLS = np.zeros((steps, 1, SLOTS), dtype=np.int32)
    return HeatReport(first_step, (0,), counts_TLS, np.full(steps, StepPhase.DECODE, dtype=np.uint8))


def offering(agent: Agent, plans: dict[int, dict[int, Int32]], pause: float = 0.002) -> Callable[[int], None]:
    """Return a callback for ``drive`` that offers ``plans``, which are keyed by step.

    Plans that are offered within the same block of twenty steps have the same number.
    """

    def between(step: int) -> None:
        if step in plans:
            offer(agent, plans[step], plan_id=1 + step // 20)
        time.sleep(pause)

    return between
