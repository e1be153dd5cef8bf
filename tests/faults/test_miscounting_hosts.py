"""Hosts that count wrongly for good: the ranks wait for seconds at most, less and less often, and say why."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import vote as vote_module

RANKS = 2


def _serve(fault: str, steps: int) -> dict[str, Any]:
    """Rank 1 miscounts; every rank is offered one plan after another."""
    vote_module._SUSPICION_SECONDS = 0.5
    agent, layers, still = live.start(1, commit_timeout_seconds=0.5)
    rank, call, passed = agent.identity.rank, agent.step, 0
    if fault == "a counter that never moves" and rank == 1:
        agent._clock._counter = layers[-1].load_counter.clone()
    longest, complaints = 0.0, set()

    def step() -> None:
        nonlocal passed, longest
        passed += 1
        number = {
            "numbers one apart": passed + rank,
            "numbers far apart": passed + 100_000 * rank,
            "numbers that do not move": passed if rank == 0 else 7,
        }.get(fault)
        began = time.monotonic()
        call(number=number)
        longest = max(longest, time.monotonic() - began)
        complaints.add(agent._beat().error)

    agent.step = step

    def between(at: int) -> None:
        if at % 5 == 1 and agent._switch.state.plan is None:
            live.offer(agent, {0: live.from_here(agent, 1)}, at)
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, steps, between)
    return live.facts(agent, worst, longest=longest, complaints=" | ".join(sorted(complaints)))


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
def test_a_host_that_miscounts_for_good_costs_seconds_and_no_output(fault, said_by) -> None:
    often = fault == "numbers one apart"
    facts = run_ranks(RANKS, _serve, fault, 400 if often else 160)
    live.check_together(facts, epoch=0)
    assert max(fact["longest"] for fact in facts) < 30
    for rank, said in said_by.items():
        assert said in facts[rank]["complaints"]
    # Commits that are never confirmed become rare: 400 passes would admit 33, of three votes at every 4th.
    assert not often or 2 <= facts[0]["aborted"] <= 12
