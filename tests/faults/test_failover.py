"""Of two services one leads; when it crashes or is stopped for an upgrade the other does, and no placement is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from eplb_service.control.core.leader import term_at
from eplb_service.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from tests.control.fake_group import FakeGroup, skewed_heat
from tests.e2e.service import free_address

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

_LONG = 300.0
_FAILOVER_SECONDS = 60.0
"""Bound for a machine many times slower than one that takes two."""


@contextmanager
def serving(folder: Path, name: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real service, leading or standing by, that shares the folder's lease and store with others."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "eplb_service.cli.main", "serve", "--listen", address]
    command += [
        "--metrics",
        "127.0.0.1:0",
        "--store",
        f"{folder}/store.sqlite3",
        "--lease",
        f"file:{folder}/lease",
    ]
    command += ["--decision-interval", "32", "--window-steps", "32", "--threads", "1"]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + _LONG
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


async def rejoined(group: FakeGroup) -> list[agent_pb2.Welcome]:
    """All ranks say Hello with what they serve, as often as it takes."""
    deadline = time.monotonic() + _FAILOVER_SECONDS
    while True:
        try:
            return await group.join()
        except (AssertionError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            assert time.monotonic() < deadline, "no service leads"
            await group.leave()
            await asyncio.sleep(0.1)


async def check_placement(group: FakeGroup) -> None:
    operator = operator_pb2_grpc.OperatorServiceStub(group.channel)
    deadline = time.monotonic() + _FAILOVER_SECONDS
    request = operator_pb2.GetStatusRequest(deployment="decode")
    while (await operator.GetStatus(request)).status.agents_connected < len(group.ranks):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    status = (await operator.GetStatus(request)).status
    assert (status.epoch, status.digest) == (group.live.epoch, group.live.digest)


async def test_a_crash_and_an_upgrade_change_who_leads_and_nothing_else(tmp_path: Path) -> None:
    address = free_address()
    with ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path, "first", address))
        wait_for(tmp_path / "first.log", '"listening"')
        second = stack.enter_context(serving(tmp_path, "second", address))
        wait_for(tmp_path / "second.log", "standing_by")
        async with FakeGroup(address) as group:
            before = (await rejoined(group))[0].leader_term
            for _ in range(4):
                await group.send_heat(skewed_heat(8))
            await group.carry_out(await group.hear_plan())
            assert group.live.epoch > 0
            await check_placement(group)

            first.kill()
            crashed = time.monotonic()
            after_crash = (await rejoined(group))[0].leader_term
            print(f"all ranks were welcomed {time.monotonic() - crashed:.2f} s after the crash")
            assert after_crash > before
            await check_placement(group)

            third = stack.enter_context(serving(tmp_path, "third", address))
            wait_for(tmp_path / "third.log", "standing_by")
            second.send_signal(signal.SIGTERM)
            stopped = time.monotonic()
            after_upgrade = (await rejoined(group))[0].leader_term
            print(f"all ranks were welcomed {time.monotonic() - stopped:.2f} s after the upgrade began")
            assert after_upgrade > after_crash
            assert second.wait(_LONG) == 0
            await check_placement(group)
            # It decides as ever: the plan after the change of leaders is carried out.
            for number in range(4):
                await group.send_heat(skewed_heat(8, seed=50 + number)[:, :, ::-1].copy())
            epoch = group.live.epoch
            await group.carry_out(await group.hear_plan())
            assert group.live.epoch > epoch
            assert third.poll() is None


async def test_a_clock_that_is_behind_does_not_undo_a_change_of_leaders(tmp_path: Path) -> None:
    ahead = term_at(time.time() + 1e6, 0)
    (tmp_path / "lease").write_text(str(ahead))
    address = free_address()
    with serving(tmp_path, "only", address):
        wait_for(tmp_path / "only.log", '"listening"')
        async with FakeGroup(address) as group:
            assert (await rejoined(group))[0].leader_term > ahead
            assert int((tmp_path / "lease").read_text()) > ahead
