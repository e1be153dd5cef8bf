"""What a service answers those who probe it: whether it serves, and whether it is alive at all."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_service.wire.generated import agent_pb2, operator_pb2

AGENT_SERVICE: str = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
OPERATOR_SERVICE: str = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name
LIVENESS, READY = "liveness", "ready"
"""Names under which a health check asks whether the process is alive, and able to lead, be it standing by or not."""

_HEALTH_CALLS = 32
_HEALTH_BYTES = 1 << 10


class ListenError(Exception):
    """An address that cannot be listened on; the message says which, why and what to do."""


async def serve_health(address: str, probes: Any, stack: contextlib.AsyncExitStack) -> str:
    """Answer health checks, and nothing else, until the stack unwinds; the address with its real port."""
    server = grpc.aio.server(
        maximum_concurrent_rpcs=_HEALTH_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _HEALTH_BYTES),
            ("grpc.max_allowed_incoming_connections", _HEALTH_CALLS),
        ],
    )
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {address}: {error}; choose another with --health") from error
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"{address.rpartition(':')[0]}:{bound}"


async def report_health(probes: Any, status: int, ready: int | None = None) -> None:
    """Answer ``status`` from now on, and ``ready``, where it differs, to those who ask whether it could lead."""
    for name in ("", AGENT_SERVICE, OPERATOR_SERVICE):
        await probes.set(name, status)
    await probes.set(READY, status if ready is None else ready)
    await probes.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
