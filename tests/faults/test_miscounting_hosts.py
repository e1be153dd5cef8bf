"""Tests of hosts that miscount passes: ranks reconcile the counts, and a stuck count delays a step by only seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import reformation
from worker_agent.swap import vote as vote_module

RANKS = 2
MISCOUNTS = {
    "counts that differ by one": (1, 0, 1),
    "counts that differ by 100,000": (1, 0, 100_000),
    "one extra pass": (20, 0, 1),
    "every counter restarts": (40, -40, -40),
    "the counter of one rank restarts": (40, 0, -40),
}
"""For each fault: the agent call before which the count of forward passes changes, and the change on each rank."""


def _serve(fault: str, epoch: int) -> dict[str, Any]:
    """Serve while some ranks' counts are wrong, and offer every rank one plan after another."""
    vote_module._SUSPICION_SECONDS = 0.5
    reformation._INITIAL_BACKOFF_SECONDS = 0.05
    agent, layers, still = live.start(1, commit_timeout_seconds=0.5)
    rank = agent.identity.rank
    call = agent.step
    passed = 0
    faulty_at, *faulty = MISCOUNTS.get(fault, (0, 0, 0))
    if fault == "a stuck counter" and rank == 1:
        agent._clock._host_counter = [agent._clock._first]
    longest = 0.0
    complaints = set()
    steps = 160

    def step() -> None:
        nonlocal passed, longest
        passed += 1
        agent._clock._first -= faulty[rank] if passed == faulty_at else 0
        began = time.monotonic()
        call()
        longest = max(longest, time.monotonic() - began)
        complaints.add(agent._beat().error)

    agent.step = step

    def between(at: int) -> None:
        if at % 5 == 1 and agent._switch.state.plan is None and agent.votes_lost is None:
            live.offer(agent, {0: live.from_here(agent, agent.installed.epoch)}, at)
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, steps, between, epoch)
    return live.facts(agent, worst, longest=longest, complaints=" | ".join(sorted(complaints)))


def test_a_stuck_counter_delays_a_step_by_only_seconds_and_changes_no_output() -> None:
    facts = run_ranks(RANKS, _serve, "a stuck counter", 0)
    live.check_together(facts, epoch=0)
    assert max(fact["longest"] for fact in facts) < 30
    assert (
        "rank 1 has made 6 calls but counts 0 forward passes; the vote is due after pass 6"
        in facts[0]["complaints"]
    )
    assert "the layers' load_counter has not grown in" in facts[1]["complaints"]


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("one extra pass", "votes in a row found the ranks at different forward passes"),
        ("every counter restarts", "the host's count of forward passes decreased from 39 to 0"),
        pytest.param("the counter of one rank restarts", "decreased from 39 to 0", marks=pytest.mark.slow),
        pytest.param("counts that differ by one", "at different forward passes", marks=pytest.mark.slow),
        pytest.param("counts that differ by 100,000", "counts", marks=pytest.mark.slow),
    ],
)
def test_ranks_with_wrong_pass_counts_agree_on_a_count_and_switch_layers_again(
    fault: str, complaint: str
) -> None:
    facts = run_ranks(RANKS, _serve, fault, 12)
    live.check_together(facts)
    assert max(fact["longest"] for fact in facts) < 30
    assert complaint in facts[1]["complaints"]
