"""A stream that is asked to end does end, whatever it was about to do."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from eplb_service.control.server.agents.agent_stream import _first_of
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.outgoing.streams import RankStream


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
