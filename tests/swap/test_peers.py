"""Only members of a formation ask and answer, and learn where each is and what each has in place."""

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


def test_what_one_rank_sets_the_others_read() -> None:
    one, other = joined(2)
    one.store.set("key", b"value")
    other.store.wait(["key"], timedelta(seconds=20))
    assert other.store.get("key") == b"value"
    assert other.store.check(["key"])
    assert not other.store.check(["no key"])
    assert one.peers.address[0] == "127.0.0.1", "bound to the address that it was given"
    with pytest.raises(TimeoutError, match="no rank has set no key within"):
        other.store.wait(["no key"], timedelta(seconds=0.1))


def test_a_stranger_gets_no_answer_and_changes_nothing() -> None:
    one, other = joined(2)
    one.store.set("key", b"value")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for size in (0, 1, 31, 48, 49, 1000, 60_000):
            stranger.sendto(os.urandom(size), one.peers.address)
        with pytest.raises(TimeoutError):
            stranger.recv(100)
    assert other.store.get("key") == b"value"
    forger = AgentGroup(Peers("127.0.0.1"), b"a guess", 1, [one.peers.address, other.peers.address], 1.0)
    assert forger.peers.ask([0], b"d7", 0.3) == {}
    # The guess has put nobody in doubt.
    assert one.register.may_commit(7, has_outcome=True)
    assert other.register.may_commit(7, has_outcome=True)


def test_opening_links_asks_each_peer_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, asked = 16, []
    ask_once = Peers._ask_once
    monkeypatch.setattr(Peers, "_ask_once", lambda *ask: asked.append(1) or ask_once(*ask))
    groups = joined(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        opened = list(pool.map(lambda group: group.process_group("vote"), groups))
    assert len(opened) == ranks
    assert len(asked) < 4 * ranks**2


def test_what_one_rank_announces_reaches_those_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_ANNOUNCE_SECONDS", 60.0)
    one, other, gone, third = joined(4)
    gone.peers.close()
    began = time.monotonic()
    one.fail("rank 0: no memory")
    assert time.monotonic() - began < 30, "nobody waits for the one that has ended"
    assert [group.failure for group in (one, other, third)] == ["rank 0: no memory"] * 3
    # Whoever has not heard it then learns it when it next asks.
    third.failure = None
    assert third.peers.ask([0], b"vkey", 20.0) == {0: b"!rank 0: no memory"}


def test_an_answer_to_an_earlier_question_is_no_answer() -> None:
    """A rank that asks again must not take what its peer said before, late or replayed, for the answer."""
    one, other = joined(2)
    seal = other.peers._seal
    stale = bytes(16) + b"c"
    other.peers._seal = lambda kind, body: seal(kind, stale if kind == b"a" else body)
    assert one.peers.ask([1], b"d3", 0.3) == {}
    other.peers._seal = seal
    assert one.peers.ask([1], b"d3", 20.0) == {1: b"d"}


def test_an_answer_that_takes_longer_than_the_next_attempt_counts() -> None:
    one, other = joined(2)
    answer = other.peers._answer
    other.peers._answer = lambda question: (time.sleep(0.2), answer(question))[1]
    assert one.peers.ask([1], b"d3", 20.0) == {1: b"d"}


def test_a_question_that_cannot_be_answered_is_reported_and_the_next_one_is() -> None:
    one, other = joined(2)
    answer = other.peers._answer

    def fail_once(_: bytes) -> bytes:
        other.peers._answer = answer
        raise MemoryError("no memory to answer")

    other.peers._answer = fail_once
    assert one.peers.ask([1], b"i0", 20.0) == {1: b"+"}
    assert other.peers.complaint == "a peer's question was not answered: MemoryError: no memory to answer"


def test_only_a_member_links_itself() -> None:
    one, other = (Peers("127.0.0.1") for _ in range(2))
    addresses = [one.address, other.address]
    one.open(b"secret", 0, addresses, lambda _: None)
    forge(one)
    other.open(b"secret", 1, addresses, lambda _: None)
    assert one.unlinked() == other.unlinked() == []
    forge(one)
    assert one.unlinked() == [], "the forger has not taken the member's place"
    assert not one._links.ended(1)
    other.close()
    wait_until(lambda: one._links.ended(1))


def forge(victim: Peers) -> None:
    """Call a rank as rank 1 without its secret; the call must be refused."""
    with socket.create_connection(victim.address, timeout=20) as forger:
        forger.sendall((1).to_bytes(4, "big") + bytes(16))
        assert len(forger.recv(48, socket.MSG_WAITALL)) == 48
        forger.sendall(bytes(32))
        assert forger.recv(1) == b"", "its proof was refused"


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_silent_strangers_hold_up_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_MAX_HANDSHAKES", 4)
    one, other = (Peers("127.0.0.1") for _ in range(2))
    addresses = [one.address, other.address]
    one.open(b"secret", 0, addresses, lambda _: None)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(socket.create_connection(one.address, timeout=20))
        began = time.monotonic()
        other.open(b"secret", 1, addresses, lambda _: None)
        assert one.unlinked() == other.unlinked() == []
        assert time.monotonic() - began < 4
        assert len(one._links._handshakes) <= 5


def end_links(*groups: AgentGroup) -> None:
    """End the links in order, as a proxy does that finds them idle."""
    for group in groups:
        for link in tuple(group.peers._links._links.values()):
            link.socket.shutdown(socket.SHUT_RDWR)


def test_links_that_end_while_their_processes_live_are_reported_and_opened_again() -> None:
    one, other = joined(2)
    assert (one.peers.complaint, other.peers.complaint) == (None, None)
    before = one.peers._links._links[1]
    end_links(one)
    wait_until(lambda: one.peers._links._links.get(1) not in (None, before))
    assert one.peers.unlinked() == other.peers.unlinked() == []
    wait_until(lambda: "the link to rank 1 has ended and was opened again" in (one.peers.complaint or ""))
    assert "the link to rank 0 has ended" in (other.peers.complaint or "")


def test_a_link_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_HEARTBEAT_SECONDS", 0.05)
    one, other = joined(2)
    heard = []
    receive = presence.PresenceLinks._read
    monkeypatch.setattr(
        presence.PresenceLinks,
        "_read",
        lambda links, link: (receive(links, link), heard.append(bytes(link.inbox))),
    )
    wait_until(lambda: heard.count(bytes(4)) >= 4)
    assert (one.peers.complaint, other.peers.complaint) == (None, None)


def reject_datagrams(*groups: AgentGroup) -> None:
    """Reject them as a firewall does."""

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


def test_a_vote_is_settled_over_the_links_if_datagrams_are_lost_for_good() -> None:
    one, other, _ = joined(3, patience=600.0)
    reject_datagrams(one)
    began = time.monotonic()
    assert not one.register.may_commit(7, has_outcome=False)
    assert other.register.answer(7) is not None
    one.store.set("attempt/0", "1")
    other.store.set("attempt/1", "1")
    assert one.peers.ask([1], b"t1", 5.0) == {1: b"+1"}
    one.fail("no memory")
    wait_until(lambda: other.failure == "no memory")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "missing", ["the rejected datagram", "the end of the link", "the end of the vote link"]
)
def test_a_peer_is_gone_only_if_its_datagrams_its_link_and_the_votes_have_ended(missing: str) -> None:
    """Each of the three can happen to a peer that lives."""
    one, other = joined(2)
    one.peers.vote_link_ended = lambda: missing != "the end of the vote link"
    if missing != "the rejected datagram":
        reject_datagrams(one)
    other.peers._answer = lambda _: None
    if missing != "the end of the link":
        one.peers._links.ended = lambda _: True
    assert one.peers.ask([1], b"d3", 0.2) == {}
    reject_datagrams(one)
    one.peers._links.ended = lambda _: True
    one.peers.vote_link_ended = lambda: True
    with pytest.raises(PeerGoneError):
        one.peers.ask([1], b"d3", 5.0)


