"""gRPC statuses for errors, TLS certificates that are renewed while serving, and health checks."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_core.wire.fields import ProtocolVersionError, WireError
from eplb_core.wire.generated import agent_pb2, operator_pb2
from eplb_service.control.core.errors import (
    AlreadyConnectedError,
    ConflictError,
    ExhaustedError,
    NotStoredError,
    RejectedError,
    UnknownDeploymentError,
)
from eplb_service.control.server.settings import SettingsError
from eplb_service.control.server.validity import Validity, first_to_expire

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (ProtocolVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (AlreadyConnectedError, grpc.StatusCode.ALREADY_EXISTS),
    (UnknownDeploymentError, grpc.StatusCode.NOT_FOUND),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotStoredError, grpc.StatusCode.ABORTED),
)
"""gRPC status for each kind of error. Subclasses precede their base classes."""


class CallError(Exception):
    """Raised by the server itself to end a call with the gRPC status ``code``."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: CallError | RejectedError | WireError) -> grpc.StatusCode:
    """Return the gRPC status of a call that fails with ``error``."""
    if isinstance(error, CallError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))


AGENT_SERVICE: str = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
OPERATOR_SERVICE: str = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name
LIVENESS = "liveness"
"""Health check that succeeds while the process is alive."""
READY = "ready"
"""Health check that succeeds if the service leads, or is standing by with compiled kernels."""

_HEALTH_CALLS = 256
_HEALTH_CONNECTIONS = 512
_HEALTH_BYTES = 1 << 10
_HEALTH_HANDSHAKE_MS = 5_000
_HEALTH_IDLE_MS = 10_000
_HEALTH_AGE_MS = 60_000


class ListenError(Exception):
    """Raised when the service cannot listen on an address. The error message names the address, reason and remedy."""


def listen_error(action: str, address: str, flag: str, error: Exception) -> ListenError:
    """Return the error for an address that cannot be used.

    Parameters
    ----------
    action
        What failed, such as ``cannot listen on``.
    address
        ``host:port``.
    flag
        Option that sets the address.
    error
        Error raised by the attempt. gRPC's error does not say if the address is in use.
    """
    reason = str(error)
    remedy = f"choose another address with --{flag}"
    if _is_in_use(address):
        reason = "another program is listening there, most likely another `eplb serve` on this host"
        remedy = f"stop it, or {remedy}"
    elif isinstance(error, OSError):
        reason = error.strerror or reason
    return ListenError(f"{action} {address}: {reason}; {remedy}")


def bound_socket(address: str) -> socket.socket:
    """Return a socket that listens on ``host:port``; raises ``OSError`` if that fails."""
    host, _, port = address.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return socket.create_server(target[:2], family=family, backlog=128)


def _is_in_use(address: str) -> bool:
    try:
        bound_socket(address).close()
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) == errno.EADDRINUSE
    return False


async def serve_health(address: str, probes: Any, gate: Any, stack: contextlib.AsyncExitStack) -> str:
    """Serve health checks, and no other calls, until ``stack`` unwinds.

    Raises ``ListenError`` if the address cannot be used.

    Parameters
    ----------
    address
        ``host:port`` to listen on.
    probes
        Health servicer of ``grpc_health``.
    gate
        Gate that checks each call.
    stack
        Exit stack that stops the server.

    Returns
    -------
    str
        ``host:port`` with the port that was bound.
    """
    server = grpc.aio.server(
        interceptors=[gate],
        maximum_concurrent_rpcs=_HEALTH_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _HEALTH_BYTES),
            ("grpc.max_allowed_incoming_connections", _HEALTH_CONNECTIONS),
            # Close idle and old connections, so that they do not use up the allowed number of connections.
            ("grpc.server_handshake_timeout_ms", _HEALTH_HANDSHAKE_MS),
            ("grpc.http2.settings_timeout", _HEALTH_HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _HEALTH_IDLE_MS),
            ("grpc.max_connection_age_ms", _HEALTH_AGE_MS),
            ("grpc.max_connection_age_grace_ms", _HEALTH_IDLE_MS),
        ],
    )
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise listen_error("cannot listen on", address, "health", error) from error
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"{address.rpartition(':')[0]}:{port}"


async def report_health(probes: Any, status: int, ready: int | None = None) -> None:
    """Set the results of the health checks. ``liveness`` always succeeds.

    Parameters
    ----------
    probes
        Health servicer of ``grpc_health``.
    status
        Status of the agent and operator services, and of the server as a whole.
    ready
        Status of the ``ready`` check; by default the same as ``status``.
    """
    for name in ("", AGENT_SERVICE, OPERATOR_SERVICE):
        await probes.set(name, status)
    await probes.set(READY, status if ready is None else ready)
    await probes.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)


_log = structlog.get_logger(__name__)


class Certificates:
    """TLS certificate of the service, reread for each connection. It can be used from any thread.

    A renewal replaces the certificate and the key one after the other. Until they match again, connections use the
    previous pair. Raises ``SettingsError`` if a file cannot be read or used, or if the key does not match.

    Parameters
    ----------
    certificate
        PEM file of the service's certificate chain.
    key
        PEM file of its private key.
    client_authority
        PEM file of the CA that signs client certificates; ``None`` without mutual TLS.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_authority = client_authority
        self._paths = tuple(filter(None, (key, certificate, client_authority)))
        self._contents = self._shown = self._read()
        self._context = self._load(self._contents)
        self._last_error = ""
        self._refreshing = threading.Lock()

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context for a new HTTPS connection."""
        self._refresh()
        return self._context

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificate for new gRPC connections."""
        key, certificate, *authority = self._shown = self._contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], *authority)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return ``current()`` if the certificate has changed, else ``None``. gRPC calls this at each handshake."""
        self._refresh()
        return None if self._shown == self._contents else self.current()

    def validity(self) -> dict[str, Validity]:
        """Return the validity of the certificates in use, keyed by setting.

        If a file contains several certificates, its validity is that of the first one to expire.
        """
        self._refresh()
        _, certificate, *authority = self._contents
        files = zip(("tls_cert", "tls_client_ca"), (certificate, *authority), strict=False)
        validities = {setting: first_to_expire(content) for setting, content in files}
        return {setting: validity for setting, validity in validities.items() if validity is not None}

    def _refresh(self) -> None:
        """Load the files if they have changed. If they cannot be used, log this once and keep the previous ones."""
        with self._refreshing:
            try:
                contents = self._read()
                if contents != self._contents:
                    self._context = self._load(contents)
                    self._contents = contents
                self._last_error = ""
            except SettingsError as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    _log.error(
                        "certificate_not_renewed", reason=self._last_error, shown="the previous certificate"
                    )

    def _load(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        """Load a TLS context; raises ``SettingsError`` if the files are invalid or differ from ``contents``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An empty password causes an encrypted key to be rejected. Otherwise, OpenSSL would prompt on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
            if self._client_authority is not None:
                context.load_verify_locations(self._client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            paths = ", ".join(map(str, self._paths))
            raise SettingsError(f"cannot use the TLS files {paths}: {reason}") from error
        if self._read() != contents:
            raise SettingsError("the TLS files are being replaced")
        return context

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise SettingsError(f"cannot read the TLS files: {error}") from error
