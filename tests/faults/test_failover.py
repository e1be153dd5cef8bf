"""Tests that a second service takes over when the first crashes or is upgraded, without losing a placement."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from eplb_core.wire.generated import agent_pb2, operator_pb2, operator_pb2_grpc
from eplb_service.control.core.leader import term_at
from tests.control.fake_group import FakeGroup, skewed_heat
from tests.e2e.service import Service, free_address

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

_FAILOVER_SECONDS = 60.0
"""Upper bound that leaves room for a slow machine; failover usually takes two seconds."""


def serving(folder: Path, name: str, address: str) -> Service:
    """Return a real service, leader or standby, that shares the directory's lease and store with other services."""
    (folder / name).mkdir()
    shared = ("--store", f"{folder}/store.sqlite3", "--lease", f"file:{folder}/lease")
    often = ["--decision-interval", "32", "--window-steps", "32", "--threads", "1", "--cpu-share", "100"]
    return Service(folder / name, *shared, *often, address=address)


def wait_for_standby(service: Service) -> None:
    deadline = time.monotonic() + _FAILOVER_SECONDS
    while "standing_by" not in service.log.read_text():
        assert time.monotonic() < deadline, service.log.read_text()
        time.sleep(0.05)


async def rejoined(group: FakeGroup) -> list[agent_pb2.Welcome]:
    """Have all ranks send a Hello with their layout, and retry until a service accepts it."""
    deadline = time.monotonic() + _FAILOVER_SECONDS
    while True:
        try:
            return await group.join()
        except (AssertionError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            assert time.monotonic() < deadline, "no service has become the leader"
            await group.leave()
            await asyncio.sleep(0.1)


async def check_placement(group: FakeGroup) -> None:
    """Wait for the ranks' last reports to arrive, then compare the placements."""
    ask = operator_pb2_grpc.OperatorServiceStub(group.channel).GetStatus
    status = None
    while not status or status.agents_connected < len(group.ranks) or status.epoch < group.live.epoch:
        await asyncio.sleep(0.05)
        status = (await ask(operator_pb2.GetStatusRequest(deployment="decode"))).status
    assert (status.epoch, status.digest) == (group.live.epoch, group.live.digest)


async def test_a_crash_and_an_upgrade_change_only_the_leader(tmp_path: Path) -> None:
    address = free_address()
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(serving(tmp_path, name, address)) for name in ("first", "second")
        )
        wait_for_standby(second)
        async with FakeGroup(address) as group:
            before = (await rejoined(group))[0].leader_term
            for _ in range(4):
                await group.send_heat(skewed_heat(8))
            await group.carry_out(await group.hear_plan())
            assert group.live.epoch > 0
            await check_placement(group)

            first.kill()
            after_crash = (await rejoined(group))[0].leader_term
            assert after_crash > before
            await check_placement(group)

            wait_for_standby(stack.enter_context(serving(tmp_path, "third", address)))
            assert second.ended() == 0
            after_upgrade = (await rejoined(group))[0].leader_term
            assert after_upgrade > after_crash
            await check_placement(group)
            # The new leader keeps deciding: plans offered after the failover are carried out.
            for number in range(4):
                await group.send_heat(skewed_heat(8, seed=50 + number)[:, :, ::-1].copy())
            epoch = group.live.epoch
            await group.carry_out(await group.hear_plan())
            assert group.live.epoch > epoch


async def test_a_service_whose_clock_is_behind_chooses_a_term_above_the_one_in_the_lease(
    tmp_path: Path,
) -> None:
    ahead = term_at(time.time() + 1e6, 0)
    (tmp_path / "lease").write_text(str(ahead))
    address = free_address()
    with serving(tmp_path, "only", address):
        async with FakeGroup(address) as group:
            assert (await rejoined(group))[0].leader_term > ahead
            assert int((tmp_path / "lease").read_text()) > ahead
