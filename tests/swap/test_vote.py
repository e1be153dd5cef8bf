"""Votes: their schedule, the settlement of votes without an outcome, and re-forming after all votes are lost."""

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
from worker_agent.swap import vote as voting
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
    """Return the forward passes at which this rank votes. Ranks have a plan from pass ``plan_from`` onwards."""
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


def test_ranks_vote_more_often_while_they_hold_a_plan() -> None:
    votes = _passes(_schedule(4), range(1, 80), 36, 2)
    assert votes == [4, 20, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76]


@given(
    interval=st.integers(1, 6),
    lag=st.integers(1, 6),
    plan_from=st.integers(0, 90),
    missed=st.sets(st.integers(1, 100)),
)
def test_a_rank_with_missed_calls_votes_at_the_same_passes(interval, lag, plan_from, missed) -> None:
    """The host makes at least one call per vote interval, so the rank never skips a whole interval."""
    lag = min(lag, interval)
    kept = [step for step in range(1, 101) if step not in missed or step % interval == interval - 1]
    punctual = _passes(_schedule(interval), range(1, 101), plan_from, lag)
    irregular = _passes(_schedule(interval), cast(range, kept), plan_from, lag)
    assert irregular == punctual[: len(irregular)]
    assert len(punctual) - len(irregular) <= 1
    assert all(later - earlier < 5 * interval for earlier, later in pairwise(punctual))


@pytest.mark.parametrize("forwards", [[16, 16, 16], [16, 20, 16]])
def test_a_vote_that_ranks_cast_at_different_passes_is_repeated_soon(forwards: list[int]) -> None:
    schedule = _schedule(4)
    outcome = _outcome(forwards, 0)
    schedule.counted(outcome)
    first = next(step for step in range(20, 100) if schedule.to_cast(step) is not None)
    assert (first, outcome.idle) == ((32, True) if len(set(forwards)) == 1 else (24, False))


def test_the_backoff_is_reset_after_256_passes_with_votes() -> None:
    schedule = _schedule(4)
    schedule._early_losses = 3
    for passes, losses in ((255, 3), (256, 0)):
        schedule.counted(_outcome([passes] * 3, 0))
        assert schedule._early_losses == losses


VOTE = 3


def voter(*, committed: bool) -> tuple[Voter, list[tuple[int, bool]]]:
    """Return a voter whose register gives this verdict, and a list of the register's queries."""
    queries: list[tuple[int, bool]] = []

    def may_commit(vote: int, *, has_outcome: bool) -> bool:
        queries.append((vote, has_outcome))
        return committed

    link: Any = SimpleNamespace(begin=lambda *_: None)
    register: Any = SimpleNamespace(may_commit=may_commit)
    history: Any = SimpleNamespace(vote=lambda *_, **__: None)
    return Voter(link, AgentSettings(), register, history, VOTE - 1), queries


@pytest.mark.parametrize(
    ("progress", "abort", "committed", "result"),
    [
        (Progress.READY, False, True, VoteResult.COMMIT),
        (Progress.READY, False, False, VoteResult.ABORT),
        (Progress.READY, True, True, VoteResult.NOTHING),
        (Progress.TRANSFERRING, False, True, VoteResult.NOTHING),
    ],
)
def test_a_vote_without_an_outcome_is_settled_by_the_register(progress, abort, committed, result) -> None:
    """If a rank's own ballot rules out a commit, it does not ask its peers."""
    rank, queries = voter(committed=committed)
    rank.cast(Ballot(progress, PLAN, 1, abort, 20))
    assert rank.settle(21).result is result
    assert queries == ([] if result is VoteResult.NOTHING else [(VOTE, False)])


def test_a_rank_adopts_its_peers_highest_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INITIAL_BACKOFF_SECONDS", 0.0)
    store: dict[str, str] = {}
    ahead = {1: b"+5", 2: b"+9"}

    def ask(ranks: list[int], _question: bytes, _seconds: float) -> dict[int, bytes]:
        # Rank 1 moves to attempt 9 after this rank has published that number.
        attempt = store["attempt/0"]
        return {rank: b"+9" if attempt == "9" else ahead[rank] for rank in ranks}

    group_names: list[str] = []

    def refuse(name: str) -> None:
        group_names.append(name)
        raise OSError("no links in this test")

    group = SimpleNamespace(
        rank=0,
        peers=SimpleNamespace(others={1: None, 2: None}, ask=ask),
        store=SimpleNamespace(set=store.__setitem__),
        process_group=refuse,
    )
    state = SimpleNamespace(generation=0, lane=0, installed=SimpleNamespace(version_digest=0))
    reformation = Reformation(
        cast(Any, group), cast(Any, state), 0, attempts=0, early_losses=0, current_pass=lambda: 0
    )
    end = time.monotonic() + 60
    while not group_names and time.monotonic() < end:
        time.sleep(0.005)
    reformation.close()
    assert group_names[0] == "vote/9"


