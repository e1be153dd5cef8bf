"""Hosts that miss a call, or make one twice: layers switch by forward passes, so no output changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.ranks import RankFailure, run_ranks
from worker_agent.agent import Agent
from worker_agent.rendezvous import RendezvousError
from worker_agent.swap.commit_register import FatalSwitchError

RANKS = 2


def _switching(miscalls: dict[int, int], changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Switch layers all the time; rank 1 makes ``miscalls[pass]`` calls after that forward pass instead of one."""
    base_RS = live.linear_RS(RANKS)
    layers, still = live.layers_of(2, base_RS), live.layers_of(2, base_RS)
    agent = Agent.start(
        layers, dist.group.WORLD, live.settings(**{"commit_timeout_seconds": 1.0, **(changes or {})})
    )
    call = agent.step
    passed = 0

    def miscall() -> None:
        nonlocal passed
        passed += 1
        for _ in range(miscalls.get(passed, 1) if dist.get_rank() == 1 else 1):
            call()

    agent.step = miscall  # type: ignore[method-assign]

    def between(step: int) -> None:
        installed = agent.installed
        if agent._switch.state.plan is None and step % 4 == 1:
            changed = {
                layer: live.keep_staying_slots(
                    installed.placement.phy2log_LRS[layer],
                    live.shuffled_RS(RANKS, 10 * installed.epoch + layer),
                )
                for layer in range(2)
            }
            agent._stream.plans.put(live.plan_for(agent, changed, plan_id=installed.epoch + 1))
        time.sleep(0.003)

    worst = live.drive(agent, layers, still, 120, between)
    facts = {
        "worst": worst,
        "epoch": agent.installed.epoch,
        "digest": agent.installed.digest,
        "halted": agent.halted,
    }
    agent.close()
    return facts


@pytest.mark.parametrize(
    "miscalls",
    [
        pytest.param(dict.fromkeys(range(20, 100, 13), 0), marks=pytest.mark.slow),
        pytest.param({31: 0, 32: 0, 33: 0}, marks=pytest.mark.slow),
        pytest.param(dict.fromkeys(range(20, 100, 7), 2), marks=pytest.mark.slow),
    ],
    ids=["missed", "three missed in a row", "doubled"],
)
def test_calls_that_are_missed_or_doubled_change_no_output(miscalls: dict[int, int]) -> None:
    facts = run_ranks(RANKS, _switching, miscalls)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert len({(fact["epoch"], fact["digest"]) for fact in facts}) == 1
    assert facts[0]["epoch"] > 2


@pytest.mark.parametrize(
    "missed", [pytest.param(step, marks=[] if step == 43 else pytest.mark.slow) for step in range(40, 44)]
)
def test_a_boundary_missed_at_any_place_of_a_vote_changes_no_output(missed: int) -> None:
    """One of these is the boundary at which the others are about to commit: they wait, and commit nothing."""
    facts = run_ranks(RANKS, _switching, {missed: 0}, {"commit_timeout_seconds": 0.5})
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert len({(fact["epoch"], fact["digest"]) for fact in facts}) == 1


def _no_memory_to_decide() -> tuple[float, bool]:
    """Rank 1 has no memory for the placement that a vote has just decided on."""
    base_RS = live.linear_RS(RANKS)
    layers, still = live.layers_of(1, base_RS), live.layers_of(1, base_RS)
    agent = Agent.start(layers, dist.group.WORLD, live.settings())
    target = live.keep_staying_slots(base_RS, live.shuffled_RS(RANKS, 1))

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for a placement")

    def between(step: int) -> None:
        if step == 1:
            agent._stream.plans.put(live.plan_for(agent, {0: target}))
        if step == 3 and dist.get_rank() == 1:
            type(agent.installed).with_layer = fail  # type: ignore[method-assign]
        time.sleep(0.005)

    with pytest.raises(FatalSwitchError) as fatal:
        live.drive(agent, layers, still, 40, between)
    with pytest.raises(FatalSwitchError):
        agent.step()
    raise fatal.value


def test_an_agent_that_cannot_follow_a_vote_serves_no_further_token() -> None:
    with pytest.raises(RankFailure, match=r"FatalSwitchError.*no memory for a placement"):
        run_ranks(RANKS, _no_memory_to_decide)


def _diverged() -> str:
    base_RS = live.linear_RS(RANKS)
    layers, still = live.layers_of(1, base_RS), live.layers_of(1, base_RS)
    agent = Agent.start(layers, dist.group.WORLD, live.settings())
    if dist.get_rank() == 1:
        installed = agent.installed
        astray = installed.with_layer(0, installed.placement.phy2log_LRS[0], installed.log2phy_LE[0])
        object.__setattr__(agent._switch.state, "installed", astray)
    with pytest.raises(FatalSwitchError) as fatal:
        live.drive(agent, layers, still, 20)
    agent.close()
    return str(fatal.value)


def test_ranks_that_serve_different_placements_are_stopped_all_at_once() -> None:
    assert all("the ranks serve different placements" in why for why in run_ranks(RANKS, _diverged))


def _shared_tokens(token_group: int | None) -> str:
    layers = live.layers_of(1, live.linear_RS(RANKS), dispatcher="allgather")
    try:
        Agent.start(layers, dist.group.WORLD, live.settings(), token_group=token_group).close()
    except RendezvousError as refused:
        return str(refused)
    return ""


def test_layers_that_share_tokens_need_a_token_group() -> None:
    assert all("its layers share tokens" in why for why in run_ranks(RANKS, _shared_tokens, None))
    assert run_ranks(RANKS, _shared_tokens, 0) == ["", ""]


def test_the_layers_own_counter_numbers_the_passes() -> None:
    from tests.agent.test_heat import CountingLayer
    from worker_agent.forward_clock import ForwardClock

    layer = CountingLayer()
    layer.load_counter += 5
    clock = ForwardClock([layer])
    layer.forward(0)
    assert clock.called(None) == clock.exact() == 1
    assert clock.called(None) == 1
    layer.forward(1)
    layer.forward(2)
    assert clock.called(None) == 3
    assert clock.called(17) == clock.exact() == 17
    assert torch.equal(layer.load_counter, torch.tensor(8))
