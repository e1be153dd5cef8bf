"""Errors as gRPC statuses, certificates that are renewed while serving, and health checks."""

from __future__ import annotations

import contextlib
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
    RefusedError,
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


class StatusError(Exception):
    """A call ends with a status for a reason of the server's own."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: StatusError | RefusedError | WireError) -> grpc.StatusCode:
    """Return the status that the caller gets."""
    if isinstance(error, StatusError):
        return error.code
    return next(code for kind, code in _CODES if isinstance(error, kind))


AGENT_SERVICE: str = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
OPERATOR_SERVICE: str = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name
LIVENESS, READY = "liveness", "ready"
"""Names under which a health check asks whether the process is alive, and able to lead, be it standing by or not."""

_HEALTH_CALLS, _HEALTH_CONNECTIONS = 256, 512
_HEALTH_BYTES = 1 << 10
_HEALTH_SETTLED_MS, _HEALTH_IDLE_MS, _HEALTH_AGE_MS = 5_000, 10_000, 60_000


class ListenError(Exception):
    """An address that cannot be listened on; the message says which, why and what to do."""


async def serve_health(address: str, probes: Any, gate: Any, stack: contextlib.AsyncExitStack) -> str:
    """Answer health checks that ``gate`` lets in, and nothing else, until the stack unwinds; the real address."""
    server = grpc.aio.server(
        interceptors=[gate],
        maximum_concurrent_rpcs=_HEALTH_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _HEALTH_BYTES),
            ("grpc.max_allowed_incoming_connections", _HEALTH_CONNECTIONS),
            # Whoever asks for nothing leaves the place to others.
            ("grpc.server_handshake_timeout_ms", _HEALTH_SETTLED_MS),
            ("grpc.http2.settings_timeout", _HEALTH_SETTLED_MS),
            ("grpc.max_connection_idle_ms", _HEALTH_IDLE_MS),
            ("grpc.max_connection_age_ms", _HEALTH_AGE_MS),
            ("grpc.max_connection_age_grace_ms", _HEALTH_IDLE_MS),
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


_log = structlog.get_logger(__name__)


class Certificates:
    """PEM files of the service's own certificate and key, and of the authority of client certificates, if asked for.

    Used from any thread. They are read again for each connection. A renewal replaces certificate and key one after the
    other: until both belong together again, the pair before is shown. Raises ``SettingsError`` where a file cannot be
    read or used, or the key is another certificate's.
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        self._certificate, self._key, self._client_authority = certificate, key, client_authority
        self._paths = tuple(filter(None, (key, certificate, client_authority)))
        self._contents = self._shown = self._read()
        self._context = self._usable(self._contents)
        self._complaint = ""
        self._refreshing = threading.Lock()

    @property
    def context(self) -> ssl.SSLContext:
        """TLS of a new connection over HTTP."""
        self._refresh()
        return self._context

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Return the certificate of new connections over gRPC."""
        key, certificate, *authority = self._shown = self._contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], *authority)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return ``current()`` where it is another than the last one; asked by gRPC at each handshake."""
        self._refresh()
        return None if self._shown == self._contents else self.current()

    def validity(self) -> dict[str, Validity]:
        """Return, by setting, when the certificates in use are valid; of several in a file, the first to expire."""
        self._refresh()
        _, certificate, *authority = self._contents
        files = zip(("tls_cert", "tls_client_ca"), (certificate, *authority), strict=False)
        found = {setting: first_to_expire(content) for setting, content in files}
        return {setting: validity for setting, validity in found.items() if validity is not None}

    def _refresh(self) -> None:
        """Take over the files as they are now, where they can be used; else say so once, and keep those before."""
        with self._refreshing:
            try:
                contents = self._read()
                if contents != self._contents:
                    self._context = self._usable(contents)
                    self._contents = contents
                self._complaint = ""
            except SettingsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.error("certificate_not_renewed", reason=self._complaint, shown="the one before")

    def _usable(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # No password: a key that needs one is refused, not asked for on a terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
            if self._client_authority is not None:
                context.load_verify_locations(self._client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            reason, paths = getattr(error, "reason", None) or error, ", ".join(map(str, self._paths))
            raise SettingsError(f"the TLS files {paths} cannot be used: {reason}") from error
        if self._read() != contents:
            raise SettingsError("the TLS files are being replaced")
        return context

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise SettingsError(f"cannot read the TLS files: {error}") from error
