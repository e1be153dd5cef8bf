"""A stream that is asked to end does end, whatever it was about to do."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.agents.agent_stream import AgentService, _first_of
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.outgoing.streams import RankStream
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.wire.hello import decode_hello
from tests.control.fake_group import first_placement, heat_report, hello_of, live_of, skewed_heat


async def _listen(heard: list[str]) -> None:
    """Loses its first cancellation, as ``asyncio.wait_for`` does where a message comes in at the same moment."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        heard.append("a message")
    await asyncio.sleep(60)


async def test_a_stream_ends_though_a_message_comes_in_as_it_is_cancelled() -> None:
    stream, heard = RankStream(), list[str]()
    asyncio.get_running_loop().call_later(0.01, stream.end, grpc.StatusCode.ABORTED, "say Hello again")
    with pytest.raises(StatusError, match="say Hello again"):
        await asyncio.wait_for(_first_of(_listen(heard), stream.ended()), 5)
    assert heard == ["a message"]


async def test_what_ends_a_stream_is_reported_and_the_others_are_over() -> None:
    ended = []

    async def fails() -> None:
        raise ValueError("a message says nothing")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    with pytest.raises(ValueError, match="says nothing"):
        await _first_of(waits(), fails())
    assert ended == ["waits"]


class _Plane:
    """Notes what is asked of it; three times there are more whole steps to put together."""

    settings = SimpleNamespace(heartbeat_seconds=2.0)

    def __init__(self) -> None:
        self.asked: list[str] = []

    def put_together(self, _: object) -> bool:
        self.asked.append("put together")
        return self.asked.count("put together") <= 3

    def heat_report(self, *_: object) -> None:
        self.asked.append("report")


async def test_steps_that_wait_are_put_together_by_parts_before_the_next_report_is_taken() -> None:
    """One that would push them out of the ring would otherwise have all of them put together at once."""
    plane, live = _Plane(), live_of(first_placement())
    deployment = SimpleNamespace(limits=SimpleNamespace(pending_steps=8), outrun_by=lambda *_: None)
    service = AgentService(cast("ControlPlane", plane), cast("Quotas", None))
    message = heat_report(live, 0, 0, skewed_heat(2))
    stream = RankStream()
    stream.heard_at = time.monotonic()
    await service._hear_heat(cast("Deployment", deployment), decode_hello(hello_of(live, 0)), stream, message)
    assert plane.asked == ["put together"] * 4 + ["report", "put together"]
