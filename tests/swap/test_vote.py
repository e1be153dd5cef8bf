"""All ranks vote at the same passes, settle what they have not heard, and form lost votes again at one attempt."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.swap.peered import joined
from worker_agent.settings import AgentSettings
from worker_agent.swap import reformation as module
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.machine import Ballot, Progress, VoteOutcome, VoteResult
from worker_agent.swap.reformation import Reformation
from worker_agent.swap.vote import Voter, VoteSchedule
from worker_agent.swap.vote_link import Kind, VoteError, VoteLink

PLAN = 7


def _schedule(vote_interval: int) -> VoteSchedule:
    links = SimpleNamespace(
        group=SimpleNamespace(register=None, peer_left=False, peers=SimpleNamespace()), votes=None
    )
    clock = SimpleNamespace(calls=0, now=0, reached=0, trouble=None)
    return VoteSchedule(
        cast(Any, links), AgentSettings(vote_interval=vote_interval), cast(Any, clock), cast(Any, None)
    )


def _outcome(forwards: list[int], plan: int) -> VoteOutcome:
    progress = Progress.OFFERED if plan else Progress.IDLE
    ballots = [Ballot(progress, plan, 1, False, forward).encode() for forward in forwards]
    return VoteOutcome.decode([min(column) for column in zip(*ballots, strict=True)])


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
    votes = _passes(_schedule(4), range(1, 80), 36, 2)
    assert votes == [4, 20, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76]


@given(
    interval=st.integers(1, 6),
    lag=st.integers(1, 6),
    plan_from=st.integers(0, 90),
    missed=st.sets(st.integers(1, 100)),
)
def test_a_rank_whose_host_misses_calls_votes_at_the_same_passes(interval, lag, plan_from, missed) -> None:
    """As long as no call of one whole interval is missed: then the ballots show it, and the ranks meet again."""
    lag = min(lag, interval)
    kept = [step for step in range(1, 101) if step not in missed or step % interval == interval - 1]
    punctual = _passes(_schedule(interval), range(1, 101), plan_from, lag)
    other = _passes(_schedule(interval), cast(range, kept), plan_from, lag)
    assert other == punctual[: len(other)]
    assert len(punctual) - len(other) <= 1
    assert all(later - earlier < 5 * interval for earlier, later in pairwise(punctual))


@pytest.mark.parametrize("forwards", [[16, 16, 16], [16, 20, 16]])
def test_a_vote_at_different_passes_is_followed_by_one_soon(forwards: list[int]) -> None:
    schedule = _schedule(4)
    outcome = _outcome(forwards, 0)
    schedule.counted(outcome)
    first = next(step for step in range(20, 100) if schedule.to_cast(step) is not None)
    assert (first, outcome.idle) == ((32, True) if len(set(forwards)) == 1 else (24, False))


def test_votes_that_have_lasted_are_formed_again_at_once_when_they_are_lost() -> None:
    schedule = _schedule(4)
    schedule._early_losses = 3
    for passes, losses in ((255, 3), (256, 0)):
        schedule.counted(_outcome([passes] * 3, 0))
        assert schedule._early_losses == losses


VOTE = 3


def voter(*, committed: bool) -> tuple[Voter, list[tuple[int, bool]]]:
    """A voter whose ranks settle on this verdict, and what it asks them: vote, and whether it has heard it."""
    asked: list[tuple[int, bool]] = []

    def may_commit(vote: int, *, has_outcome: bool) -> bool:
        asked.append((vote, has_outcome))
        return committed

    link: Any = SimpleNamespace(begin=lambda *_: None)
    register: Any = SimpleNamespace(may_commit=may_commit)
    history: Any = SimpleNamespace(vote=lambda *_, **__: None)
    return Voter(link, AgentSettings(), register, history, VOTE - 1), asked


@pytest.mark.parametrize(
    ("progress", "abort", "committed", "result"),
    [
        (Progress.READY, False, True, VoteResult.COMMIT),
        (Progress.READY, False, False, VoteResult.ABORT),
        (Progress.READY, True, True, VoteResult.NOTHING),
        (Progress.TRANSFERRING, False, True, VoteResult.NOTHING),
    ],
)
def test_what_was_not_heard_is_what_the_ranks_settle_on(progress, abort, committed, result) -> None:
    """A ballot that could not commit asks nobody."""
    rank, asked = voter(committed=committed)
    rank.cast(Ballot(progress, PLAN, 1, abort, 20))
    assert rank.settle(21).result is result
    assert asked == ([] if result is VoteResult.NOTHING else [(VOTE, False)])


def test_a_rank_that_is_behind_takes_the_number_of_the_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INITIAL_BACKOFF_SECONDS", 0.0)
    store: dict[str, str] = {}
    ahead = {1: b"+5", 2: b"+9"}

    def ask(ranks: list[int], _question: bytes, _seconds: float) -> dict[int, bytes]:
        # Once this rank has said that it is at the ninth attempt, the other comes to it too.
        mine = store["attempt/0"]
        return {rank: b"+9" if mine == "9" else ahead[rank] for rank in ranks}

    named: list[str] = []

    def refuse(name: str) -> None:
        named.append(name)
        raise OSError("no links in this test")

    group = SimpleNamespace(
        rank=0,
        peers=SimpleNamespace(others={1: None, 2: None}, ask=ask),
        store=SimpleNamespace(set=store.__setitem__),
        process_group=refuse,
    )
    state = SimpleNamespace(generation=0, lane=0, installed=SimpleNamespace(version_digest=0))
    tried = Reformation(
        cast(Any, group), cast(Any, state), 0, attempts=0, early_losses=0, current_pass=lambda: 0
    )
    end = time.monotonic() + 60
    while not named and time.monotonic() < end:
        time.sleep(0.005)
    tried.close()
    assert named[0] == "vote/9"


def test_ranks_at_different_collectives_learn_of_it_and_live() -> None:
    """As after an interrupt that one host has survived: of one width, they never end the process."""
    groups = joined(2)
    with ThreadPoolExecutor(2) as pool:
        one, other = (
            VoteLink(group) for group in pool.map(lambda group: group.process_group("vote"), groups)
        )
        sent = [one.begin(Kind.BALLOT, 4, range(9)), other.begin(Kind.INSTALLED, 4, [1])]
        sent += [one.begin(Kind.BALLOT, 5, range(9)), other.begin(Kind.BALLOT, 6, range(9))]
        for reduction in sent:
            with pytest.raises(
                VoteError, match="the ranks are at different collectives or at different votes"
            ):
                reduction.wait(20)
        assert [one.begin(Kind.BOUNDARY, 7, [3, -3]), other.begin(Kind.BOUNDARY, 7, [2, -2])][0].wait(20) == [
            2,
            -3,
        ]


def test_an_error_that_is_kept_does_not_keep_its_link_open() -> None:
    def broken(_: object) -> None:
        raise RuntimeError("connection closed by peer")

    class Work:
        wait, is_completed = staticmethod(broken), staticmethod(lambda: True)

    made = [Work()]
    there = weakref.ref(made[0])
    group: Any = SimpleNamespace(allreduce=lambda *_: made.pop())
    with pytest.raises(VoteError, match="installed 4: connection closed"):
        VoteLink(group).begin(Kind.INSTALLED, 4, [1]).wait(20)
    assert there() is None


def test_a_failure_that_peers_report_ends_the_wait_for_their_installs() -> None:
    link: Any = SimpleNamespace(begin=lambda *_: SimpleNamespace(wait=lambda _: None))
    nothing: Any = None
    rank = Voter(link, AgentSettings(), nothing, nothing, has_failed=lambda: True)
    assert not rank.all_have_installed(True)


@pytest.mark.parametrize("there", [20, 21], ids=["all at one pass", "one at another"])
def test_a_commit_counts_only_where_all_confirm_the_same_pass(there: int) -> None:
    """All have come to confirm; only the comparison shows that one is at another pass."""
    ballot = Ballot(Progress.READY, PLAN, 1, False, 18)
    answers = {Kind.BALLOT: ballot.encode(), Kind.BOUNDARY: [20, -there]}
    link: Any = SimpleNamespace(begin=lambda kind, *_: SimpleNamespace(wait=lambda _: answers[kind]))
    register: Any = SimpleNamespace(may_commit=lambda _, *, has_outcome: has_outcome)
    history: Any = SimpleNamespace(vote=lambda *_, **__: None)
    rank = Voter(link, AgentSettings(), register, history)
    rank.cast(ballot)
    outcome = rank.count(20, lambda: 20)
    assert outcome.result is (VoteResult.COMMIT if there == 20 else VoteResult.REALIGN)


def _formed_again(low: int, vote: int) -> tuple[Reformation, int]:
    """A rank that hears of these: the lower bound of all fingerprints, and the last vote that any rank knows."""
    rank: Any = object.__new__(Reformation)
    rank.attempts, rank.generation, rank.lane, rank.vote = 1, 3, 2, 5
    rank._version_digest, rank._astray, rank._margin, rank._current_pass = 7, False, 32, lambda: 40
    answers = {Kind.SERVED: [low, -7, -4, -6, -vote, 39, -41, 0, -64], Kind.IN_TIME: [1]}
    link: Any = SimpleNamespace(begin=lambda kind, *_: SimpleNamespace(wait=lambda _: answers[kind]))
    return rank, rank._first_vote(link)


def test_votes_formed_again_go_on_from_the_highest_that_any_rank_knows() -> None:
    """Numbers that began again would find the register's answers of earlier votes."""
    rank, start = _formed_again(7, 9)
    assert (rank.generation, rank.lane, rank.vote, start) == (4, 6, 9, 41 + 64)
    schedule = _schedule(4)
    schedule.voter, rank.start = None, start
    rank._result = SimpleNamespace(ended=lambda: False)
    schedule._reformation = rank
    assert schedule.formed_again(start) is rank
    assert cast(Voter, schedule.voter).number == 9


def test_votes_are_not_formed_again_over_placements_that_differ() -> None:
    with pytest.raises(FatalSwitchError, match="the ranks serve different placements"):
        _formed_again(6, 9)
