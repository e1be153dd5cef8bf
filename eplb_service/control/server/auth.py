"""The shared token: calls that do not bring it are turned away before any handler runs."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

# Probes of orchestrators carry no metadata, and health tells nothing.
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Asks every call but health checks for ``authorization: Bearer TOKEN``."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let the call through, or replace its handler by one that says UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICES):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get("authorization", b"")
        given = given.encode() if isinstance(given, str) else given
        return handler if hmac.compare_digest(given, self._expected) else _turned_away(handler)


def _turned_away(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def abort(_request: Any, context: Any) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "this service asks for 'authorization: Bearer TOKEN'; the token is wrong",
        )

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: grpc.RpcMethodHandler[Any, Any] = make(
        abort, handler.request_deserializer, handler.response_serializer
    )
    return made
