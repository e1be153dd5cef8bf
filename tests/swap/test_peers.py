"""Messages between peers: only group members can ask, answer and open links, and peers read each other's keys."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.swap.peered import joined
from worker_agent.runtime import Runtime
from worker_agent.swap import group as group_module
from worker_agent.swap import presence
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup, _reachable
from worker_agent.swap.peers import PeerGoneError, Peers


def test_a_key_that_one_rank_sets_can_be_read_by_its_peers() -> None:
    first, second = joined(2)
    first.store.set("key", b"value")
    second.store.wait(["key"], timedelta(seconds=20))
    assert second.store.get("key") == b"value"
    assert second.store.check(["key"])
    assert not second.store.check(["absent"])
    assert first.peers.address[0] == "127.0.0.1", "not bound to the configured address"
    with pytest.raises(TimeoutError, match="no rank set 'absent' within"):
        second.store.wait(["absent"], timedelta(seconds=0.1))


def test_a_stranger_gets_no_answer_and_changes_nothing() -> None:
    first, second = joined(2)
    first.store.set("key", b"value")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for size in (0, 1, 31, 48, 49, 1000, 60_000):
            stranger.sendto(os.urandom(size), first.peers.address)
        with pytest.raises(TimeoutError):
            stranger.recv(100)
    assert second.store.get("key") == b"value"
    forger = AgentGroup(Peers("127.0.0.1"), b"a guess", 1, [first.peers.address, second.peers.address], 1.0)
    assert forger.peers.ask([0], b"d7", 0.3) == {}
    # The forged question has not put any rank in doubt.
    assert first.register.may_commit(7, has_outcome=True)
    assert second.register.may_commit(7, has_outcome=True)


def test_a_rank_asks_each_peer_fewer_than_four_times_while_opening_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = 16
    attempts = []
    ask_once = Peers._ask_once
    monkeypatch.setattr(Peers, "_ask_once", lambda *arguments: attempts.append(1) or ask_once(*arguments))
    groups = joined(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        opened = list(pool.map(lambda group: group.process_group("vote"), groups))
    assert len(opened) == ranks
    assert len(attempts) < 4 * ranks**2


def test_a_failure_is_announced_to_all_live_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_ANNOUNCE_SECONDS", 60.0)
    first, second, gone, third = joined(4)
    gone.peers.close()
    began = time.monotonic()
    first.fail("rank 0: no memory")
    assert time.monotonic() - began < 30, "a rank waited for the closed rank"
    assert [group.failure for group in (first, second, third)] == ["rank 0: no memory"] * 3
    # A rank that misses the announcement learns of the failure when it next asks.
    third.failure = None
    assert third.peers.ask([0], b"vkey", 20.0) == {0: b"!rank 0: no memory"}


def test_an_answer_to_an_earlier_question_is_ignored() -> None:
    """A rank that retries must not accept a late or replayed answer to an earlier question."""
    first, second = joined(2)
    seal = second.peers._seal
    stale = bytes(16) + b"c"
    second.peers._seal = lambda kind, body: seal(kind, stale if kind == b"a" else body)
    assert first.peers.ask([1], b"d3", 0.3) == {}
    second.peers._seal = seal
    assert first.peers.ask([1], b"d3", 20.0) == {1: b"d"}


def test_an_answer_that_arrives_after_a_retry_is_accepted() -> None:
    first, second = joined(2)
    answer = second.peers._answer
    second.peers._answer = lambda question: (time.sleep(0.2), answer(question))[1]
    assert first.peers.ask([1], b"d3", 20.0) == {1: b"d"}


def test_a_failure_to_answer_is_reported_and_the_retry_is_answered() -> None:
    first, second = joined(2)
    answer = second.peers._answer

    def fail_once(_: bytes) -> bytes:
        second.peers._answer = answer
        raise MemoryError("out of memory")

    second.peers._answer = fail_once
    assert first.peers.ask([1], b"i0", 20.0) == {1: b"+"}
    assert second.peers.complaint == "failed to answer a peer: MemoryError: out of memory"


def test_only_members_can_open_links() -> None:
    first, second = (Peers("127.0.0.1") for _ in range(2))
    addresses = [first.address, second.address]
    first.open(b"secret", 0, addresses, lambda _: None)
    forge(first)
    second.open(b"secret", 1, addresses, lambda _: None)
    assert first.unlinked() == second.unlinked() == []
    forge(first)
    assert first.unlinked() == [], "the forger has replaced the member"
    assert not first._links.ended(1)
    second.close()
    wait_until(lambda: first._links.ended(1))


def forge(victim: Peers) -> None:
    """Connect to a rank as rank 1 without the secret; the connection must be rejected."""
    with socket.create_connection(victim.address, timeout=20) as forger:
        forger.sendall((1).to_bytes(4, "big") + bytes(16))
        assert len(forger.recv(48, socket.MSG_WAITALL)) == 48
        forger.sendall(bytes(32))
        assert forger.recv(1) == b"", "the forger's proof was accepted"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait up to 20 seconds for the condition."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_silent_strangers_do_not_delay_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_MAX_HANDSHAKES", 4)
    first, second = (Peers("127.0.0.1") for _ in range(2))
    addresses = [first.address, second.address]
    first.open(b"secret", 0, addresses, lambda _: None)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(socket.create_connection(first.address, timeout=20))
        began = time.monotonic()
        second.open(b"secret", 1, addresses, lambda _: None)
        assert first.unlinked() == second.unlinked() == []
        assert time.monotonic() - began < 4
        assert len(first._links._handshakes) <= 5


def end_links(*groups: AgentGroup) -> None:
    """Shut down the groups' links, as a proxy does with idle connections."""
    for group in groups:
        for link in tuple(group.peers._links._links.values()):
            link.socket.shutdown(socket.SHUT_RDWR)


