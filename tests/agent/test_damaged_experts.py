"""An expert that is overwritten in memory is reported by its rank, and is never copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from eplb_core.placement import Placement
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import driver, replica_check
from worker_agent.swap.rank_layout import restoring_plan


def _serve(agent: Any, layer: Any, over: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Step the agent without the model's collectives until ``over`` returns True on this rank or time runs out."""
    end = time.monotonic() + seconds
    while not over() and time.monotonic() < end:
        layer.load_counter += 1
        agent.step()
        time.sleep(0.002)
    return over()


def _wait_for_the_others(agent: Any, layer: Any) -> None:
    """Step the agent until every rank arrives here, so that no rank changes weights that a peer is still comparing."""
    arrival = dist.barrier(async_op=True)
    assert _serve(agent, layer, arrival.is_completed, 60.0)


def _damaged() -> dict[str, Any]:
    """Damage an expert that rank 1 serves, check that expert as the source of a move, then drain and resume."""
    replica_check._REST_SECONDS = replica_check._REST_PER_SECOND = 0.0
    agent, (layer,), _ = live.start(1, vote_interval=1, vote_lag=1)
    replicas = agent._switch._replicas
    rank = agent.identity.rank
    current_RS = agent.installed.placement.phy2log_LRS[0]
    replicated = [expert for expert in current_RS[1] if expert in current_RS[0] or expert in current_RS[2]]
    slot = list(current_RS[1]).index(replicated[0])
    reported: dict[str, Any] = {"holds": replicated[0] in current_RS[rank], "source": ""}
    all_read = _serve(agent, layer, lambda: replicas._turn > 2 * live.SLOTS)
    reported["before damage"] = all_read, agent._beat().error
    _wait_for_the_others(agent, layer)
    if rank == 1:
        layer.expert_weights()[0][slot].view(-1)[3] += 1.0
        _serve(agent, layer, lambda: bool(agent._beat().error))
        reported["damaged"] = agent._beat().error
    try:
        move = [1, slot, 0, 0, replicated[0]]
        replicas.check_sources({0: np.array([move], dtype=np.int32)}, 1.0)
    except ValueError as error:
        reported["source"] = str(error)
    _wait_for_the_others(agent, layer)
    reported["halted"] = agent.halted
    agent._switch.drain("the host changes weights")
    turns = replicas._turn
    time.sleep(0.1)
    reported["reads while drained"] = replicas.reading, replicas._turn - turns
    # After a drain, a rank accepts its own weights as correct. They still differ from the other replica's weights.
    agent._switch.resume()
    _wait_for_the_others(agent, layer)
    _serve(agent, layer, lambda: bool(agent._beat().error) or not reported["holds"])
    reported["resumed"] = agent._beat().error
    _wait_for_the_others(agent, layer)
    agent.close()
    return reported


def test_a_changed_expert_is_reported_and_rejected_as_a_source() -> None:
    ranks = run_ranks(live.RANKS, _damaged)
    for rank, reported in enumerate(ranks):
        assert reported["before damage"] == (True, "")
        assert reported["halted"] is None
        assert reported["reads while drained"] == (False, 0)
        if rank == 1:
            assert "of rank 1 changed while it was in use" in reported["damaged"]
            assert reported["source"] == reported["damaged"]
        if reported["holds"]:
            assert "differs from its replica on rank" in reported["resumed"]
        else:
            assert (reported["source"], reported["resumed"]) == ("", "")


def _copied_before_its_turn(damage: str) -> dict[str, Any]:
    """Damage an expert of rank 1 before its first comparison, then offer a plan that copies it."""
    replica_check._REST_SECONDS = 1e6
    agent, layers, _ = live.start(1, transfer_timeout_seconds=20)
    placement = agent.installed.placement
    for seed in range(50):
        target_RS = live.from_here(agent, seed)
        plan = restoring_plan(agent.installed, Placement(target_RS[None], live.EXPERTS), (0, 1, 2), 1)
        sources = [
            (slot, expert)
            for rank, slot, _, _, expert in plan.layers[0].moves_M5.tolist()
            if rank == 1 and (placement.phy2log_LRS[0] == expert).sum() > 1
        ]
        if sources:
            break
    slot, expert = sources[0]
    if agent.identity.rank == 1:
        flat = layers[0].expert_weights()[0][slot].view(-1)
        flat[3] = {"none": flat[3], "value": flat[3] + 1.0, "sign of zero": -0.0}[damage]
    elif damage == "sign of zero":
        for replica_slot in np.flatnonzero(placement.phy2log_LRS[0, agent.identity.rank] == expert):
            layers[0].expert_weights()[0][replica_slot].view(-1)[3] = 0.0
    live.offer(agent, {0: target_RS})
    _serve(agent, layers[0], lambda: agent.stats.plans_aborted + agent.installed.epoch > 0)
    reported = {"epoch": agent.installed.epoch, "aborted": agent.stats.plans_aborted, "expert": expert}
    reported["complaint"] = agent._switch.complaint
    _serve(agent, layers[0], lambda: False, 0.5)
    agent.close()
    return reported


@pytest.mark.parametrize("damage", ["none", "value", "sign of zero"])
def test_an_expert_damaged_before_its_first_check_is_not_copied(damage: str) -> None:
    ranks = run_ranks(live.RANKS, _copied_before_its_turn, damage)
    for rank, reported in enumerate(ranks):
        assert reported["epoch"] == (1 if damage == "none" else 0)
        assert reported["aborted"] == (0 if damage == "none" else 1)
        if damage != "none" and rank == 1:
            assert f"expert {reported['expert']} in slot" in reported["complaint"]
            assert "differs from its replica on rank" in reported["complaint"]


def _slow_install() -> dict[str, Any]:
    """Read experts continuously while a slow commit overwrites them."""
    replica_check._REST_SECONDS = replica_check._REST_PER_SECOND = 0.0
    agent, layers, still = live.start(1)
    install = driver.install_layer

    def install_slowly(*arguments: Any, **options: Any) -> int:
        time.sleep(0.3)
        return install(*arguments, **options)

    driver.install_layer = install_slowly
    worst = live.drive(agent, layers, still, 40, live.offering(agent, {1: {0: live.target()}}), epoch=1)
    replicas = agent._switch._replicas
    turns = replicas._turn + 2 * live.SLOTS
    deadline = time.monotonic() + 30
    while replicas._turn < turns and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.facts(agent, worst, complaint=replicas.complaint, read=replicas._turn >= turns)


def test_a_slow_commit_is_not_reported_as_damage() -> None:
    facts = run_ranks(live.RANKS, _slow_install)
    live.check_together(facts, epoch=1)
    assert [(fact["read"], fact["complaint"]) for fact in facts] == [(True, None)] * live.RANKS
