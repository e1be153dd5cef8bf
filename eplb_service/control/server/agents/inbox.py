"""What an agent says, request by request: large ones come in parts, for which there must be room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.server.access.in_flight import InFlight
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.parts import Parts

_WHOLE_SECONDS = 10.0
"""Longest that all parts of a request may take: room is kept for them."""


class Inbox:
    """Reads one stream.

    Parameters
    ----------
    context
        The call.
    host
        Whose it is.
    in_flight
        Has the room.
    most_bytes
        Of one request.
    """

    def __init__(self, context: Any, host: str, in_flight: InFlight, most_bytes: int) -> None:
        self._context = context
        self._host = host
        self._in_flight = in_flight
        self._most_bytes = most_bytes

    @contextlib.asynccontextmanager
    async def next(self, seconds: float | None = None) -> AsyncIterator[agent_pb2.ConnectRequest | None]:
        """The next request, or ``None`` at the end of the stream.

        Its memory is accounted for as long as the context lasts.

        Raises
        ------
        StatusError
            Nothing comes for so many seconds, if there is a limit, or the rest of a request does not.
        ExhaustedError
            The request is too large, or there is no room for it.
        WireError
            Its parts do not make one.
        """
        message = await self._read(seconds)
        if message is None or message.WhichOneof("message") != "part":
            yield message
            return
        parts = Parts(message.part)
        if parts.size > self._most_bytes:
            raise ExhaustedError(
                f"a request of {parts.size} bytes is past the {self._most_bytes} that max_message_bytes allows"
            )
        async with self._in_flight.room(self._host, parts.size):
            try:
                await asyncio.wait_for(self._complete(parts), _WHOLE_SECONDS)
            except asyncio.TimeoutError:
                raise StatusError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"the parts of a request did not all arrive within {_WHOLE_SECONDS:g} seconds; connect again",
                ) from None
            request = parts.request()
            del parts, message
            yield request

    async def _complete(self, parts: Parts) -> None:
        while not parts.complete:
            message: agent_pb2.ConnectRequest = await self._context.read()
            if message == grpc.aio.EOF or message.WhichOneof("message") != "part":
                raise WireError("a request in parts was broken off")
            parts.add(message.part)

    async def _read(self, seconds: float | None) -> agent_pb2.ConnectRequest | None:
        if seconds is None:
            message: agent_pb2.ConnectRequest = await self._context.read()
        else:
            try:
                message = await asyncio.wait_for(self._context.read(), seconds)
            except asyncio.TimeoutError:
                raise unheard(seconds) from None
        return None if message == grpc.aio.EOF else message


def unheard(seconds: float) -> StatusError:
    """What ends a stream over which nothing has come for so long."""
    return StatusError(
        grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {seconds:g} seconds; connect again"
    )
