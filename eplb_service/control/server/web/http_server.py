"""The HTTP side of a service, by aiohttp: metrics for Prometheus, the web page, and the JSON that it shows."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import grpc
import structlog
from aiohttp import web

from eplb_service import __version__
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.server.access.gate import Caller, Gate, acting_as
from eplb_service.control.server.listening import Certificates, ListenError, StatusError, code_of
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.channel import is_loopback
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.operator import as_document

_log = structlog.get_logger(__name__)
_SILENT = logging.Logger("eplb-http", logging.CRITICAL)
"""aiohttp's own log lines: callers without credentials could cause as many as they like."""

MOST_CONNECTIONS = 64
"""Connections at a time; further ones are turned away at once."""
_CONNECTION_SECONDS = 30.0
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_COMPRESSED_FROM_BYTES = 1024
_THREADS = 4
_PREFIX = "/api/v1/"
_HEADERS = {
    # Nothing of another origin is fetched, nothing inline runs, and no other page may frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": f"eplb/{__version__}",
}
_CALLS: dict[str, tuple[str, type[Any], dict[str, Any]]] = {
    "service": ("ListDeployments", operator_pb2.ListDeploymentsRequest, {}),
    "deployments": ("ListDeployments", operator_pb2.ListDeploymentsRequest, {}),
    "deployments/{deployment}": ("GetStatus", operator_pb2.GetStatusRequest, {}),
    "deployments/{deployment}/balance": ("GetBalance", operator_pb2.GetBalanceRequest, {}),
    "deployments/{deployment}/history": ("GetHistory", operator_pb2.GetHistoryRequest, {"limit": 20}),
}
"""Method of ``OperatorService`` and its request by path; they only read."""
_ERRORS: dict[grpc.StatusCode, type[web.HTTPException]] = {
    grpc.StatusCode.UNAUTHENTICATED: web.HTTPUnauthorized,
    grpc.StatusCode.PERMISSION_DENIED: web.HTTPForbidden,
    grpc.StatusCode.NOT_FOUND: web.HTTPNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: web.HTTPConflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: web.HTTPTooManyRequests,
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def _page_files() -> dict[str, tuple[str, bytes]]:
    folder = files("eplb_service.control.server.web").joinpath("page")
    kinds = {file.name: _KINDS.get(file.name.rpartition(".")[2]) for file in folder.iterdir()}
    found = {f"/{name}": (kind, folder.joinpath(name).read_bytes()) for name, kind in kinds.items() if kind}
    return found | {"/": found["/index.html"]}


PAGE_FILES = _page_files()
"""Media type and bytes of every file of the page by its path; ``/`` is its HTML."""


class HttpServer:
    """``host:port`` over HTTP, encrypted with ``certificates``, if any, while its context ``serving`` lasts.

    It has ``metrics`` at ``/metrics``, if given, and the page with its JSON if given ``operators``, who answer,
    and a ``gate``, which decides who may ask.
    """

    def __init__(
        self,
        address: str,
        metrics: Metrics | None = None,
        operators: OperatorService | None = None,
        gate: Gate | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._address = address
        self._metrics = metrics
        self._operators, self._gate = operators, gate
        self.certificates = certificates
        self._open: dict[asyncio.Transport, float] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "eplb-http")
        self._runner = web.AppRunner(
            self._application(), access_log=None, logger=_SILENT, lingering_time=0, shutdown_timeout=0.1
        )

    @contextlib.asynccontextmanager
    async def serving(self, flag: str) -> AsyncIterator[str]:
        """Answer as long as the context lasts; yields ``host:port`` with the real port.

        Raises ``ListenError``, which names ``--flag``, where it cannot listen.
        """
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        await self._runner.setup()
        try:
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            family, where = found[0][0], str(found[0][4][0])
            listener = await loop.create_server(
                lambda: _Connection(self), where, int(port), family=family, backlog=32
            )
        except OSError as error:
            reason = error.strerror or error
            raise ListenError(f"cannot serve the {flag} on {self._address}: {reason}") from error
        try:
            yield f"{host}:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for transport in self._open:
                transport.abort()
            await self._runner.cleanup()
            self._threads.shutdown(wait=False)

    def admit(self, transport: asyncio.Transport) -> bool:
        """Count a new connection, and end those that take too long; returns ``False`` where there are too many."""
        now = time.monotonic()
        for other, since in list(self._open.items()):
            if other.is_closing():
                del self._open[other]
            elif now - since > _CONNECTION_SECONDS:
                other.abort()
        if len(self._open) >= MOST_CONNECTIONS:
            return False
        self._open[transport] = now
        return True

    def hand_over(self, transport: asyncio.Transport, early: bytes) -> None:
        """Have aiohttp answer an admitted connection, on which ``early`` has been received."""
        assert self._runner.server is not None
        protocol = self._runner.server()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if early:
            protocol.data_received(early)

    async def encrypt(
        self, transport: asyncio.Transport, protocol: asyncio.Protocol
    ) -> asyncio.Transport | None:
        """Return the encrypted end of a connection; ``None`` where the handshake failed."""
        assert self.certificates is not None
        loop = asyncio.get_running_loop()
        try:
            context = await loop.run_in_executor(self._threads, self.certificates.context)
            return await loop.start_tls(
                transport, protocol, context, server_side=True, ssl_handshake_timeout=_HANDSHAKE_SECONDS
            )
        except OSError:
            return None

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._answered])
        if self._metrics is not None:
            application.router.add_get("/metrics", self._show_metrics)
        if self._operators is not None:
            for path in _CALLS:
                application.router.add_get(_PREFIX + path, self._show_json)
            for path in PAGE_FILES:
                application.router.add_get(path, self._show_file)
        application.router.add_get("/{path:.*}", self._show_nothing)
        application.on_response_prepare.append(_add_headers)
        return application

    @web.middleware
    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turn errors into JSON; each connection has one request."""
        try:
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        except Exception:
            _log.exception("http_answer_failed", path=request.path[:256])
            message = "the service could not answer; its log has the reason"
            response = web.json_response({"error": message}, status=500)
        response.force_close()
        return response

    async def _show_metrics(self, request: web.Request) -> web.Response:
        assert self._metrics is not None
        metrics, accept = self._metrics, request.headers.get("Accept", "")
        return await self._response(request, lambda: metrics.exposition(accept))

    async def _show_file(self, request: web.Request) -> web.Response:
        return await self._response(request, lambda: PAGE_FILES[request.path])

    async def _show_nothing(self, _request: web.Request) -> web.Response:
        elsewhere = "metrics are at /metrics; the page has an address of its own"
        here = "there is nothing here; the page is at /"
        raise web.HTTPNotFound(text=here if self._operators else elsewhere)

    async def _show_json(self, request: web.Request) -> web.Response:
        host, token = _host_of(request), _token_of(request)
        self._check_reached_as(request.headers.get("Host", ""))
        is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        if token and self.certificates is None and not is_local:
            raise web.HTTPForbidden(
                text="a token is not taken in plain text from another host: serve the page with TLS (settings page "
                "and tls_cert), or come through a tunnel"
            )
        answer = await asyncio.wait_for(self._ask(request, token, host), _ANSWER_SECONDS)
        return await self._response(request, lambda: ("application/json", _json(answer)))

    def _check_reached_as(self, host: str) -> None:
        """Another site's name that resolves to this machine must not make a browser read what only this machine may."""
        assert self._gate is not None
        named = host if host.rpartition("]")[2].count(":") else f"{host}:0"
        if is_loopback(self._address) and not self._gate.credentials.are_asked_for and not is_loopback(named):
            raise web.HTTPForbidden(text=f"this service is reached as localhost, not as {host[:64]!r}")

    async def _ask(self, request: web.Request, token: str, host: str) -> Any:
        """Return the message, or document, that answers a request; raises ``HTTPException``."""
        assert self._gate is not None
        assert request.match_info.route.resource is not None
        path = request.match_info.route.resource.canonical.removeprefix(_PREFIX)
        call, kind, fields = _CALLS[path]
        asked = kind(**request.match_info, **fields)
        try:
            credential = self._gate.admitted(
                f"/eplb.v1.OperatorService/{call}", token, _certificate_names(request)
            )
            credential.check_reach(asked)
            if path == "service":
                return {"version": __version__}
            with acting_as(Caller(credential, host)):
                return await getattr(self._operators, call)(asked, None)
        except (StatusError, RefusedError, WireError) as error:
            self._gate.note_refusal(f"GET {_PREFIX}{call}", host, code_of(error), str(error))
            raise _ERRORS.get(code_of(error), web.HTTPBadRequest)(text=str(error)) from error

    async def _response(self, request: web.Request, make: Callable[[], tuple[str, bytes]]) -> web.Response:
        """Make the body on a thread: long texts and their compression would hold the event loop."""
        zips = "gzip" in request.headers.get("Accept-Encoding", "")

        def made() -> web.Response:
            kind, body = make()
            headers = {"Content-Type": kind}
            if zips and len(body) >= _COMPRESSED_FROM_BYTES:
                body = gzip.compress(body, compresslevel=1)
                headers["Content-Encoding"] = "gzip"
            return web.Response(body=body, headers=headers)

        return await asyncio.get_running_loop().run_in_executor(self._threads, made)


