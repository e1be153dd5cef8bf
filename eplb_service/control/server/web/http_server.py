"""HTTP server, based on aiohttp, for Prometheus metrics, the web page and the page's JSON data."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from eplb_core.wire.channel import is_loopback
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import operator_pb2
from eplb_core.wire.operator import as_document
from eplb_service import __version__
from eplb_service.control.core.errors import RejectedError
from eplb_service.control.server.access.gate import CALLER, Caller, Gate
from eplb_service.control.server.access.quotas import index_to_evict
from eplb_service.control.server.listening import CallError, Certificates, bound_socket, code_of, listen_error
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.telemetry.deployment_figures import explanations, figures_of
from eplb_service.telemetry.logs import BoundedLog
from eplb_service.telemetry.metrics import Metrics

_SILENT = logging.Logger("eplb-http", logging.CRITICAL)
"""Logger that discards aiohttp's own lines, because callers without credentials could trigger any number of them."""

MAX_CONNECTIONS = 64
"""Maximum number of open connections. Any further connection evicts the oldest one of the host with the most
connections."""
_REQUEST_SECONDS = 10.0
"""Time within which the complete header of a request must arrive."""
_CONNECTION_SECONDS = 30.0
_HANDSHAKE_SECONDS = 10.0
_RESPONSE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_PREFIX = "/api/v1/"
_OPENMETRICS = "application/openmetrics-text"
_HEADERS = {
    # The page loads nothing from other origins, runs no inline code, and cannot be framed.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": f"eplb/{__version__}",
}
_FIGURES = "deployments/{deployment}/figures"
_CALLS: dict[str, tuple[str, type[Any], dict[str, Any]]] = {
    "service": ("ListDeployments", operator_pb2.ListDeploymentsRequest, {}),
    "deployments": ("ListDeployments", operator_pb2.ListDeploymentsRequest, {}),
    "deployments/{deployment}": ("GetStatus", operator_pb2.GetStatusRequest, {}),
    _FIGURES: ("GetStatus", operator_pb2.GetStatusRequest, {}),
    "deployments/{deployment}/balance": ("GetBalance", operator_pb2.GetBalanceRequest, {}),
    "deployments/{deployment}/history": ("GetHistory", operator_pb2.GetHistoryRequest, {"limit": 20}),
}
"""Method of ``OperatorService`` with the type and default fields of its request, keyed by path. All of these methods
are read-only."""
_ERRORS: dict[grpc.StatusCode, type[web.HTTPException]] = {
    grpc.StatusCode.UNAUTHENTICATED: web.HTTPUnauthorized,
    grpc.StatusCode.PERMISSION_DENIED: web.HTTPForbidden,
    grpc.StatusCode.NOT_FOUND: web.HTTPNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: web.HTTPConflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: web.HTTPTooManyRequests,
}
PAGE = Path(__file__).parent / "page"
"""Directory of the web page's files."""


