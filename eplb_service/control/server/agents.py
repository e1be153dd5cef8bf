"""The agents' streams: one call per rank, from its Hello to the end of its connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from eplb_core.wire.agent import Heartbeat, Hello, PlanStatus, Welcome, decode_hello
from eplb_core.wire.codec import Parts, decode, encode
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_core.wire.heat import HeatReport, decode_heat_report, is_quick_to_decode
from eplb_service import __version__
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.core.flow import HELD_SECONDS
from eplb_service.control.core.group import Assembled
from eplb_service.control.server.access.gate import CALLER
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.listening import AGENT_SERVICE, StatusError
from eplb_service.control.server.outgoing.streams import RankStream
from eplb_service.control.server.plane.control_plane import ControlPlane

_HELLO_SECONDS = 10.0
_HEARTBEATS_MISSED = 5
_SILENCE_SECONDS = 5.0
_WHOLE_SECONDS = 10.0
"""Longest that all parts of a request may take: room is kept for them."""
_INSIST_SECONDS = 0.1
_INITIAL_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.002, 0.128
"""Between two looks at whether slower ranks have caught up: many ranks may wait at once."""
_SELDOM_SECONDS = 1.0
"""A rank whose report comes so long after its last one loses nothing by waiting for other ranks' reports."""
_BATCH_SECONDS = 0.2
"""Such reports are let in together so often: in a row they cost less CPU than one at a time between other work."""


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Serves ``Connect``."""

    def __init__(self, plane: ControlPlane, quotas: Quotas) -> None:
        self._plane = plane
        self._quotas = quotas
        self._silence = _HEARTBEATS_MISSED * plane.settings.heartbeat_seconds + _SILENCE_SECONDS

    async def Connect(self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any) -> None:  # noqa: ARG002
        """Serve one rank; every way in which its conversation can go wrong has a status that agents understand."""
        caller = CALLER.get()
        inbox = _Inbox(context, caller.host, self._quotas, self._plane.settings.max_message_bytes)
        hello = await self._read_hello(inbox, caller.host)
        caller.credential.check_reach(hello, hello.rank)
        stream = RankStream()
        deployment = self._plane.admit(hello, stream, await _assembled(self._plane, hello))
        try:
            await context.write(agent_pb2.ConnectResponse(welcome=self._welcome(deployment)))
            await _first_of(
                self._listen(deployment, hello, stream, inbox),
                _send_on(stream, context),
                _silent(stream, self._silence),
                stream.ended(),
            )
        finally:
            self._plane.release(deployment, hello.rank, stream)

    async def _read_hello(self, inbox: _Inbox, host: str) -> Hello:
        async with inbox.next(_HELLO_SECONDS) as first:
            if first is None or first.WhichOneof("message") != "hello":
                raise WireError("the first message of a stream must be a Hello")
            # Not before it is here: whoever says nothing must not hold a turn.
            async with self._quotas.hellos.turn(host):
                return await asyncio.to_thread(decode_hello, first.hello)

    async def _listen(self, deployment: Deployment, hello: Hello, stream: RankStream, inbox: _Inbox) -> None:
        while True:
            async with inbox.next() as message:
                if message is None or stream.over:
                    return
                stream.heard_at = time.monotonic()
                kind = message.WhichOneof("message")
                if kind == "heat_report":
                    await self._take_heat(deployment, hello, stream, message.heat_report)
                elif kind == "heartbeat":
                    self._plane.heartbeat(deployment, hello.rank, decode(Heartbeat, message.heartbeat))
                elif kind == "plan_status":
                    self._plane.plan_status(deployment, hello.rank, decode(PlanStatus, message.plan_status))
                else:
                    raise WireError(
                        "a stream has one Hello, its first message" if kind else "a message says nothing"
                    )

    async def _take_heat(
        self, deployment: Deployment, hello: Hello, stream: RankStream, report: agent_pb2.HeatReport
    ) -> None:
        most_steps = deployment.limits.pending_steps
        before, stream.heat_at = stream.heat_at, stream.heard_at
        if stream.heat_at - before > _SELDOM_SECONDS:
            await asyncio.sleep(_BATCH_SECONDS - stream.heard_at % _BATCH_SECONDS)
        if is_quick_to_decode(report):
            counts = decode_heat_report(report, hello.shape, most_steps)
        else:
            counts = await asyncio.to_thread(decode_heat_report, report, hello.shape, most_steps)
        await _let_others_catch_up(deployment, hello.rank, stream, counts)
        # Whole steps that the report would push out would all have to be put together at once.
        await self._put_together(deployment)
        if not stream.over:
            self._plane.heat_report(deployment, hello.rank, counts, report)
        await self._put_together(deployment)

    async def _put_together(self, deployment: Deployment) -> None:
        """One report may make many steps whole; what else the loop has to do comes between them."""
        while self._plane.put_together(deployment):
            await asyncio.sleep(0)

    def _welcome(self, deployment: Deployment) -> agent_pb2.Welcome:
        heartbeat_seconds = self._plane.settings.heartbeat_seconds
        asked = self._plane.streams.asked(deployment.name, self._plane.feed.reporting(deployment))
        welcome: agent_pb2.Welcome = encode(
            Welcome(__version__, deployment.leader_term, asked.report_steps, heartbeat_seconds, asked)
        )
        return welcome


def agent_handlers(service: AgentService) -> grpc.GenericRpcHandler:
    """Return what a gRPC server needs to serve it; answers that are bytes already go as they are."""
    connect = grpc.stream_stream_rpc_method_handler(
        service.Connect, agent_pb2.ConnectRequest.FromString, _as_bytes
    )
    return grpc.method_handlers_generic_handler(AGENT_SERVICE, {"Connect": connect})


@dataclass(frozen=True)
class _Inbox:
    """Requests of one stream; large ones come in parts, which are read by turns."""

    _context: Any
    _host: str
    _quotas: Quotas
    _most_bytes: int

    @contextlib.asynccontextmanager
    async def next(self, seconds: float | None = None) -> AsyncIterator[agent_pb2.ConnectRequest | None]:
        """Yield the next request, or ``None`` at the end of the stream; its memory is accounted for meanwhile."""
        message = await self._read(seconds)
        if message is None or message.WhichOneof("message") != "part":
            yield message
            return
        parts = Parts(message.part)
        if parts.size > self._most_bytes:
            raise ExhaustedError(
                f"a request of {parts.size} bytes is past the {self._most_bytes} that max_message_bytes allows"
            )
        async with self._quotas.large_requests.turn(self._host):
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
        try:
            message: agent_pb2.ConnectRequest = await asyncio.wait_for(self._context.read(), seconds)
        except asyncio.TimeoutError:
            raise _silence_error(seconds or 0.0) from None
        return None if message == grpc.aio.EOF else message


def _as_bytes(answer: agent_pb2.ConnectResponse | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


async def _assembled(plane: ControlPlane, hello: Hello) -> Assembled | None:
    """Put together what all ranks serve, off the event loop, where this rank is the last."""
    deployment = plane.deployments.get(hello.deployment)
    group = None if deployment is None else deployment.group
    if group is None or not group.is_completed_by(hello):
        return None
    return await asyncio.to_thread(group.assembled, hello)


async def _let_others_catch_up(
    deployment: Deployment, rank: int, stream: RankStream, report: HeatReport
) -> None:
    """Hold back a report that is ahead of other ranks', up to ``HELD_SECONDS``."""
    pause = _INITIAL_PAUSE_SECONDS
    while not stream.over:
        now = time.monotonic()
        if not deployment.is_ahead(rank, report):
            stream.ahead_since = None
            return
        stream.ahead_since = now if stream.ahead_since is None else stream.ahead_since
        if now - stream.ahead_since >= HELD_SECONDS:
            return
        # Unread input counts as activity.
        stream.heard_at = now
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


async def _send_on(stream: RankStream, context: Any) -> None:
    """Send the rank what waits in the stream's outbox, for as long as the stream lasts."""
    while True:
        message = await stream.outbox.get()
        if isinstance(message, tuple):
            sending, rank = message
            await sending.send(rank, context.write)
        else:
            await context.write(message)


async def _silent(stream: RankStream, seconds: float) -> None:
    """Wait until nothing was heard for so long; a clock for each message would cost more than reading it."""
    while (left := stream.heard_at + seconds - time.monotonic()) > 0:
        await asyncio.sleep(left)
    raise _silence_error(seconds)


def _silence_error(seconds: float) -> StatusError:
    return StatusError(
        grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {seconds:g} seconds; connect again"
    )


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; its error is raised, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(tasks)
    for task in done:
        task.result()


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks until they have ended.

    Before Python 3.12 ``wait_for`` drops a cancellation that comes together with its result: a stream that was asked to
    end while a message came in would go on for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_INSIST_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