def test_broken_links_between_live_ranks_are_reported_and_reopened() -> None:
    first, second = joined(2)
    assert (first.peers.complaint, second.peers.complaint) == (None, None)
    before = first.peers._links._links[1]
    end_links(first)
    wait_until(lambda: first.peers._links._links.get(1) not in (None, before))
    assert first.peers.unlinked() == second.peers.unlinked() == []
    wait_until(lambda: "the link to rank 1 was lost and has been reopened" in (first.peers.complaint or ""))
    assert "the link to rank 0 was lost" in (second.peers.complaint or "")


def test_links_send_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_HEARTBEAT_SECONDS", 0.05)
    first, second = joined(2)
    received = []
    receive = presence.PresenceLinks._read
    monkeypatch.setattr(
        presence.PresenceLinks,
        "_read",
        lambda links, link: (receive(links, link), received.append(bytes(link.inbox))),
    )
    wait_until(lambda: received.count(bytes(4)) >= 4)
    assert (first.peers.complaint, second.peers.complaint) == (None, None)


def reject_datagrams(*groups: AgentGroup) -> None:
    """Make the groups' datagrams fail, as if a firewall rejected them."""

    class Rejected:
        def __init__(self, family: int) -> None:
            self.settimeout = lambda _: None

        def __enter__(self) -> Rejected:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def connect(self, address: Any) -> None:
            self.getpeername = lambda: address

        def send(self, _: bytes) -> None:
            raise ConnectionRefusedError("rejected")

    class Firewalled(Runtime):
        def datagrams(self, family: int) -> Any:
            return Rejected(family)

    for group in groups:
        group.peers.runtime = Firewalled()


def test_a_vote_is_settled_over_the_links_if_no_datagrams_arrive() -> None:
    first, second, _ = joined(3, patience=600.0)
    reject_datagrams(first)
    began = time.monotonic()
    assert not first.register.may_commit(7, has_outcome=False)
    assert second.register.answer(7) is not None
    first.store.set("attempt/0", "1")
    second.store.set("attempt/1", "1")
    assert first.peers.ask([1], b"t1", 5.0) == {1: b"+1"}
    first.fail("no memory")
    wait_until(lambda: second.failure == "no memory")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "missing", ["the rejected datagram", "the end of the link", "the end of the vote link"]
)
def test_a_peer_is_gone_only_if_datagrams_are_rejected_and_both_its_link_and_the_vote_link_have_ended(
    missing: str,
) -> None:
    """Each of these three signs can also occur while the peer is alive."""
    first, second = joined(2)
    first.peers.vote_link_ended = lambda: missing != "the end of the vote link"
    if missing != "the rejected datagram":
        reject_datagrams(first)
    second.peers._answer = lambda _: None
    if missing != "the end of the link":
        first.peers._links.ended = lambda _: True
    assert first.peers.ask([1], b"d3", 0.2) == {}
    reject_datagrams(first)
    first.peers._links.ended = lambda _: True
    first.peers.vote_link_ended = lambda: True
    with pytest.raises(PeerGoneError):
        first.peers.ask([1], b"d3", 5.0)


