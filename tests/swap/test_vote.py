"""A vote that this rank has not heard counts as what the ranks settle on, and only where it could commit a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker_agent.swap.ballot import Ballot, Progress, VoteResult
from worker_agent.swap.vote import Voter

PLAN, VOTE = 7, 3


def voter(*, committed: bool) -> tuple[Voter, list[tuple[int, bool]]]:
    """A voter whose ranks settle on this verdict, and what it asks them: vote, and whether it has heard it."""
    asked: list[tuple[int, bool]] = []

    def may_commit(vote: int, *, heard: bool) -> bool:
        asked.append((vote, heard))
        return committed

    box = SimpleNamespace(number=VOTE, launch=lambda _ballot: None)
    history = SimpleNamespace(vote=lambda *_, **__: None)
    return Voter(cast(Any, box), cast(Any, SimpleNamespace(may_commit=may_commit)), cast(Any, history)), asked


@pytest.mark.parametrize(
    ("committed", "result"), [(True, VoteResult.COMMIT), (False, VoteResult.ABORT)], ids=["committed", "not"]
)
def test_what_was_not_heard_is_what_the_ranks_settle_on(committed: bool, result: VoteResult) -> None:
    rank, asked = voter(committed=committed)
    rank.cast(Ballot(Progress.READY, PLAN, 1, False, 20))
    assert rank.settle(21).result is result
    assert asked == [(VOTE, False)]


@pytest.mark.parametrize(
    "ballot",
    [Ballot(Progress.TRANSFERRING, PLAN, 1, False, 20), Ballot(Progress.READY, PLAN, 1, True, 20)],
    ids=["not ready", "wants to abort"],
)
def test_a_ballot_that_could_not_commit_asks_nobody(ballot: Ballot) -> None:
    rank, asked = voter(committed=True)
    rank.cast(ballot)
    assert rank.settle(21).result is VoteResult.NOTHING
    assert asked == []
