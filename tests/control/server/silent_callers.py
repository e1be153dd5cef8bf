"""Callers that open gRPC calls without sending a request, and checks that other callers are still served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from tests.control.fake_group import FakeRank, first_placement, hello_of, live_of

LIVE = live_of(first_placement())
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SEPARATE_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Channel options that force a separate connection."""
SECONDS = 8.0
"""A time much longer than an honest call takes, but shorter than a silent call may last."""


@asynccontextmanager
async def silent(address: str, method: str, calls: int) -> AsyncIterator[list[Any]]:
    """Open ``calls`` calls on one connection without ever sending a request."""
    async with grpc.aio.insecure_channel(address, SEPARATE_CONNECTION) as channel:
        opened = [channel.stream_unary(method)() for _ in range(calls)]
        await asyncio.gather(*(call.wait_for_connection() for call in opened[:1]))
        await asyncio.sleep(0.2)
        yield opened


async def healthy(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def check_served(address: str, agent: Any = None, reader: Any = None) -> None:
    """Check that the service welcomes a rank and answers an operator's request."""
    async with grpc.aio.insecure_channel(address) as channel:
        rank = FakeRank(channel, 0, agent)
        rank.patience = SECONDS
        assert (await rank.greet(hello_of(LIVE, 0))).heartbeat_seconds
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=reader, timeout=SECONDS)
        rank.call.cancel()
