"""The link guard: only members of a group can connect to its ranks, while their links open and afterwards."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.listening import listening
from tests.swap.peered import joined
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.link_guard import _DROP, LinkGuard, _attach, _filter_program

TIMEOUT = timedelta(seconds=20)


def _accepts(listening: socket.socket, source: str) -> bool:
    host, port = listening.getsockname()[:2]
    try:
        socket.create_connection((host, port), timeout=0.3, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


def _opened(groups: list[AgentGroup], name: str) -> list[dist.ProcessGroup]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.process_group(name, TIMEOUT), groups))


def _listening_ports() -> set[int]:
    return {port for _, port in listening()}


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_filter_accepts_its_hosts_and_loopback_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        _attach(opened, [_DROP])
        assert not _accepts(opened, "127.0.0.1")
        _attach(opened, _filter_program(socket.AF_INET, ["10.0.0.7", "fe80::7%eth0", "10.0.0.8"]))
        assert _accepts(opened, "127.0.0.1")
        assert _accepts(opened, "127.8.9.10")
        # This program has no clause for loopback addresses, so it compares whole addresses.
        for source in ("127.0.0.2", "127.0.0.3"):
            program = _filter_program(socket.AF_INET, ["10.0.0.7", "127.0.0.2", "127.0.0.3"])[4:]
            _attach(opened, program)
            assert _accepts(opened, source)
        assert not _accepts(opened, "127.0.0.4")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as opened:
        program = _filter_program(socket.AF_INET6, ["10.0.0.7", "fe80::7%eth0"])
        _attach(opened, program)
        assert _accepts(opened, "::1")
        # The first half of the program accepts ::1. If it is removed, that address is rejected.
        _attach(opened, program[len(program) // 2 :])
        assert not _accepts(opened, "::1")


def test_ports_reject_connections_after_the_links_are_open_and_votes_continue() -> None:
    groups = joined(3)
    # The presence links' ports stay open to the group's hosts and are not counted.
    before = _listening_ports()
    opened = _opened(groups, "vote")
    ports = _listening_ports() - before
    assert len(ports) == 3
    held = _descriptors()
    for port in ports:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.1)
    assert _descriptors() == held
    ballots = [torch.tensor([rank + 5, -rank]) for rank in range(3)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    works = [group.allreduce([ballot], options) for group, ballot in zip(opened, ballots, strict=True)]
    for work in works:
        work.wait(TIMEOUT)
    assert [ballot.tolist() for ballot in ballots] == [[5, -2]] * 3
    for number in range(5):
        _opened(groups, f"lane/{number}")
    assert _descriptors() <= held + 3, "abandoned lanes have left descriptors behind"


def test_a_stranger_that_connects_in_place_of_a_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = joined(2)
    links = []
    published = LinkGuard.published

    def publish_and_connect(guard: LinkGuard, value: bytes) -> None:
        """Connect under every possible sequence number before the real peer can."""
        published(guard, value)
        addresses = [
            struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) for port in _listening_ports()
        ]
        (port,) = {struct.unpack("!H", address[2:])[0] for address in addresses if address in value}
        for sequence in range(8):
            link = socket.create_connection(("127.0.0.1", port), timeout=5)
            link.sendall(struct.pack("=q", sequence))
            links.append(link)

    monkeypatch.setattr(LinkGuard, "published", publish_and_connect)

    def attempt(group: AgentGroup) -> str:
        try:
            group.process_group("vote", timedelta(seconds=1))
        except RuntimeError as error:
            return str(error)
        return "opened"

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(attempt, groups))
    for link in links:
        link.close()
    assert "opened" not in outcomes
    monkeypatch.setattr(LinkGuard, "published", published)
    assert len(_opened(groups, "vote/1")) == 2


def test_a_process_without_the_secret_is_not_accepted_as_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = joined(2)
    proof: Callable[[bytes], bytes] = second.peers.proof
    monkeypatch.setattr(second.peers, "proof", lambda claim: proof(claim + b"?"))

    def attempt(group: AgentGroup) -> Any:
        with pytest.raises(RuntimeError, match="outside the group") as refused:
            group.process_group("vote", TIMEOUT)
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(attempt, [first, second])) == [
            "a process outside the group connected to rank 0, claiming to be rank 1",
            "a process outside the group connected to rank 1, claiming to be rank 0",
        ]


def test_links_open_with_a_warning_if_the_kernel_rejects_the_filter(monkeypatch, caplog) -> None:
    monkeypatch.setattr("worker_agent.swap.link_guard._SO_ATTACH_FILTER", 9999)
    assert len(_opened(joined(2), "vote")) == 2
    assert (
        "gloo accepts connections from any host that reaches its ports: the kernel rejected the filter"
        in caplog.text
    )
