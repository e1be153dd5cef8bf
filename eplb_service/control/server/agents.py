"""Agent streams: one gRPC call per rank, from its Hello until it disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from eplb_core.wire.agent import Heartbeat, Hello, PlanStatus, Welcome, decode_hello
from eplb_core.wire.codec import Parts, decode, encode, pack
from eplb_core.wire.engine import decode_decide_request
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_core.wire.heat import HeatReport, decode_heat_report, is_quick_to_decode
from eplb_service import __version__
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.core.flow import HELD_SECONDS
from eplb_service.control.core.group import AssembledLayout
from eplb_service.control.server.access.gate import CALLER
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.listening import AGENT_SERVICE, CallError
from eplb_service.control.server.outgoing.streams import RankStream
from eplb_service.control.server.plane.control_plane import ControlPlane

_HELLO_SECONDS = 10.0
_MISSED_HEARTBEATS = 5
_SILENCE_SECONDS = 5.0
"""Time after which a silent stream times out, in addition to five heartbeat intervals."""
_WHOLE_SECONDS = 10.0
"""Time within which all parts of a request must arrive. It is limited because their memory is reserved until then."""
_RETRY_CANCEL_SECONDS = 0.1
_MIN_PAUSE_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.128
"""Maximum pause between checks of whether slower ranks have caught up. It limits the cost of the checks when many
ranks wait at the same time."""
_RARE_REPORT_SECONDS = 1.0
"""If a rank's reports arrive at intervals longer than this, delaying one to process it with other ranks' reports is
harmless."""
_BATCH_SECONDS = 0.2
"""Interval at which such rare reports are processed in batches, which costs less CPU than interleaving them with
other work."""


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Implementation of the gRPC service ``AgentService``."""

    def __init__(self, plane: ControlPlane, quotas: Quotas) -> None:
        self._plane = plane
        self._quotas = quotas
        self._silence = _MISSED_HEARTBEATS * plane.settings.heartbeat_seconds + _SILENCE_SECONDS

    async def Connect(self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any) -> None:  # noqa: ARG002
        """Serve one rank until its stream ends. Each kind of failure has a status that agents handle."""
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
                _send_outbox(stream, context),
                _time_out(stream, self._silence),
                stream.ended(),
            )
        finally:
            self._plane.release(deployment, hello.rank, stream)

    async def Decide(self, request_iterator: AsyncIterator[agent_pb2.Part], context: Any) -> None:  # noqa: ARG002
        """Make a decision for a group whose engine moves the weights itself."""
        caller = CALLER.get()
        first = await _next_part(context, _HELLO_SECONDS)
        parts = Parts(first)
        max_bytes = self._plane.settings.max_message_bytes
        if parts.size > max_bytes:
            raise _too_large(parts.size, max_bytes)
        async with self._quotas.large_requests.turn(caller.host):
            while not parts.complete:
                parts.add(await _next_part(context, _WHOLE_SECONDS))
            request = await asyncio.to_thread(decode_decide_request, parts.message(agent_pb2.DecideRequest))
            caller.credential.check_reach(request)
            placement = await self._plane.decider.place_for_engine(request)
            await context.write(agent_pb2.DecideResponse(physical_to_logical=pack(placement)))

    async def _read_hello(self, inbox: _Inbox, host: str) -> Hello:
        async with inbox.next(_HELLO_SECONDS) as first:
            if first is None or first.WhichOneof("message") != "hello":
                raise WireError("the first message of a stream must be a Hello")
            # Wait for a turn only after the Hello has arrived, so that a silent caller does not hold one.
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
                    await self._receive_heat(deployment, hello, stream, message.heat_report)
                elif kind == "heartbeat":
                    self._plane.heartbeat(deployment, hello.rank, decode(Heartbeat, message.heartbeat))
                elif kind == "plan_status":
                    self._plane.plan_status(deployment, hello.rank, decode(PlanStatus, message.plan_status))
                elif kind is None:
                    raise WireError("the message is empty")
                else:
                    raise WireError("a stream must contain only one Hello, as its first message")

    async def _receive_heat(
        self, deployment: Deployment, hello: Hello, stream: RankStream, report: agent_pb2.HeatReport
    ) -> None:
        max_steps = deployment.limits.pending_steps
        interval = stream.heard_at - stream.heat_at
        stream.heat_at = stream.heard_at
        if interval > _RARE_REPORT_SECONDS:
            await asyncio.sleep(_BATCH_SECONDS - stream.heard_at % _BATCH_SECONDS)
        if is_quick_to_decode(report):
            counts = decode_heat_report(report, hello.shape, max_steps)
        else:
            counts = await asyncio.to_thread(decode_heat_report, report, hello.shape, max_steps)
        await _let_slower_ranks_catch_up(deployment, hello.rank, stream, counts)
        # Assemble pending steps first. A report that overflows the buffer would otherwise assemble all of them at once.
        await self._assemble_steps(deployment)
        if not stream.over:
            self._plane.heat_report(deployment, hello.rank, counts, report)
        await self._assemble_steps(deployment)

    async def _assemble_steps(self, deployment: Deployment) -> None:
        """Assemble all complete steps, yielding to the event loop between batches of steps."""
        while self._plane.assemble_steps(deployment):
            await asyncio.sleep(0)

    def _welcome(self, deployment: Deployment) -> agent_pb2.Welcome:
        heartbeat_seconds = self._plane.settings.heartbeat_seconds
        reporting = self._plane.streams.asked(deployment.name, self._plane.feed.reporting(deployment))
        welcome: agent_pb2.Welcome = encode(
            Welcome(__version__, deployment.leader_term, reporting.report_steps, heartbeat_seconds, reporting)
        )
        return welcome


