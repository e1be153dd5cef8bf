"""All ranks vote at the same forward passes, whichever calls their hosts miss; seldom where nobody holds a plan."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.settings import AgentSettings
from worker_agent.swap.ballot import Ballot, Outcome, Progress
from worker_agent.swap.vote_schedule import VoteSchedule

PLAN = 7


def _schedule(**settings: Any) -> VoteSchedule:
    links = SimpleNamespace(group=SimpleNamespace(register=None), votes=None)
    clock = SimpleNamespace(calls=0, now=0)
    return VoteSchedule(cast(Any, links), AgentSettings(**settings), cast(Any, clock), cast(Any, None))


def _outcome(forwards: list[int], plan: int) -> Outcome:
    progress = Progress.OFFERED if plan else Progress.IDLE
    ballots = [Ballot(progress, plan, 1, False, forward).encode() for forward in forwards]
    return Outcome.decode([min(column) for column in zip(*ballots, strict=True)])


def _passes(schedule: VoteSchedule, steps: range, plan_from: int, lag: int) -> list[int]:
    """Forward passes of this rank's ballots, where plans are held from one pass on and every vote is heard."""
    votes: list[int] = []
    due = None
    for step in steps:
        if due is not None and step >= due:
            schedule.counted(_outcome([votes[-1]] * 3, PLAN if votes[-1] >= plan_from else 0))
            due = None
        ballot = schedule.to_cast(step)
        if ballot is not None:
            votes.append(ballot[1])
            due = ballot[1] + lag
    return votes


def test_ranks_without_a_plan_vote_seldom_and_with_one_often() -> None:
    votes = _passes(_schedule(vote_interval=4, idle_vote_interval=16), range(1, 80), 36, 2)
    assert votes == [4, 20, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76]


def test_an_idle_interval_below_the_other_counts_as_that() -> None:
    assert _passes(_schedule(vote_interval=8, vote_lag=2, idle_vote_interval=3), range(1, 30), 99, 2) == [
        8,
        16,
        24,
    ]


@given(
    interval=st.integers(1, 6),
    idle=st.integers(1, 24),
    lag=st.integers(1, 6),
    plan_from=st.integers(0, 90),
    missed=st.sets(st.integers(1, 100)),
)
def test_a_rank_whose_host_misses_calls_votes_at_the_same_passes(
    interval: int, idle: int, lag: int, plan_from: int, missed: set[int]
) -> None:
    """As long as no call of one whole interval is missed: then the ballots show it, and the ranks meet again."""
    lag = min(lag, interval)
    kept = [step for step in range(1, 101) if step not in missed or step % interval == interval - 1]
    settings = {"vote_interval": interval, "idle_vote_interval": idle, "vote_lag": lag}
    punctual = _passes(_schedule(**settings), range(1, 101), plan_from, lag)
    other = _passes(_schedule(**settings), cast(range, kept), plan_from, lag)
    assert other == punctual[: len(other)]
    assert len(punctual) - len(other) <= 1
    assert all(later - earlier <= max(interval, idle) + interval - 1 for earlier, later in pairwise(punctual))


@pytest.mark.parametrize("forwards", [[16, 16, 16], [16, 20, 16]])
def test_a_vote_at_different_passes_is_followed_by_one_soon(forwards: list[int]) -> None:
    schedule = _schedule(vote_interval=4, vote_lag=2, idle_vote_interval=16)
    outcome = _outcome(forwards, 0)
    schedule.counted(outcome)
    first = next(step for step in range(20, 100) if schedule.to_cast(step) is not None)
    assert (first, outcome.idle) == ((32, True) if len(set(forwards)) == 1 else (24, False))
