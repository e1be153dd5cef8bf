"""The commit register: all ranks agree on a vote's verdict, and a rank that cannot learn it stops."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.swap.peered import joined
from worker_agent.swap.commit_register import FatalSwitchError

RANKS = 3


@pytest.mark.parametrize("first_has_outcome", [True, False])
def test_the_first_answer_binds_all_ranks(first_has_outcome: bool) -> None:
    first, second, third = (group.register for group in joined(RANKS))
    assert first.may_commit(7, has_outcome=first_has_outcome) == first_has_outcome
    assert second.may_commit(7, has_outcome=not first_has_outcome) == first_has_outcome
    assert third.may_commit(7, has_outcome=first_has_outcome) == first_has_outcome


def test_a_rank_with_the_outcome_does_not_ask_its_peers() -> None:
    group, *peers = joined(RANKS, patience=0.2)
    for peer in peers:
        peer.peers.close()
    assert group.register.may_commit(3, has_outcome=True)


def test_a_rank_whose_peer_does_not_answer_stops_serving() -> None:
    asker, peer, _ = joined(RANKS, patience=0.3)
    # The peer keeps its link open but does not answer, like a frozen process.
    peer.peers._secret = b"another secret"
    with pytest.raises(
        FatalSwitchError, match=r"vote 3 may have committed a layer, and ranks \[1\] did not answer"
    ):
        asker.register.may_commit(3, has_outcome=False)


def test_a_live_peer_that_rejects_datagrams_still_decides_the_vote() -> None:
    """A firewall that rejects datagrams looks like a closed socket, although the peer has committed."""
    asker, peer = joined(2, patience=0.5)
    with contextlib.suppress(OSError):
        peer.peers._socket.shutdown(socket.SHUT_RDWR)
    peer.peers._socket.close()
    assert peer.register.may_commit(2, has_outcome=True)
    assert asker.register.may_commit(2, has_outcome=False), "the answer did not arrive over the link"
    peer.peers._answer = lambda _: None
    with pytest.raises(FatalSwitchError, match=r"ranks \[1\] did not answer"):
        asker.register.may_commit(3, has_outcome=False)
    peer.peers.close()
    assert not asker.register.may_commit(4, has_outcome=False), (
        "a peer whose link has also ended counts as alive"
    )


def test_ranks_that_ask_each_other_simultaneously_agree() -> None:
    for attempt in range(10):
        registers = [group.register for group in joined(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            answers = [
                pool.submit(registers[rank % RANKS].may_commit, 1, has_outcome=rank % RANKS == 0)
                for rank in range(attempt, attempt + RANKS)
            ]
        assert len({answer.result() for answer in answers}) == 1


def test_the_register_keeps_only_recent_votes() -> None:
    first, second = (group.register for group in joined(2))
    for vote in range(1, 2000):
        assert first.may_commit(vote, has_outcome=True)
    assert len(first._votes) <= 16
    assert second.may_commit(1999, has_outcome=False)
    assert first.answer(5) is None
