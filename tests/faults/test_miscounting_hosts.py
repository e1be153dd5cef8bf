"""Hosts that count wrongly for good: the ranks wait for seconds at most, less and less often, and say why."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.agent import Agent
from worker_agent.swap import vote as vote_module

RANKS = 2


def _serve(fault: str, steps: int) -> dict[str, Any]:
    """Rank 1 miscounts; every rank is offered one plan after another."""
    vote_module._SUSPICION = timedelta(seconds=0.5)
    base_RS = live.linear_RS(RANKS)
    layers, still = live.layers_of(1, base_RS), live.layers_of(1, base_RS)
    agent = Agent.start(layers, dist.group.WORLD, live.settings(commit_timeout_seconds=0.5))
    rank, call, passed = agent.identity.rank, agent.step, 0
    if fault == "a counter that never moves" and rank == 1:
        stuck = layers[-1].load_counter.clone()
        agent._clock._counter = stuck
    longest, complaints = 0.0, set()

    def step() -> None:
        nonlocal passed, longest
        passed += 1
        number = None
        if fault == "numbers one apart":
            number = passed + rank
        elif fault == "numbers far apart":
            number = passed + 100_000 * rank
        elif fault == "numbers that do not move":
            number = passed if rank == 0 else 7
        began = time.monotonic()
        call(number=number)
        longest = max(longest, time.monotonic() - began)
        complaints.add(agent._beat().error)

    agent.step = step  # type: ignore[method-assign]

    def between(at: int) -> None:
        if at % 5 == 1 and agent._switch.state.plan is None:
            target = live.keep_staying_slots(base_RS, live.shuffled_RS(RANKS, 1))
            agent._stream.plans.put(live.plan_for(agent, {0: target}, plan_id=at))
        time.sleep(0.002)

    began = time.monotonic()
    worst = live.drive(agent, layers, still, steps, between)
    facts = {
        "worst": worst,
        "epoch": agent.installed.epoch,
        "longest": longest,
        "seconds": time.monotonic() - began,
        "complaints": " | ".join(sorted(complaints)),
        "aborted": agent.stats.plans_aborted,
    }
    agent.close()
    return facts


@pytest.mark.parametrize(
    ("fault", "said_by"),
    [
        (
            "a counter that never moves",
            {
                0: "rank 1 has made 6 calls but counts 0 forward passes, this rank 6",
                1: "the layers' load_counter has not grown in",
            },
        ),
        pytest.param(
            "numbers that do not move",
            {1: "the host's number of the step has not grown in"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "numbers far apart",
            {1: "calls but counts 2 forward passes, this rank 100002"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "numbers one apart",
            dict.fromkeys(range(RANKS), "votes in a row found the ranks at different forward passes"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_host_that_miscounts_for_good_costs_seconds_and_no_output(
    fault: str, said_by: dict[int, str]
) -> None:
    facts = run_ranks(RANKS, _serve, fault, 160)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["epoch"] for fact in facts] == [0, 0]
    assert max(fact["longest"] for fact in facts) < 30
    for rank, said in said_by.items():
        assert said in facts[rank]["complaints"]


@pytest.mark.slow
def test_commits_that_are_never_confirmed_become_rare() -> None:
    """Each costs the ranks a wait: with every one the next vote comes later."""
    facts = run_ranks(RANKS, _serve, "numbers one apart", 400)
    assert max(fact["worst"] for fact in facts) < 1e-5
    # Votes come every 4 passes, a plan needs three of them: 400 passes would admit 33.
    assert 2 <= facts[0]["aborted"] <= 12
