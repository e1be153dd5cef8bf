"""Whoever is no member of a formation gets no link to its ranks: not while they open theirs, and not after."""

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


def _takes(listening: socket.socket, source: str) -> bool:
    host, port = listening.getsockname()[:2]
    try:
        socket.create_connection((host, port), timeout=0.3, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


def _opened(groups: list[AgentGroup], name: str) -> list[dist.ProcessGroup]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.process_group(name, TIMEOUT), groups))


def _own_ports() -> set[int]:
    return {port for _, port in listening()}


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_filter_takes_the_hosts_it_names_and_this_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        _attach(opened, [_DROP])
        assert not _takes(opened, "127.0.0.1")
        _attach(opened, _filter_program(socket.AF_INET, ["10.0.0.7", "fe80::7%eth0", "10.0.0.8"]))
        assert _takes(opened, "127.0.0.1")
        assert _takes(opened, "127.8.9.10")
        # Without the clause for this host, hosts are taken by their whole address.
        for taken in ("127.0.0.2", "127.0.0.3"):
            program = _filter_program(socket.AF_INET, ["10.0.0.7", "127.0.0.2", "127.0.0.3"])[4:]
            _attach(opened, program)
            assert _takes(opened, taken)
        assert not _takes(opened, "127.0.0.4")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as opened:
        program = _filter_program(socket.AF_INET6, ["10.0.0.7", "fe80::7%eth0"])
        _attach(opened, program)
        assert _takes(opened, "::1")
        # Of its two hosts ::1 is the first.
        _attach(opened, program[len(program) // 2 :])
        assert not _takes(opened, "::1")


def test_after_links_are_open_nobody_gets_another_and_votes_go_on() -> None:
    groups = joined(3)
    # The ports of the presence links stay open to the group's hosts.
    before = _own_ports()
    opened = _opened(groups, "vote")
    ports = _own_ports() - before
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
    assert _descriptors() <= held + 3, "lanes that are given up leave no descriptors behind"


def test_a_stranger_that_takes_a_ranks_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = joined(2)
    links = []
    published = LinkGuard.published

    def robbed(guard: LinkGuard, value: bytes) -> None:
        """Before the other rank can, link to this one as every rank that it could wait for, and say something."""
        published(guard, value)
        named = [struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) for port in _own_ports()]
        (port,) = {struct.unpack("!H", address[2:])[0] for address in named if address in value}
        for sequence in range(8):
            link = socket.create_connection(("127.0.0.1", port), timeout=5)
            link.sendall(struct.pack("=q", sequence))
            links.append(link)

    monkeypatch.setattr(LinkGuard, "published", robbed)

    def attempt(group: AgentGroup) -> str:
        try:
            group.process_group("vote", timedelta(seconds=1))
        except RuntimeError as error:
            return str(error)
        return "opened"

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(attempt, groups))
    for link in links:
        link.close()
    assert "opened" not in said
    monkeypatch.setattr(LinkGuard, "published", published)
    assert len(_opened(groups, "vote/1")) == 2


def test_what_speaks_without_the_secret_is_none_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = joined(2)
    proof: Callable[[bytes], bytes] = other.peers.proof
    monkeypatch.setattr(other.peers, "proof", lambda claim: proof(claim + b"?"))

    def attempt(group: AgentGroup) -> Any:
        with pytest.raises(RuntimeError, match="is not a member") as refused:
            group.process_group("vote", TIMEOUT)
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(attempt, [one, other])) == [
            "a process that is not a member connected to rank 0 as rank 1",
            "a process that is not a member connected to rank 1 as rank 0",
        ]


def test_where_the_kernel_takes_no_filter_links_open_all_the_same(monkeypatch, caplog) -> None:
    monkeypatch.setattr("worker_agent.swap.link_guard._SO_ATTACH_FILTER", 9999)
    assert len(_opened(joined(2), "vote")) == 2
    assert (
        "gloo accepts connections from any host that reaches its ports: the kernel rejects the filter"
        in caplog.text
    )
