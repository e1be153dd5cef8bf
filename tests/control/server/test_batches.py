"""Reports that come seldom are let in together, in order and a few at a time; those that come often never wait."""

from __future__ import annotations

import asyncio

import pytest

from eplb_service.control.server.agents import agent_stream
from eplb_service.control.server.agents.batches import Batches
from eplb_service.control.server.service import running_service
from tests.control.fake_group import RANKS, FakeGroup, skewed_heat
from tests.control.server.test_service import settings, until


async def test_a_batch_is_let_in_in_order_and_a_few_at_a_time() -> None:
    lets_in, came = Batches(seconds=0.01, at_once=2), list[int]()

    async def report(number: int) -> None:
        await lets_in.turn()
        came.append(number)

    tasks = [asyncio.ensure_future(report(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert came == []
    tasks[1].cancel()
    sizes = set()
    while not all(task.done() for task in tasks):
        before = len(came)
        await asyncio.sleep(0)
        sizes.add(len(came) - before)
    assert came == [0, 2, 3, 4]
    assert max(sizes) <= 2
    # The next one opens a batch of its own.
    await asyncio.wait_for(report(5), 60)
    assert came[-1] == 5


@pytest.mark.parametrize(("seldom_seconds", "waits"), [(-1.0, True), (3600.0, False)])
async def test_only_ranks_that_report_seldom_wait_for_each_other(
    seldom_seconds: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    turn = Batches.turn

    async def counted(self: Batches) -> None:
        nonlocal turns
        turns += 1
        await turn(self)

    monkeypatch.setattr(Batches, "turn", counted)
    monkeypatch.setattr(agent_stream, "_SELDOM_SECONDS", seldom_seconds)
    async with running_service(settings()) as service, FakeGroup(service.address) as group:
        await group.join()
        deployment = service.plane.deployments["decode"]
        for blocks in (1, 2):
            await group.send_heat(skewed_heat(8))
            await until(lambda blocks=blocks: deployment.totals.steps_received == 8 * blocks)  # type: ignore[misc]
    assert turns == (2 * RANKS if waits else 0)
