"""Many concurrent callers on every port that send nothing or an incomplete request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from eplb_core.wire.generated import operator_pb2
from tests.attacks import target as to
from tests.attacks.attempts.registry import attempt
from tests.attacks.target import Target
from tests.control.server.grpc_calls import bearer
from tests.control.server.silent_callers import CHECK, SECONDS, check_served, healthy, silent

NO_LOCKOUT = "silent callers do not block other callers"


async def _agents_are_served(target: Target) -> str:
    await check_served(target.service.address, bearer(to.AGENT), bearer(to.READER))
    return "bounded: a rank with a token is welcomed, and a reader is answered"


@attempt("200 silent health checks on the agents' port", NO_LOCKOUT, locked=True)
async def _checks(target: Target) -> str:
    async with silent(target.service.address, CHECK, 200):
        assert await healthy(target.service.address)
        return await _agents_are_served(target)


@attempt("1,000 silent streams without a token", NO_LOCKOUT, locked=True)
async def _streams(target: Target) -> str:
    async with silent(target.service.address, "/eplb.v1.AgentService/Connect", 1000):
        return await _agents_are_served(target)


@contextlib.asynccontextmanager
async def _connections(address: str, count: int) -> AsyncIterator[None]:
    host, _, port = address.rpartition(":")
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            opened.append(await asyncio.open_connection(host, int(port)))
    try:
        yield
    finally:
        for _, writer in opened:
            writer.close()


@attempt("200 silent connections to the health port", NO_LOCKOUT, locked=True)
async def _health_connections(target: Target) -> str:
    async with _connections(target.health_address, 200):
        assert await healthy(target.health_address)
    return "bounded: the oldest connections are closed, and probes are answered"


@attempt("60 calls that never send their request", "operators are still answered", locked=True)
async def _questions(target: Target) -> str:
    async with grpc.aio.insecure_channel(target.service.address) as channel:
        method = "/eplb.v1.OperatorService/ListDeployments"
        calls = [channel.stream_unary(method)(metadata=bearer(to.READER)) for _ in range(60)]
        request = operator_pb2.GetStatusRequest(deployment="decode")
        code = await asyncio.wait_for(target.code_of("GetStatus", request, bearer(to.READER)), SECONDS)
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)
        for call in calls:
            call.cancel()
    return "bounded: a reader is answered"