def test_a_store_is_bounded() -> None:
    (group,) = joined(1)
    for number in range(5000):
        group.store.set(f"key {number}", b"value")
    assert len(group.store._values) <= 4096
    assert group.store.get("key 4999") == b"value"


def test_an_address_that_no_other_host_reaches_is_refused() -> None:
    with pytest.raises(OSError, match="set data_host to an address"):
        _reachable("localhost")
    assert _reachable("192.0.2.7") == "192.0.2.7"


def test_an_install_that_takes_others_a_while_is_waited_for() -> None:
    one, two, three = joined(3, patience=60.0)
    two.installed_vote = 4
    late = threading.Timer(0.3, setattr, (three, "installed_vote", 4))
    late.start()
    one.wait_for_installs(4)
    assert three.installed_vote == 4
    late.join()


def test_an_install_that_never_comes_is_fatal_and_names_the_rank() -> None:
    one, two, _ = joined(3, patience=0.2)
    two.installed_vote = 4
    with pytest.raises(FatalSwitchError, match=r"ranks \[2\] have not installed within 0.2 s"):
        one.wait_for_installs(4)


def test_an_attempt_that_came_before_the_present_votes_makes_nobody_leave_them() -> None:
    """A datagram may be delivered again seconds later; whoever has captured one must not stop balancing with it."""
    one, other = joined(2)
    other.formed_attempt = 3
    for stale in (b"t0", b"t2", b"t3"):
        assert one.peers.ask([1], stale, 20.0) == {1: b"-"}
    assert not other.peer_left
    other.store.set("attempt/1", "5")
    assert one.peers.ask([1], b"t4", 20.0) == {1: b"+5"}
    assert other.peer_left