class _Connection(asyncio.Protocol):
    """A new connection, until it is admitted, encrypted where asked for, and handed to aiohttp."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._server.admit(transport):
            transport.abort()
        elif self._server.certificates is None:
            self._server.hand_over(transport, b"")
        else:
            self._encrypting = asyncio.create_task(self._encrypt(transport))

    def data_received(self, data: bytes) -> None:
        """Keep what arrives with the end of the handshake."""
        self._early += data

    async def _encrypt(self, transport: asyncio.Transport) -> None:
        # Nothing is read before the handshake begins. Not earlier: Python 3.10 reads on after connection_made.
        transport.pause_reading()
        encrypted = await self._server.encrypt(transport, self)
        if encrypted is not None:
            self._server.hand_over(encrypted, self._early)


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _host_of(request: web.Request) -> str:
    return str(request.remote)


def _token_of(request: web.Request) -> str:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind == "Bearer" else ""


def _certificate_names(request: web.Request) -> list[str]:
    """Return the names in the client certificate that was verified; none without one."""
    transport = request.transport
    certificate = (transport.get_extra_info("peercert") if transport else None) or {}
    subject = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]
    return subject + [value for _, value in certificate.get("subjectAltName", ())]


def _json(answer: Any) -> bytes:
    document = answer if isinstance(answer, Mapping) else as_document(answer)
    return json.dumps(_finite(document), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    """Return the document with ``None`` for the ratios that there are not."""
    if isinstance(value, Mapping):
        return {name: _finite(of_name) for name, of_name in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124 - NaN alone