@dataclass(eq=False)
class _Connection:
    """One connection.

    Parameters
    ----------
    host
        Host of the caller.
    handshake
        Task that sets up the connection.
    transport
        Transport; ``None`` until the connection is set up.
    has_request
        True once its request has arrived.
    """

    host: str
    handshake: asyncio.Task[None] | None = None
    transport: asyncio.BaseTransport | None = None
    has_request: bool = False

    @property
    def over(self) -> bool:
        """True once the connection is closed."""
        if self.transport is None:
            return self.handshake is not None and self.handshake.done()
        return self.transport.is_closing()

    def end(self) -> None:
        """Close the connection, whatever its state."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def end_without_request(self) -> None:
        """Close the connection if its request has not arrived."""
        if not self.has_request:
            self.end()


class HttpServer:
    """HTTP server that runs while its context ``serving`` is open.

    Parameters
    ----------
    address
        ``host:port`` of the server.
    metrics
        Metrics to serve at ``/metrics``; ``None`` to serve no metrics.
    operators
        Operator service that provides the page's data; ``None`` to serve no page.
    gate
        The gate that authorises requests for the page's data; required with ``operators``.
    certificates
        TLS certificates; ``None`` for plain text.
    local_page
        True to serve the page and its data only to callers on this host.
    """

    def __init__(
        self,
        address: str,
        metrics: Metrics | None = None,
        operators: OperatorService | None = None,
        gate: Gate | None = None,
        certificates: Certificates | None = None,
        *,
        local_page: bool = False,
    ) -> None:
        self._address = address
        self._local_page = local_page
        self._metrics = metrics
        self._operators = operators
        self._gate = gate
        self._certificates = certificates
        self._open: list[_Connection] = []
        self._expositions: dict[str, asyncio.Future[tuple[str, bytes]]] = {}
        self._log = BoundedLog(lambda: self._count("eplb_log_lines_left_out"))
        self._runner = web.AppRunner(
            self._application(), access_log=None, logger=_SILENT, lingering_time=0, shutdown_timeout=0.1
        )

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[str]:
        """Serve on a socket from ``listen_on`` until the context exits; yield ``host:port`` with the bound port."""
        host = self._address.rpartition(":")[0]
        await self._runner.setup()
        accepting = asyncio.create_task(self._accept(listener))
        try:
            yield f"{host}:{listener.getsockname()[1]}"
        finally:
            tasks = [accepting, *filter(None, (connection.handshake for connection in self._open))]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()
            await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections, and close those that exceed a time limit or must make room for new ones."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, peer = await loop.sock_accept(listener)
            except OSError:
                # The process has too many open files.
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._make_room()
            connection = _Connection(str(peer[0]))
            connection.handshake = asyncio.create_task(self._begin(connection, client))
            self._open.append(connection)
            loop.call_later(_REQUEST_SECONDS, connection.end_without_request)
            loop.call_later(_CONNECTION_SECONDS, connection.end)

    def _make_room(self) -> None:
        """Evict a connection if there are too many, so that slow callers cannot keep others out."""
        self._open = [connection for connection in self._open if not connection.over]
        if len(self._open) < MAX_CONNECTIONS:
            return
        oldest = self._open.pop(index_to_evict([connection.host for connection in self._open]))
        oldest.end()
        self._count("eplb_refusals", "resource_exhausted")
        self._log.warning("connection_made_room", address=self._address, peer=oldest.host)

    def _count(self, name: str, *labels: str) -> None:
        if self._metrics is not None:
            self._metrics.count(name, *labels)

    async def _begin(self, connection: _Connection, client: socket.socket) -> None:
        """Pass a connection to aiohttp, after a TLS handshake if the server has certificates."""
        assert self._runner.server is not None
        encryption: dict[str, Any] = {}
        if self._certificates is not None:
            encryption = {"ssl": self._certificates.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        with contextlib.suppress(OSError):
            loop = asyncio.get_running_loop()
            connection.transport, _ = await loop.connect_accepted_socket(
                self._runner.server, client, **encryption
            )

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._handle])
        if self._metrics is not None:
            application.router.add_get("/metrics", self._show_metrics)
        if self._operators is not None:
            for path in _CALLS:
                application.router.add_get(_PREFIX + path, self._show_json)
            application.router.add_get("/", _show_page)
            application.router.add_static("/", PAGE)
        else:
            application.router.add_get("/{path:.*}", _show_nothing)
        application.on_response_prepare.append(_add_headers)
        return application

    @web.middleware
    async def _handle(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Call the handler, return errors as JSON, and close the connection after this one request."""
        for connection in self._open:
            connection.has_request |= connection.transport is request.transport
        try:
            if self._local_page and request.path != "/metrics":
                _check_local(request)
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        except Exception:
            # Use the rate-limited log, because a caller without credentials may be able to trigger this.
            self._log.error("http_answer_failed", path=request.path[:256], exc_info=True)
            message = "the request failed inside the service; see its log"
            response = web.json_response({"error": message}, status=500)
        response.force_close()
        return response

    async def _show_metrics(self, request: web.Request) -> web.Response:
        assert self._metrics is not None
        accept = _OPENMETRICS if _OPENMETRICS in request.headers.get("Accept", "") else ""
        exposition = self._expositions.get(accept)
        if exposition is None or exposition.done():
            # Render on a thread, because the text is long with many ranks. Concurrent requests share one result.
            exposition = asyncio.ensure_future(asyncio.to_thread(self._metrics.exposition, accept))
            self._expositions[accept] = exposition
        return _response(request, *await asyncio.shield(exposition))

    async def _show_json(self, request: web.Request) -> web.Response:
        host = _host_of(request)
        token = _token_of(request)
        self._check_host_header(request.headers.get("Host", ""))
        if token and self._certificates is None and not _is_on_this_host(host):
            raise web.HTTPForbidden(
                text="a token from another host is not accepted in plain text: serve the page with TLS (set page "
                "and tls_cert), or connect through a tunnel"
            )
        response = await asyncio.wait_for(self._call(request, token, host), _RESPONSE_SECONDS)
        return _response(request, "application/json", await asyncio.to_thread(_json, response))

    def _check_host_header(self, host: str) -> None:
        """Raise ``HTTPException`` if the server is reserved for this host but the request names a different host.

        This prevents DNS rebinding: a web site whose name resolves to this host could otherwise make a browser read the
        data.
        """
        assert self._gate is not None
        address = host if host.rpartition("]")[2].count(":") else f"{host}:0"
        is_local = self._local_page or is_loopback(self._address)
        if is_local and not self._gate.credentials.are_asked_for and not is_loopback(address):
            raise web.HTTPForbidden(text=f"access this service as localhost, not {host[:64]!r}")

    async def _call(self, request: web.Request, token: str, host: str) -> Any:
        """Call the operator service and return its message or document; raises ``HTTPException`` on errors."""
        assert self._gate is not None
        assert request.match_info.route.resource is not None
        path = request.match_info.route.resource.canonical.removeprefix(_PREFIX)
        call, kind, fields = _CALLS[path]
        message = kind(**request.match_info, **fields)
        try:
            credential = self._gate.admitted(
                f"/eplb.v1.OperatorService/{call}", token, _certificate_names(request)
            )
            credential.check_reach(message)
            if path == "service":
                return {"version": __version__}
            CALLER.set(Caller(credential, host))
            response = await getattr(self._operators, call)(message, None)
        except (CallError, RejectedError, WireError) as error:
            if path == "service" and not token and code_of(error) is grpc.StatusCode.UNAUTHENTICATED:
                # The page requests this path first, to find out whether it needs a token.
                return {"token_required": True}
            self._gate.note_refusal(f"GET {_PREFIX}{call}", host, code_of(error), str(error))
            raise _ERRORS.get(code_of(error), web.HTTPBadRequest)(text=str(error)) from error
        return figures_document(response) if path == _FIGURES else response


