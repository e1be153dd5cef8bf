"""Heat that has piled up is read rank after rank: no step is lost for that, and nobody waits long for a dead rank."""

from __future__ import annotations

import asyncio
import time

from eplb_service.control.core.patience import HELD_SECONDS
from eplb_service.control.server.service import running_service
from tests.control.fake_group import RANKS, FakeGroup, FakeRank, heat_report, hello_of, skewed_heat
from tests.control.server.test_service import settings, until

REPORTS, STEPS = 24, 8
"""Three times as many steps as reports of this length may be apart."""


async def send(group: FakeGroup, rank: int) -> None:
    """All that one rank has to report."""
    for number in range(REPORTS):
        report = heat_report(group.live, rank, number * STEPS, skewed_heat(STEPS))
        await group.ranks[rank].say(heat_report=report)


async def test_a_backlog_that_is_read_rank_after_rank_is_whole() -> None:
    async with (
        running_service(settings(decision_interval=4096)) as service,
        FakeGroup(service.address) as group,
    ):
        await group.join()
        for rank in range(RANKS):
            await send(group, rank)
        decode = service.plane.deployments["decode"]
        await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
        assert decode.totals.steps_lost == 0


async def test_heat_of_ranks_that_come_before_the_last_one_is_not_lost() -> None:
    async with (
        running_service(settings(decision_interval=4096)) as service,
        FakeGroup(service.address) as group,
    ):
        group.ranks = [FakeRank(group.channel, rank) for rank in range(RANKS)]
        *early, last = group.ranks
        for rank in early:
            await rank.greet(hello_of(group.live, rank.rank))
            await send(group, rank.rank)
        # As long as agents take to try again; the heat of the others is on its way meanwhile.
        await asyncio.sleep(HELD_SECONDS / 10)
        await last.greet(hello_of(group.live, last.rank))
        await send(group, last.rank)
        decode = service.plane.deployments["decode"]
        await until(lambda: decode.totals.steps_received == REPORTS * STEPS, 60)
        assert decode.totals.steps_lost == 0


async def test_a_rank_that_reports_nothing_holds_the_others_up_but_once() -> None:
    async with (
        running_service(settings(decision_interval=4096)) as service,
        FakeGroup(service.address) as group,
    ):
        await group.join()
        began = time.monotonic()
        for rank in range(1, RANKS):
            await send(group, rank)
        decode = service.plane.deployments["decode"]
        # Two thirds of their reports are ahead of the silent rank.
        once = 8 * HELD_SECONDS
        await until(lambda: {member.step for member in decode.connected[1:]} == {REPORTS * STEPS}, once)
        assert time.monotonic() - began >= HELD_SECONDS
        assert decode.totals.steps_received == 0
