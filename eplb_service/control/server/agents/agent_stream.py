"""The agents' stream: one call per rank, from its Hello to the end of its connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc

from eplb_service import __version__
from eplb_service.control.core.assembly import Assembly
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.access.credentials import Credential
from eplb_service.control.server.access.gate import current_caller
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.agents.batches import Batches
from eplb_service.control.server.agents.inbox import Inbox, unheard
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.listening.probes import AGENT_SERVICE
from eplb_service.control.server.outgoing.plan_sending import RankCopy
from eplb_service.control.server.outgoing.streams import RankStream
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_service.wire.heat import HeatReport, decode_heat_report, is_quick_to_decode
from eplb_service.wire.hello import Hello, Welcome, decode_hello, encode_welcome
from eplb_service.wire.status import decode_heartbeat, decode_plan_status

_HELLO_SECONDS = 10.0
_HEARTBEATS_MISSED = 5
_SILENCE_SECONDS = 5.0
_INSIST_SECONDS = 0.1
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.002, 0.128
"""Between two looks at whether slower ranks have caught up: many ranks may wait at once."""
_SELDOM_SECONDS = 1.0
"""A rank whose report comes so long after its last one is kept back by nothing if it waits for other ranks' reports."""


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Serves ``Connect``."""

    def __init__(self, plane: ControlPlane, quotas: Quotas) -> None:
        self._plane = plane
        self._quotas = quotas
        self._batches = Batches()
        self._silence = _HEARTBEATS_MISSED * plane.settings.heartbeat_seconds + _SILENCE_SECONDS

    async def Connect(self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any) -> None:  # noqa: ARG002
        """One rank's conversation; every way in which it can go wrong has a status that agents understand."""
        caller = current_caller()
        inbox = Inbox(context, caller.host, self._quotas.in_flight, self._plane.settings.max_message_bytes)
        async with self._quotas.first_message(caller.host):
            hello = await self._hear_hello(inbox)
        _check_credential(caller.credential, hello)
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

    async def _hear_hello(self, inbox: Inbox) -> Hello:
        async with inbox.next(_HELLO_SECONDS) as first:
            if first is None or first.WhichOneof("message") != "hello":
                raise WireError("the first message of a stream must be a Hello")
            return await asyncio.to_thread(decode_hello, first.hello)

    async def _listen(self, deployment: Deployment, hello: Hello, stream: RankStream, inbox: Inbox) -> None:
        while True:
            async with inbox.next() as message:
                if message is None or stream.over:
                    return
                stream.heard_at = time.monotonic()
                await self._hear(deployment, hello, stream, message)

    async def _hear(
        self, deployment: Deployment, hello: Hello, stream: RankStream, message: agent_pb2.ConnectRequest
    ) -> None:
        kind = message.WhichOneof("message")
        if kind == "heat_report":
            await self._hear_heat(deployment, hello, stream, message.heat_report)
        elif kind == "heartbeat":
            self._plane.heartbeat(deployment, hello.rank, decode_heartbeat(message.heartbeat))
        elif kind == "plan_status":
            self._plane.plan_status(deployment, hello.rank, decode_plan_status(message.plan_status))
        else:
            raise WireError("a stream has one Hello, its first message" if kind else "a message says nothing")

    async def _hear_heat(
        self, deployment: Deployment, hello: Hello, stream: RankStream, report: agent_pb2.HeatReport
    ) -> None:
        most_steps = deployment.limits.pending_steps
        before, stream.heat_at = stream.heat_at, stream.heard_at
        if stream.heat_at - before > _SELDOM_SECONDS:
            await self._batches.turn()
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
        asked = self._plane.reporting.welcome(deployment)
        return encode_welcome(
            Welcome(__version__, deployment.leader_term, asked.report_steps, heartbeat_seconds, asked)
        )


def agent_handlers(service: AgentService) -> grpc.GenericRpcHandler:
    """What a gRPC server needs to serve it; answers that are bytes already go as they are."""
    connect = grpc.stream_stream_rpc_method_handler(
        service.Connect, agent_pb2.ConnectRequest.FromString, _as_bytes
    )
    return grpc.method_handlers_generic_handler(AGENT_SERVICE, {"Connect": connect})


def _as_bytes(answer: agent_pb2.ConnectResponse | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def _check_credential(credential: Credential, hello: Hello) -> None:
    if not credential.reaches(hello.deployment):
        reason = f"{credential.name!r} has no say in deployment {hello.deployment!r}"
    elif not credential.speaks_for(hello.rank):
        reason = f"{credential.name!r} may not be rank {hello.rank}"
    else:
        return
    raise StatusError(grpc.StatusCode.PERMISSION_DENIED, reason)


async def _assembled(plane: ControlPlane, hello: Hello) -> Assembly | None:
    """What all ranks serve together where this one is the last, put together off the event loop."""
    deployment = plane.deployments.get(hello.deployment)
    group = None if deployment is None else deployment.group
    hellos = None if group is None else group.completed_by(hello)
    return None if hellos is None else await asyncio.to_thread(Assembly.of, hellos)


async def _let_others_catch_up(
    deployment: Deployment, rank: int, stream: RankStream, report: HeatReport
) -> None:
    """Wait where a report is ahead of other ranks', as long as there is patience with it."""
    pause = _FIRST_PAUSE_SECONDS
    while not stream.over:
        now = time.monotonic()
        stream.patience = stream.patience.after(now, deployment.outrun_by(rank, report))
        if not stream.patience.holds(now):
            return
        # What it says meanwhile is not read: it is not silent.
        stream.heard_at = now
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


async def _send_on(stream: RankStream, context: Any) -> None:
    """What waits in the stream's outbox goes to the rank, for as long as the stream lasts."""
    while True:
        message = await stream.outbox.get()
        if isinstance(message, RankCopy):
            await message.sending.send(message.rank, context.write)
        else:
            await context.write(message)


async def _silent(stream: RankStream, seconds: float) -> None:
    """Wait until nothing was heard for so long; a clock for each message would cost more than reading it."""
    while (left := stream.heard_at + seconds - time.monotonic()) > 0:
        await asyncio.sleep(left)
    raise unheard(seconds)


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
