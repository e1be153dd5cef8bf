"""What one rank has heard of a vote holds for all; where none has, none commits; a rank that cannot know stops."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.swap.peered import joined
from worker_agent.swap.commit_register import FatalSwitchError

RANKS = 3


@pytest.mark.parametrize("first_has_outcome", [True, False])
def test_the_first_answer_holds_for_all_whatever_is_heard_later(first_has_outcome: bool) -> None:
    one, other, third = (group.register for group in joined(RANKS))
    assert one.may_commit(7, has_outcome=first_has_outcome) == first_has_outcome
    assert other.may_commit(7, has_outcome=not first_has_outcome) == first_has_outcome
    assert third.may_commit(7, has_outcome=first_has_outcome) == first_has_outcome


def test_a_rank_that_has_heard_asks_nobody() -> None:
    one, *others = joined(RANKS, patience=0.2)
    for group in others:
        group.peers.close()
    assert one.register.may_commit(3, has_outcome=True)


def test_a_rank_that_cannot_ask_must_not_serve_on() -> None:
    one, other, _ = joined(RANKS, patience=0.3)
    # There, and silent: its process is frozen.
    other.peers._secret = b"another secret"
    with pytest.raises(
        FatalSwitchError, match=r"vote 3 may have committed a layer, and ranks \[1\] did not answer"
    ):
        one.register.may_commit(3, has_outcome=False)


def test_a_rank_whose_datagrams_are_refused_while_its_process_lives_still_binds_the_others() -> None:
    """As behind a firewall that rejects: the kernel reports that nothing listens, yet the peer has committed."""
    one, other = joined(2, patience=0.5)
    with contextlib.suppress(OSError):
        other.peers._socket.shutdown(socket.SHUT_RDWR)
    other.peers._socket.close()
    assert other.register.may_commit(2, has_outcome=True)
    assert one.register.may_commit(2, has_outcome=False), "the answer comes over the link"
    other.peers._answer = lambda _: None
    with pytest.raises(FatalSwitchError, match=r"ranks \[1\] did not answer"):
        one.register.may_commit(3, has_outcome=False)
    other.peers.close()
    assert not one.register.may_commit(4, has_outcome=False), "now its link has ended too"


def test_ranks_that_ask_each_other_at_once_agree() -> None:
    for attempt in range(10):
        registers = [group.register for group in joined(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            asked = [
                pool.submit(registers[rank % RANKS].may_commit, 1, has_outcome=rank % RANKS == 0)
                for rank in range(attempt, attempt + RANKS)
            ]
        assert len({answer.result() for answer in asked}) == 1


def test_a_year_of_votes_is_kept_in_a_few() -> None:
    one, other = (group.register for group in joined(2))
    for vote in range(1, 2000):
        assert one.may_commit(vote, has_outcome=True)
    assert len(one._votes) <= 16
    assert other.may_commit(1999, has_outcome=False)
    assert one.answer(5) is None