def test_the_store_is_bounded() -> None:
    (group,) = joined(1)
    for number in range(5000):
        group.store.set(f"key {number}", b"value")
    assert len(group.store._values) <= 4096
    assert group.store.get("key 4999") == b"value"


def test_an_address_that_other_hosts_cannot_reach_is_rejected() -> None:
    with pytest.raises(OSError, match="set data_host to an address"):
        _reachable("localhost")
    assert _reachable("192.0.2.7") == "192.0.2.7"


def test_a_rank_waits_for_a_slow_install_on_its_peers() -> None:
    first, second, third = joined(3, patience=60.0)
    second.installed_vote = 4
    late = threading.Timer(0.3, setattr, (third, "installed_vote", 4))
    late.start()
    first.wait_for_installs(4)
    assert third.installed_vote == 4
    late.join()


def test_an_install_that_times_out_is_fatal_and_the_error_names_the_rank() -> None:
    first, second, _ = joined(3, patience=0.2)
    second.installed_vote = 4
    with pytest.raises(FatalSwitchError, match=r"ranks \[2\] did not install within 0.2 s"):
        first.wait_for_installs(4)


def test_a_committed_rank_stops_if_a_peer_seems_gone_before_confirming_its_install() -> None:
    """The peer may not have exited: after a network fault, it may still use the old placement."""
    first, second = joined(2, patience=0.4)
    second.peers.close()
    with pytest.raises(FatalSwitchError, match="rank 1 has exited or cannot be reached, and did not confirm"):
        first.wait_for_installs(4)


@pytest.mark.parametrize("committed", [True, False])
def test_a_peer_that_is_unreachable_for_a_moment_still_decides_the_vote(committed: bool) -> None:
    first, second = joined(2, patience=20.0)
    ended = first.peers._links.ended
    first.peers._links.ended = lambda _: True
    reject_datagrams(first)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(first.register.may_commit, 7, has_outcome=False)
        time.sleep(0.3)
        assert not settled.done(), "the rank did not wait for its peer"
        assert second.register.may_commit(7, has_outcome=committed) == committed
        first.peers._links.ended = ended
        assert settled.result() == committed


def test_both_ranks_stop_if_one_committed_a_vote_that_the_other_aborted() -> None:
    first, second = joined(2)
    assert second.register.may_commit(4, has_outcome=False) is False
    first.register._votes.clear()
    first.installed_vote = 4
    with pytest.raises(FatalSwitchError, match="rank 1 aborted vote 4, which another rank committed"):
        first.wait_for_installs(4)
    assert second.failure is not None


@pytest.mark.parametrize("vote", [4, 5])
def test_a_closing_rank_tells_its_peers_which_vote_it_installed_last(vote: int) -> None:
    first, second, third = joined(3, patience=600.0)
    second.installed_vote = 4
    second.close()
    second.peers.close()
    began = time.monotonic()
    third.installed_vote = vote
    if vote == 4:
        assert first.register.may_commit(vote, has_outcome=False)
        first.wait_for_installs(vote)
    else:
        assert not first.register.may_commit(vote, has_outcome=False)
        with pytest.raises(
            FatalSwitchError, match="rank 1 closed its agent without installing the layers of vote 5"
        ):
            third.wait_for_installs(vote)
    assert time.monotonic() - began < 20, "a rank waited for the closed rank"


def test_a_stale_attempt_does_not_make_a_peer_stop_voting() -> None:
    """Datagrams may be delivered again seconds later, so a replayed one must not stop balancing."""
    first, second = joined(2)
    second.formed_attempt = 3
    for stale in (b"t0", b"t2", b"t3"):
        assert first.peers.ask([1], stale, 20.0) == {1: b"-"}
    assert not second.peer_left
    second.store.set("attempt/1", "5")
    assert first.peers.ask([1], b"t4", 20.0) == {1: b"+5"}
    assert second.peer_left
