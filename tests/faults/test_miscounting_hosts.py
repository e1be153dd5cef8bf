"""Hosts that count wrongly: ranks whose counts differ agree on one; a count that hangs costs seconds, no output."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import reformation
from worker_agent.swap import vote as vote_module

RANKS = 2


def _serve(fault: str, epoch: int) -> dict[str, Any]:
    """Rank 1 miscounts; every rank is offered one plan after another."""
    vote_module._SUSPICION_SECONDS = 0.5
    reformation._FIRST_BACKOFF_SECONDS = 0.05
    agent, layers, still = live.start(1, commit_timeout_seconds=0.5)
    rank, call, passed = agent.identity.rank, agent.step, 0
    if fault == "a counter that never moves" and rank == 1:
        agent._clock._counter = layers[-1].load_counter.clone()
    longest, complaints, steps = 0.0, set(), 160

    def step() -> None:
        nonlocal passed, longest
        passed += 1
        number = {
            "numbers one apart": passed + rank,
            "numbers far apart": passed + 100_000 * rank,
            "one pass too many": passed + (rank if passed > 20 else 0),
            "numbers that begin again": passed if passed < 40 else passed - 40,
            "numbers of one rank that begin again": passed if passed < 40 or rank == 0 else passed - 40,
            "numbers that do not move": passed if rank == 0 else 7,
        }.get(fault)
        began = time.monotonic()
        call(number=number)
        longest = max(longest, time.monotonic() - began)
        complaints.add(agent._beat().error)

    agent.step = step

    def between(at: int) -> None:
        if at % 5 == 1 and agent._switch.state.plan is None and agent.unheard is None:
            live.offer(agent, {0: live.from_here(agent, agent.installed.epoch)}, at)
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, steps, between, epoch)
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
    ],
)
def test_a_count_that_hangs_costs_seconds_and_no_output(fault: str, said_by: dict[int, str]) -> None:
    facts = run_ranks(RANKS, _serve, fault, 0)
    live.check_together(facts, epoch=0)
    assert max(fact["longest"] for fact in facts) < 30
    for rank, said in said_by.items():
        assert said in facts[rank]["complaints"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one pass too many", "votes in a row found the ranks at different forward passes"),
        ("numbers that begin again", "the host's count of forward passes went back from 39 to 0"),
        pytest.param(
            "numbers of one rank that begin again", "went back from 39 to 0", marks=pytest.mark.slow
        ),
        pytest.param("numbers one apart", "at different forward passes", marks=pytest.mark.slow),
        pytest.param("numbers far apart", "counts", marks=pytest.mark.slow),
    ],
)
def test_ranks_whose_counts_differ_agree_on_one_and_switch_layers_again(fault: str, said: str) -> None:
    facts = run_ranks(RANKS, _serve, fault, 12)
    live.check_together(facts)
    assert max(fact["longest"] for fact in facts) < 30
    assert said in facts[1]["complaints"]
