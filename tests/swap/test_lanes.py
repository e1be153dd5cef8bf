"""What carries experts follows from where they are, and whatever it is, they arrive whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.ranks import run_ranks
from tests.swap.carried import HERE, RANKS, PlainLayer, order
from tests.swap.device_like import DeviceLikeLanes
from worker_agent import rendezvous
from worker_agent.agent import Agent
from worker_agent.swap.carrier import ByteBudget
from worker_agent.swap.group import AgentGroup, RendezvousError
from worker_agent.swap.lane.backend import Backend, choose_backend
from worker_agent.swap.lane.lanes import Lanes
from worker_agent.swap.transfer import TransferLimits, TransferWorker

# Which library


@pytest.mark.parametrize(
    ("asked", "device_type", "chosen"),
    [
        ("auto", "cpu", Backend.GLOO),
        ("auto", "cuda", Backend.NCCL),
        ("auto", "npu", Backend.HCCL),
        ("auto", "xpu", Backend.GLOO),
        ("gloo", "cuda", Backend.GLOO),
        ("gloo", "npu", Backend.GLOO),
        ("nccl", "cuda", Backend.NCCL),
        ("hccl", "npu", Backend.HCCL),
    ],
)
def test_the_device_chooses_the_library(asked: Any, device_type: str, chosen: Backend) -> None:
    assert choose_backend(asked, device_type) is chosen


@pytest.mark.parametrize(
    ("asked", "device_type", "reached"),
    [("nccl", "npu", "cuda"), ("hccl", "cuda", "npu"), ("nccl", "cpu", "cuda")],
)
def test_a_library_that_cannot_reach_the_experts_is_refused(
    asked: Any, device_type: str, reached: str
) -> None:
    with pytest.raises(
        ValueError, match=f"between {reached} devices, these are on {device_type}; ask for auto"
    ):
        choose_backend(asked, device_type)


def _ask_for_nccl() -> str:
    layers = live.layers_of(1, live.linear_RS(2))
    with pytest.raises(RendezvousError) as caught:
        Agent.start(layers, dist.group.WORLD, live.settings(transfer_backend="nccl"))
    return str(caught.value)


def test_all_ranks_learn_that_a_backend_does_not_fit() -> None:
    reported = run_ranks(2, _ask_for_nccl)
    assert reported[0] == reported[1]
    assert reported[0].startswith("rank 0: transfer_backend nccl moves experts between cuda devices")


# Experts arrive


MOVES = [(0, 1, 1, 0, 5), (1, 2, 2, 3, 6), (2, 0, 0, 2, 7), (0, 3, 2, 1, 8)]
"""A ring and one more: source rank and slot, destination rank and slot, expert."""


def exchange_experts(make: Callable[[AgentGroup], Lanes], where: torch.device = HERE) -> None:
    """Two transfers over ``RANKS`` ranks, with checksums and odd chunks; what is staged is what its source holds."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    layer = PlainLayer(group.rank, where)
    every: list[Any] = [None] * group.size
    dist.all_gather_object(every, [weight.cpu() for weight in layer.expert_weights()])
    lanes = make(group)
    lanes.open_first()
    limits = TransferLimits(timedelta(seconds=20), chunk_bytes=17, verify=True)
    budget = ByteBudget(1 << 20)
    budget.refill()
    worker = TransferWorker(lanes, limits, budget)
    for generation in (1, 2):
        worker.start(order(generation, *MOVES), layer)  # type: ignore[arg-type]
        while (result := worker.poll()) is None:
            time.sleep(0.001)
        assert result.error is None, result.error
        incoming = [move for move in MOVES if move[2] == group.rank]
        assert result.slots == [slot for _, _, _, slot, _ in incoming]
        for tensor, staged in enumerate(result.staged):
            assert staged.device.type == where.type
            for row, (source, slot, _, _, _) in enumerate(incoming):
                assert torch.equal(staged[row].cpu(), every[source][tensor][slot])
    worker.close()
    dist.barrier()


def _over_gloo() -> None:
    exchange_experts(lambda group: Lanes(group, Backend.GLOO, HERE, timedelta(seconds=20)))


def _over_a_device() -> None:
    exchange_experts(lambda group: DeviceLikeLanes(group, Backend.HCCL, HERE, timedelta(seconds=20)))


@pytest.mark.parametrize("over", [_over_gloo, _over_a_device])
def test_experts_arrive_whole_over_every_kind_of_lane(over: Callable[[], None]) -> None:
    run_ranks(RANKS, over)


def _switch_over_a_device() -> dict[str, Any]:
    rendezvous.Lanes = DeviceLikeLanes  # type: ignore[misc]
    layers, still = (live.layers_of(1, live.linear_RS(RANKS)) for _ in range(2))
    agent = Agent.start(
        layers, dist.group.WORLD, live.settings(transfer_timeout_seconds=20, verify_transfers=True)
    )
    target = live.target()
    if agent.identity.rank == 2:
        live.fail_once_to_stage(agent)
    worst = live.drive(agent, layers, still, 60, live.planned_again(agent, target), epoch=1)
    facts = {"worst": worst, "aborted": agent.stats.plans_aborted, "epoch": agent.installed.epoch}
    agent.close()
    return {**facts, "halted": agent.halted, "seconds": agent.stats.transfer_seconds}


def test_a_transfer_that_fails_on_one_rank_fails_on_all_before_any_device_waits() -> None:
    """The others learn of it where they meet on the host; the next plan goes through on a new lane."""
    facts = run_ranks(RANKS, _switch_over_a_device)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [(fact["aborted"], fact["epoch"], fact["halted"]) for fact in facts] == [(1, 1, None)] * RANKS