def test_mismatched_collectives_raise_an_error_on_both_ranks() -> None:
    """A host that survives an interrupt can cause a mismatch. Gloo does not abort, because all widths are equal."""
    groups = joined(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            VoteLink(group) for group in pool.map(lambda group: group.process_group("vote"), groups)
        )
        sent = [first.begin(Kind.BALLOT, 4, range(9)), second.begin(Kind.INSTALLED, 4, [1])]
        sent += [first.begin(Kind.BALLOT, 5, range(9)), second.begin(Kind.BALLOT, 6, range(9))]
        for reduction in sent:
            with pytest.raises(VoteError, match="the ranks are in different collectives or votes"):
                reduction.wait(20)
        assert [first.begin(Kind.BOUNDARY, 7, [3, -3]), second.begin(Kind.BOUNDARY, 7, [2, -2])][0].wait(
            20
        ) == [
            2,
            -3,
        ]


def test_a_stored_error_does_not_keep_its_link_open() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("connection closed by peer")

    class Work:
        wait = staticmethod(fail)
        is_completed = staticmethod(lambda: True)

    works = [Work()]
    work = weakref.ref(works[0])
    group: Any = SimpleNamespace(allreduce=lambda *_: works.pop())
    with pytest.raises(VoteError, match="installed 4: connection closed"):
        VoteLink(group).begin(Kind.INSTALLED, 4, [1]).wait(20)
    assert work() is None


def test_a_failure_reported_by_a_peer_ends_the_wait_for_installs() -> None:
    link: Any = SimpleNamespace(begin=lambda *_: SimpleNamespace(wait=lambda _: None))
    nothing: Any = None
    rank = Voter(link, AgentSettings(), nothing, nothing, has_failed=lambda: True)
    assert rank.all_have_installed(True) is False


def test_the_result_of_an_install_is_unknown_if_a_confirmation_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(voting, "_INSTALL_SECONDS", 0.05)
    link: Any = SimpleNamespace(begin=lambda *_: SimpleNamespace(wait=time.sleep))
    nothing: Any = None
    assert Voter(link, AgentSettings(), nothing, nothing).all_have_installed(True) is None


def test_a_vote_link_that_cannot_send_counts_as_closed() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    broken: Any = SimpleNamespace(allreduce=fail)
    assert VoteLink(broken).ended()


@pytest.mark.parametrize("peer_pass", [20, 21], ids=["same pass", "different passes"])
def test_a_commit_requires_all_ranks_to_confirm_the_same_pass(peer_pass: int) -> None:
    """All ranks confirm in time; only the comparison of their passes reveals the difference."""
    ballot = Ballot(Progress.READY, PLAN, 1, False, 18)
    answers = {Kind.BALLOT: ballot.encode(), Kind.BOUNDARY: [20, -peer_pass]}
    link: Any = SimpleNamespace(begin=lambda kind, *_: SimpleNamespace(wait=lambda _: answers[kind]))
    register: Any = SimpleNamespace(may_commit=lambda _, *, has_outcome: has_outcome)
    history: Any = SimpleNamespace(vote=lambda *_, **__: None)
    rank = Voter(link, AgentSettings(), register, history)
    rank.cast(ballot)
    outcome = rank.count(20, lambda: 20)
    assert outcome.result is (VoteResult.COMMIT if peer_pass == 20 else VoteResult.REALIGN)


def _reformed(low: int, vote: int) -> tuple[Reformation, int]:
    """Return a rank after the group has re-formed, and the forward pass of its first vote.

    ``low`` is the lowest layout digest on any rank, and ``vote`` is the highest vote number.
    """
    rank: Any = object.__new__(Reformation)
    rank.attempts = 1
    rank.generation = 3
    rank.lane = 2
    rank.vote = 5
    rank._version_digest = 7
    rank._astray = False
    rank._margin = 32
    rank._current_pass = lambda: 40
    answers = {Kind.SERVED: [low, -7, -4, -6, -vote, 39, -41, 0, -64], Kind.IN_TIME: [1]}
    link: Any = SimpleNamespace(begin=lambda kind, *_: SimpleNamespace(wait=lambda _: answers[kind]))
    return rank, rank._first_vote(link)


def test_reformed_votes_continue_from_the_highest_vote_number_on_any_rank() -> None:
    """If the numbers restarted, the register would return the verdicts of earlier votes."""
    rank, start = _reformed(7, 9)
    assert (rank.generation, rank.lane, rank.vote, start) == (4, 6, 9, 41 + 64)
    schedule = _schedule(4)
    schedule.voter = None
    rank.start = start
    rank._result = SimpleNamespace(ended=lambda: False)
    schedule._reformation = rank
    assert schedule.formed_again(start) is rank
    assert cast(Voter, schedule.voter).number == 9


def test_votes_are_not_reformed_if_layouts_differ() -> None:
    with pytest.raises(FatalSwitchError, match="the ranks serve different placements"):
        _reformed(6, 9)