def agent_handlers(service: AgentService) -> grpc.GenericRpcHandler:
    """Return the gRPC handlers of ``service``. Responses that are already encoded are sent unchanged."""
    connect = grpc.stream_stream_rpc_method_handler(
        service.Connect, agent_pb2.ConnectRequest.FromString, _as_bytes
    )
    decide = grpc.stream_stream_rpc_method_handler(
        service.Decide, agent_pb2.Part.FromString, agent_pb2.DecideResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(AGENT_SERVICE, {"Connect": connect, "Decide": decide})


@dataclass(frozen=True)
class _Inbox:
    """Requests on one stream. Large requests arrive in parts; a quota limits how many of them are read at once."""

    _context: Any
    _host: str
    _quotas: Quotas
    _max_bytes: int

    @contextlib.asynccontextmanager
    async def next(self, seconds: float | None = None) -> AsyncIterator[agent_pb2.ConnectRequest | None]:
        """Yield the next request, or ``None`` at the end of the stream.

        A large request holds one of the quota's turns until the context exits.

        Parameters
        ----------
        seconds
            Time within which the request must begin to arrive; unlimited by default.
        """
        message = await self._read(seconds)
        if message is None or message.WhichOneof("message") != "part":
            yield message
            return
        parts = Parts(message.part)
        if parts.size > self._max_bytes:
            raise _too_large(parts.size, self._max_bytes)
        async with self._quotas.large_requests.turn(self._host):
            try:
                await asyncio.wait_for(self._complete(parts), _WHOLE_SECONDS)
            except asyncio.TimeoutError:
                raise CallError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"the parts of a request did not all arrive within {_WHOLE_SECONDS:g} seconds; reconnect",
                ) from None
            request = parts.request()
            del parts, message
            yield request

    async def _complete(self, parts: Parts) -> None:
        while not parts.complete:
            message: agent_pb2.ConnectRequest = await self._context.read()
            if message == grpc.aio.EOF or message.WhichOneof("message") != "part":
                raise WireError("a multi-part request ended before its last part")
            parts.add(message.part)

    async def _read(self, seconds: float | None) -> agent_pb2.ConnectRequest | None:
        try:
            message: agent_pb2.ConnectRequest = await asyncio.wait_for(self._context.read(), seconds)
        except asyncio.TimeoutError:
            raise _silence_error(seconds or 0.0) from None
        return None if message == grpc.aio.EOF else message


async def _next_part(context: Any, seconds: float) -> agent_pb2.Part:
    """Return the next part of a ``Decide`` request, which must arrive within ``seconds``."""
    try:
        part: agent_pb2.Part = await asyncio.wait_for(context.read(), seconds)
    except asyncio.TimeoutError:
        raise _silence_error(seconds) from None
    if part == grpc.aio.EOF:
        raise WireError("the request ended before its last part")
    return part


def _too_large(size: int, max_bytes: int) -> ExhaustedError:
    return ExhaustedError(
        f"a request of {size} bytes exceeds the {max_bytes} bytes that max_message_bytes allows"
    )


def _as_bytes(response: agent_pb2.ConnectResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


async def _assembled(plane: ControlPlane, hello: Hello) -> AssembledLayout | None:
    """Assemble the group's layout off the event loop if this Hello completes the group."""
    deployment = plane.deployments.get(hello.deployment)
    group = None if deployment is None else deployment.group
    if group is None or not group.is_completed_by(hello):
        return None
    return await asyncio.to_thread(group.assembled, hello)


async def _let_slower_ranks_catch_up(
    deployment: Deployment, rank: int, stream: RankStream, report: HeatReport
) -> None:
    """Delay a report that is ahead of slower ranks' reports, by at most ``HELD_SECONDS``."""
    pause = _MIN_PAUSE_SECONDS
    while not stream.over:
        now = time.monotonic()
        if not deployment.is_ahead(rank, report):
            stream.ahead_since = None
            return
        stream.ahead_since = now if stream.ahead_since is None else stream.ahead_since
        if now - stream.ahead_since >= HELD_SECONDS:
            return
        # Messages from the rank are not read during the delay, so keep the stream from timing out.
        stream.heard_at = now
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


async def _send_outbox(stream: RankStream, context: Any) -> None:
    """Send the messages in the stream's outbox until the task is cancelled."""
    while True:
        message = await stream.outbox.get()
        if isinstance(message, tuple):
            sending, rank = message
            await sending.send(rank, context.write)
        else:
            await context.write(message)


async def _time_out(stream: RankStream, seconds: float) -> None:
    """Wait until the stream has been silent for ``seconds``, then raise ``CallError``.

    A timer for each message would cost more than reading the message.
    """
    while (remaining := stream.heard_at + seconds - time.monotonic()) > 0:
        await asyncio.sleep(remaining)
    raise _silence_error(seconds)


def _silence_error(seconds: float) -> CallError:
    return CallError(
        grpc.StatusCode.DEADLINE_EXCEEDED, f"no message arrived for {seconds:g} seconds; reconnect"
    )


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines until one ends. Cancel the others, wait for them, and raise the first one's error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(tasks)
    for task in done:
        task.result()


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks repeatedly until they have ended.

    Before Python 3.12, ``wait_for`` drops a cancellation that arrives together with its result. A stream that is
    cancelled just as a message arrives would then never end.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_CANCEL_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