def listen_on(address: str, flag: str) -> socket.socket:
    """Return a socket that listens on ``address``; raises ``ListenError`` if that fails.

    Parameters
    ----------
    address
        ``host:port`` to listen on.
    flag
        Name of the setting, for the error message.
    """
    try:
        listener = bound_socket(address)
    except OSError as error:
        raise listen_error(f"cannot serve the {flag} on", address, flag, error) from error
    listener.setblocking(False)
    return listener


def _response(request: web.Request, kind: str, body: bytes) -> web.Response:
    response = web.Response(body=body, headers={"Content-Type": kind})
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


async def _show_page(_request: web.Request) -> web.FileResponse:
    return web.FileResponse(PAGE / "index.html")


async def _show_nothing(_request: web.Request) -> web.Response:
    raise web.HTTPNotFound(
        text="metrics are at /metrics; the web page has a separate address (see the `page` setting)"
    )


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _host_of(request: web.Request) -> str:
    """Return the caller's address; raises ``HTTPException`` if the connection was closed."""
    if request.remote is None:
        raise web.HTTPBadRequest(text="the connection was closed")
    return request.remote


def _is_on_this_host(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _check_local(request: web.Request) -> None:
    """Raise ``HTTPException`` for a caller on another host."""
    if not _is_on_this_host(_host_of(request)):
        raise web.HTTPForbidden(
            text="without credentials, the web page and its data are available only on the service's host: set "
            "credentials or auth_token, or connect through a tunnel (ssh -L); /metrics needs no credentials"
        )


def _token_of(request: web.Request) -> str:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind == "Bearer" else ""


def _certificate_names(request: web.Request) -> list[str]:
    """Return the names in the verified client certificate; empty without one."""
    transport = request.transport
    certificate = (transport.get_extra_info("peercert") if transport else None) or {}
    subject = [
        value
        for attributes in certificate.get("subject", ())
        for name, value in attributes
        if name == "commonName"
    ]
    return subject + [value for _, value in certificate.get("subjectAltName", ())]


def figures_document(response: operator_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return a deployment's figures, as text with explanations, in a JSON-compatible dictionary."""
    groups = figures_of(response.status)
    documents = {group: [figure._asdict() for figure in figures] for group, figures in groups.items()}
    return {**documents, "explanations": explanations(response.status)}


def _json(response: Any) -> bytes:
    document = response if isinstance(response, Mapping) else as_document(response)
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
