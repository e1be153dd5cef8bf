"""Each bound refuses what is beyond it, and a metric counts that."""

from __future__ import annotations

import asyncio

import grpc

from eplb_service.control.server.service import running_service
from eplb_service.telemetry.logs import BoundedLog
from tests.control.fake_group import FakeRank
from tests.control.server.test_scrape import scrape
from tests.control.server.test_service import settings


async def test_streams_of_all_hosts_and_of_one_are_bounded_and_refusals_counted() -> None:
    for bounds, name in (
        ({"max_streams": 2}, "max_streams allows"),
        ({"max_streams_per_peer": 2}, "max_streams_per_peer allows"),
    ):
        async with running_service(settings(**bounds)) as service:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(service.address, options=options) for _ in range(3)]
            ranks = [FakeRank(channel, 0) for channel in channels]
            ends = [asyncio.ensure_future(rank.refusal()) for rank in ranks]
            # Whichever of them comes last is over at once, the others wait to be spoken to.
            (over,), others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            code, text = over.result()
            assert (code, name in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            counted = "eplb_refusals_total", ("resource_exhausted",)
            assert (await asyncio.to_thread(scrape, service.metrics_address))[counted] == 1
            for task in others:
                task.cancel()
            for channel in channels:
                await channel.close()


def test_log_lines_beyond_the_rate_are_counted() -> None:
    now, left_out = [0.0], []
    log = BoundedLog(lambda: left_out.append(1), clock=lambda: now[0])
    for _ in range(300):
        log.info("stranger")
    assert len(left_out) == 300 - 256
    now[0] = 1.0
    for _ in range(20):
        log.warning("stranger")
    assert len(left_out) == 300 - 256 + 10
