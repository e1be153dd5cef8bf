"""Call a running service: connection, credentials, and one-line error messages."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

from eplb_core.wire.channel import DEFAULT_ADDRESS, Security
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import operator_pb2_grpc
from eplb_core.wire.operator import checked_answer
from eplb_service.cli.options import UserError, argument, option

NAME = argument(help="Name of the deployment, as listed by `eplb deployments`.")

_CONNECT_SECONDS = 5.0
_SELF_EXPLANATORY_CODES = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
)
"""Status codes whose details are printed without naming the code."""
_RESPONSE_SECONDS = 120.0
"""Timeout of a call, in seconds. The service may have to compute a decision for a large model before it responds."""


@dataclass(frozen=True)
class Connection:
    """Address and credentials of a service."""

    SECTION: ClassVar[str] = "Connection to the service"

    address: str = option(DEFAULT_ADDRESS, "Address (host:port) of the service.", envvar="EPLB_ADDRESS")
    token: str | None = option(None, "Token, if the service requires one.", envvar="EPLB_AUTH_TOKEN")
    tls_ca: Path | None = option(
        None, "PEM file of the CA that signed the service's certificate.", envvar="EPLB_TLS_CA"
    )
    tls_cert: Path | None = option(None, "PEM file of the client certificate.", envvar="EPLB_TLS_CLIENT_CERT")
    tls_key: Path | None = option(None, "PEM private key of --tls-cert.", envvar="EPLB_TLS_CLIENT_KEY")
    plaintext_token: bool = option(
        False,
        "Trust the network, as `eplb serve --insecure` does: allow the token to be sent to another host unencrypted.",
        *("--plaintext-token", "--insecure"),
    )

    @contextlib.contextmanager
    def open(self) -> Iterator[OperatorCalls]:
        """Connect to the service. Raises ``UserError`` if the service is unreachable or rejects a call."""
        with self._channel() as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
                yield OperatorCalls(channel, self.token)
            except grpc.FutureTimeoutError as error:
                raise UserError(self._diagnose()) from error
            except grpc.RpcError as error:
                raise UserError(_reason(error)) from error
            except WireError as error:
                raise UserError(
                    f"the service at {self.address} sent an invalid response: {error}; check that its version "
                    "matches this command's"
                ) from error

    def _diagnose(self) -> str:
        """Return the reason why the service is unreachable, based on one more connection attempt."""
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        uses_tls = False
        rejected = False
        try:
            with (
                socket.create_connection((host, int(port)), _CONNECT_SECONDS) as link,
                self._tls_context().wrap_socket(link, server_hostname=host) as encrypted,
            ):
                uses_tls = True
                # A service that requires a client certificate closes the connection only after the handshake, so an
                # error while reading also counts as a rejection.
                rejected = True
                rejected = not encrypted.recv(1)
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message.rstrip(".")
            return (
                f"the certificate of the service at {self.address} cannot be verified: {reason}; "
                "check --tls-ca, and that the certificate contains the host of --address"
            )
        except ssl.SSLError as error:
            # Only a TLS server sends an alert.
            uses_tls = uses_tls or "ALERT" in (error.reason or "")
            rejected = uses_tls
        except ConnectionResetError:
            pass
        except (OSError, ValueError):
            if not uses_tls:
                return f"no service is listening at {self.address}; start one with `eplb serve`, or check --address"
        if uses_tls and self.tls_ca is None:
            return f"the service at {self.address} uses TLS; pass its CA certificate with --tls-ca"
        if rejected:
            return (
                f"the service at {self.address} requires a client certificate that it trusts; "
                "pass one with --tls-cert and --tls-key"
            )
        if self.tls_ca is not None and not uses_tls:
            return f"the service at {self.address} does not use TLS; remove --tls-ca"
        return f"{self.address} is not an eplb service, or is too busy to respond; check --address"

    def _tls_context(self) -> ssl.SSLContext:
        """Return a TLS context with the user's certificates. Without ``--tls-ca`` it trusts every server.

        Raises ``UserError`` if a file cannot be used.
        """
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
            raise UserError(f"--address is {self.address!r}; expected host:port, such as {DEFAULT_ADDRESS}")
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
    """Client for the operator service, with a timeout and the user's token."""

    def __init__(self, channel: grpc.Channel, token: str | None) -> None:
        self._stub = operator_pb2_grpc.OperatorServiceStub(channel)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __call__(self, name: str, request: Any) -> Any:
        """Make the call ``name`` and return the validated response. Raises ``WireError`` if it is invalid."""
        response = getattr(self._stub, name)(request, timeout=_RESPONSE_SECONDS, metadata=self._metadata)
        return checked_answer(response)

    def stream(self, name: str, request: Any, seconds: float | None) -> Any:
        """Return the responses of a streaming call, which ends with DEADLINE_EXCEEDED after ``seconds``."""
        return getattr(self._stub, name)(request, timeout=seconds, metadata=self._metadata)


def _reason(error: grpc.RpcError) -> str:
    call: Any = error
    if call.code() in _SELF_EXPLANATORY_CODES:
        return str(call.details())
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"{call.details()}; pass it with --token or EPLB_AUTH_TOKEN"
    return f"the service responded with {call.code().name}: {call.details()}"
