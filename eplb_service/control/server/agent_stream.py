"""The agents' stream: one call per rank, from its Hello to the end of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc
import structlog

from eplb_service import __version__
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.heat_report import costs_little, read_heat_report
from eplb_service.control.server.hello import RankHello, read_hello
from eplb_service.control.server.plane import ControlPlane
from eplb_service.control.server.refusal import RefusedError, invalid
from eplb_service.control.server.streams import RankStream
from eplb_service.wire.codec import PROTOCOL_VERSION, WireError
from eplb_service.wire.generated import agent_pb2, agent_pb2_grpc

_log = structlog.get_logger(__name__)

_HELLO_SECONDS = 10.0
_HEARTBEATS_MISSED = 5
_SILENCE_SECONDS = 5.0
_INSIST_SECONDS = 0.1


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Serves ``Connect``."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._silence = _HEARTBEATS_MISSED * plane.settings.heartbeat_seconds + _SILENCE_SECONDS

    async def Connect(self, request_iterator: AsyncIterator[agent_pb2.ConnectRequest], context: Any) -> None:  # noqa: ARG002
        """One rank's conversation; every way in which it can go wrong has a status that agents understand."""
        try:
            await self._serve(context)
        except RefusedError as error:
            await context.abort(error.code, error.message)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _serve(self, context: Any) -> None:
        hello = await self._hear_hello(context)
        stream = RankStream()
        deployment = self._plane.admit(hello, stream)
        try:
            await context.write(agent_pb2.ConnectResponse(welcome=self._welcome()))
            await _first_of(self._listen(deployment, hello, context), _tell(stream, context), stream.ended())
        finally:
            self._plane.release(deployment, hello.rank)

    async def _hear_hello(self, context: Any) -> RankHello:
        first = await _read(context, _HELLO_SECONDS)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("the first message of a stream must be a Hello")
        return await asyncio.to_thread(read_hello, first.hello)

    async def _listen(self, deployment: Deployment, hello: RankHello, context: Any) -> None:
        while (message := await _read(context, self._silence)) is not None:
            kind = message.WhichOneof("message")
            if kind == "heat_report":
                await self._hear_heat(deployment, hello, message.heat_report)
            elif kind == "heartbeat":
                self._plane.heartbeat(deployment, hello.rank, message.heartbeat)
            elif kind == "plan_status":
                self._plane.plan_status(deployment, hello.rank, message.plan_status)
            else:
                raise invalid(
                    "a stream has one Hello, its first message" if kind else "a message says nothing"
                )

    async def _hear_heat(
        self, deployment: Deployment, hello: RankHello, report: agent_pb2.HeatReport
    ) -> None:
        most_steps = deployment.limits.pending_steps
        if costs_little(report):
            batch = read_heat_report(report, hello.shape, most_steps)
        else:
            batch = await asyncio.to_thread(read_heat_report, report, hello.shape, most_steps)
        self._plane.heat_batch(deployment, hello.rank, batch, report)

    def _welcome(self) -> agent_pb2.Welcome:
        return agent_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            service_version=__version__,
            leader_term=self._plane.leader_term,
            report_steps=self._plane.settings.report_steps,
            heartbeat_seconds=self._plane.settings.heartbeat_seconds,
        )


async def _tell(stream: RankStream, context: Any) -> None:
    while True:
        await context.write(agent_pb2.ConnectResponse(plan=await stream.outbox.get()))


async def _read(context: Any, seconds: float) -> agent_pb2.ConnectRequest | None:
    try:
        message: agent_pb2.ConnectRequest = await asyncio.wait_for(context.read(), seconds)
    except asyncio.TimeoutError:
        raise RefusedError(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {seconds:g} seconds; connect again"
        ) from None
    return None if message == grpc.aio.EOF else message


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
