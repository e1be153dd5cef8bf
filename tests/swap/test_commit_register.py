"""What one rank has heard of a vote holds for all; where none has, none commits; a rank that cannot know stops."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from tests.swap.peered import joined
from worker_agent.swap.commit_register import CommitRegister, FatalSwitchError, Settlement, Verdict

RANKS = 3


def test_a_rank_that_has_not_heard_follows_one_that_has() -> None:
    one, other, third = (group.register for group in joined(RANKS))
    assert one.may_commit(7, heard=True)
    assert other.may_commit(7, heard=False)
    assert third.may_commit(7, heard=True)


def test_where_none_has_heard_none_commits_whatever_is_heard_later() -> None:
    one, other, third = (group.register for group in joined(RANKS))
    assert not one.may_commit(7, heard=False)
    assert not other.may_commit(7, heard=True)
    assert not third.may_commit(7, heard=False)


def test_a_rank_that_has_heard_asks_nobody() -> None:
    one, *others = joined(RANKS, patience=0.2)
    for group in others:
        group.peers.close()
    assert one.register.may_commit(3, heard=True)


def test_a_rank_that_cannot_ask_must_not_serve_on() -> None:
    one, other, _ = joined(RANKS, patience=0.3)
    # There, and silent: its process is frozen.
    other.peers.open(b"another secret", 1, [one.peers.address] * RANKS)
    with pytest.raises(
        FatalSwitchError, match=r"vote 3 may have committed a layer, and rank 1 did not answer"
    ):
        one.register.may_commit(3, heard=False)


def test_a_rank_whose_process_has_ended_binds_nobody() -> None:
    one, other, third = joined(RANKS, patience=60)
    other.peers.close()
    began = time.monotonic()
    assert not one.register.may_commit(3, heard=False)
    assert not third.register.may_commit(3, heard=True)
    assert time.monotonic() - began < 30


def test_ranks_that_ask_each_other_at_once_agree() -> None:
    for attempt in range(10):
        registers = [group.register for group in joined(RANKS)]
        seen: dict[int, bool] = {}

        def ask(rank: int, register: CommitRegister, seen: dict[int, bool] = seen) -> None:
            seen[rank] = register.may_commit(1, heard=rank == 0)

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(registers)]
        for thread in threads[attempt % RANKS :] + threads[: attempt % RANKS]:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(seen.values())) == 1


def test_a_year_of_votes_is_kept_in_a_few() -> None:
    one, other = (group.register for group in joined(2))
    for vote in range(1, 2000):
        assert one.may_commit(vote, heard=True)
    assert len(one._votes) <= 16
    assert other.may_commit(1999, heard=False)
    assert one.answer(5) is None


def test_a_settled_vote_stays_as_it_is() -> None:
    peers = frozenset({1, 2})
    events = [
        lambda s: s.heard(),
        lambda s: s.doubted(),
        lambda s: s.answered(1, Verdict.IN_DOUBT),
        lambda s: s.answered(2, Verdict.IN_DOUBT),
        lambda s: s.answered(2, Verdict.COMMITTED),
    ]
    for story in itertools.product(events, repeat=4):
        settlement = Settlement(peers)
        for event in story:
            before, settlement = settlement, event(settlement)
            if before.verdict in (Verdict.COMMITTED, Verdict.ABORTED):
                assert settlement.verdict is before.verdict
