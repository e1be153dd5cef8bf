"""One question to a running service: how it is reached, and its failures in one line."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

from eplb_core.wire.channel import Security
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import operator_pb2_grpc
from eplb_core.wire.operator import checked_answer
from eplb_service.cli.options import UserError, argument, option

NAME = argument(help="Name of the deployment, as `eplb deployments` lists it.")

_CONNECT_SECONDS = 5.0
_CLEAR_BY_THEMSELVES = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
)
_ANSWER_SECONDS = 120.0
"""Longest wait for an answer: a decision on a large model may be computed first."""


@dataclass(frozen=True)
class Connection:
    """Address and credentials of a service."""

    SECTION: ClassVar[str] = "How the service is reached"

    address: str = option("127.0.0.1:50551", "host:port of the service.", envvar="EPLB_ADDRESS")
    token: str | None = option(None, "Token, where the service asks for one.", envvar="EPLB_AUTH_TOKEN")
    tls_ca: Path | None = option(
        None, "PEM file of the authority behind the service's TLS.", envvar="EPLB_TLS_CA"
    )
    tls_cert: Path | None = option(
        None, "PEM file of the caller's own certificate.", envvar="EPLB_TLS_CLIENT_CERT"
    )
    tls_key: Path | None = option(None, "PEM private key of --tls-cert.", envvar="EPLB_TLS_CLIENT_KEY")
    plaintext_token: bool = option(
        False, "Send the token in plain text to another host.", "--plaintext-token"
    )

    @contextlib.contextmanager
    def open(self) -> Iterator[OperatorCalls]:
        """Calls to the service; raises ``UserError`` where it is not reached or refuses."""
        with self._channel() as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
                yield OperatorCalls(channel, self.token)
            except grpc.FutureTimeoutError as error:
                raise UserError(self._why_unreached()) from error
            except grpc.RpcError as error:
                raise UserError(_reason(error)) from error
            except WireError as error:
                raise UserError(
                    f"the service at {self.address} answered what it cannot mean: {error}"
                ) from error

    def _why_unreached(self) -> str:
        """Return why the service was not reached, found by one more connection."""
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        speaks_tls = rejected = False
        try:
            with (
                socket.create_connection((host, int(port)), _CONNECT_SECONDS) as link,
                self._tls_context().wrap_socket(link, server_hostname=host) as encrypted,
            ):
                speaks_tls = True
                # A service that asks for a certificate ends the connection only after the handshake.
                rejected = True
                rejected = not encrypted.recv(1)
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message.rstrip(".")
            return (
                f"the certificate of the service at {self.address} cannot be trusted: {why}; "
                "check --tls-ca, and that --address is a name in the certificate"
            )
        except ssl.SSLError as error:
            # An alert is the peer's own complaint.
            rejected = speaks_tls = speaks_tls or "ALERT" in (error.reason or "")
        except ConnectionResetError:
            pass
        except (OSError, ValueError):
            if not speaks_tls:
                return f"no service answers at {self.address}; start one with `eplb serve`, or name its --address"
        if speaks_tls and self.tls_ca is None:
            return f"the service at {self.address} serves TLS; name its authority with --tls-ca"
        if rejected:
            return (
                f"the service at {self.address} asks for a client certificate that it trusts; "
                "name one with --tls-cert and --tls-key"
            )
        if self.tls_ca is not None and not speaks_tls:
            return f"the service at {self.address} does not serve TLS; leave --tls-ca out"
        return f"{self.address} is no eplb service, or too busy to answer; check --address"

    def _tls_context(self) -> ssl.SSLContext:
        """Return a TLS context with the user's certificates, or one that trusts every server. Raises ``UserError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        try:
            if self.tls_ca is None:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            else:
                context.load_verify_locations(self.tls_ca)
            if self.tls_cert is not None and self.tls_key is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except ssl.SSLError as error:
            files = ", ".join(str(path) for path in (self.tls_ca, self.tls_cert, self.tls_key) if path)
            raise UserError(f"the TLS files {files} cannot be used: {error.reason or error}") from error
        return context

    def _channel(self) -> grpc.Channel:
        if self.address.startswith("http") or ":" not in self.address:
            raise UserError(f"--address is {self.address!r}; expected host:port, such as 127.0.0.1:50551")
        try:
            security = Security(self.tls_ca, self.tls_cert, self.tls_key, self.plaintext_token)
            if self.token:
                security.check_token(self.address)
            return security.open(self.address)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(str(error)) from error


class OperatorCalls:
    """The operator service's calls, each with deadline and token."""

    def __init__(self, channel: grpc.Channel, token: str | None) -> None:
        self._stub = operator_pb2_grpc.OperatorServiceStub(channel)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __call__(self, name: str, request: Any) -> Any:
        """Return the checked answer to ``request`` from the call of that name; raises ``WireError``."""
        answer = getattr(self._stub, name)(request, timeout=_ANSWER_SECONDS, metadata=self._metadata)
        return checked_answer(answer)

    def stream(self, name: str, request: Any, seconds: float | None) -> Any:
        """The answers of a streaming call, which ends with DEADLINE_EXCEEDED after ``seconds``."""
        return getattr(self._stub, name)(request, timeout=seconds, metadata=self._metadata)


def _reason(error: grpc.RpcError) -> str:
    call: Any = error
    if call.code() in _CLEAR_BY_THEMSELVES:
        return str(call.details())
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"{call.details()}; give it with --token or EPLB_AUTH_TOKEN"
    return f"the service answered {call.code().name}: {call.details()}"
