"""One question to a running service, with its failures told in a line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from eplb_service.cli.errors import UserError
from eplb_service.wire.codec import MAX_MESSAGE_BYTES
from eplb_service.wire.generated import operator_pb2_grpc

_CONNECT_SECONDS = 5.0
_TOLD_AS_THEY_ARE = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
ANSWER_SECONDS = 120.0
"""Longest wait for an answer: a decision on a large model may be computed first."""


@dataclass(frozen=True)
class Connection:
    """How a service is reached.

    Parameters
    ----------
    address
        Its ``host:port``.
    token
        Shared token, where it asks for one.
    tls_ca
        PEM file of the authority that signed its certificate; plain text where ``None``.
    """

    address: str
    token: str | None = None
    tls_ca: Path | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[OperatorCalls]:
        """Calls to the service; raises ``UserError`` where it is not reached or says no."""
        with self._channel() as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
                yield OperatorCalls(channel, self.token)
            except grpc.FutureTimeoutError as error:
                raise UserError(
                    f"no service answers at {self.address}; start one with `eplb serve`, or name its --address"
                ) from error
            except grpc.RpcError as error:
                raise UserError(_told(error)) from error

    def _channel(self) -> grpc.Channel:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        if self.tls_ca is None:
            return grpc.insecure_channel(self.address, options=options)
        try:
            roots = self.tls_ca.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {self.tls_ca}: {error.strerror}") from error
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(roots), options=options)


class OperatorCalls:
    """The operator service's calls, each with deadline and token."""

    def __init__(self, channel: grpc.Channel, token: str | None) -> None:
        self._stub = operator_pb2_grpc.OperatorServiceStub(channel)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __call__(self, name: str, request: Any) -> Any:
        """The answer to ``request`` from the call of that name."""
        return getattr(self._stub, name)(request, timeout=ANSWER_SECONDS, metadata=self._metadata)

    def stream(self, name: str, request: Any, seconds: float | None) -> Any:
        """The answers of a streaming call, which ends with DEADLINE_EXCEEDED after ``seconds``."""
        return getattr(self._stub, name)(request, timeout=seconds, metadata=self._metadata)


def _told(error: grpc.RpcError) -> str:
    call: Any = error
    if call.code() in _TOLD_AS_THEY_ARE:
        return str(call.details())
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"{call.details()}; give it with --token or EPLB_AUTH_TOKEN"
    return f"the service answered {call.code().name}: {call.details()}"
