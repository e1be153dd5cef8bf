"""The HTTP side of a service, by aiohttp: metrics for Prometheus, the web page, and the JSON that it shows."""

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
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.server.access.gate import CALLER, Caller, Gate
from eplb_service.control.server.access.quotas import makes_room
from eplb_service.control.server.listening import Certificates, ListenError, StatusError, code_of
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.telemetry.logs import BoundedLog
from eplb_service.telemetry.metrics import Metrics

_SILENT = logging.Logger("eplb-http", logging.CRITICAL)
"""aiohttp's own log lines: callers without credentials could cause as many as they like."""

MAX_CONNECTIONS = 64
"""Connections at a time; for each further one the oldest of the host that has the most ends."""
_REQUEST_SECONDS = 10.0
"""Time within which the whole head of a request has come."""
_CONNECTION_SECONDS = 30.0
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_PREFIX = "/api/v1/"
_OPENMETRICS = "application/openmetrics-text"
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
PAGE = Path(__file__).parent / "page"
"""Folder of the page's files."""


@dataclass(eq=False)
class _Connection:
    """One connection of ``host``: the task of its handshake, and then its transport; whether its request has come."""

    host: str
    handshake: asyncio.Task[None] | None = None
    transport: asyncio.BaseTransport | None = None
    asked: bool = False

    @property
    def over(self) -> bool:
        """True once it is closed."""
        if self.transport is None:
            return self.handshake is not None and self.handshake.done()
        return self.transport.is_closing()

    def end(self) -> None:
        """Close it, whatever it is about."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def end_unless_asked(self) -> None:
        """Close it where its request has not come."""
        if not self.asked:
            self.end()


class HttpServer:
    """``host:port`` over HTTP, encrypted with ``certificates``, if any, while its context ``serving`` lasts.

    It has ``metrics`` at ``/metrics``, if given, and the page with its JSON if given ``operators``, who answer,
    and a ``gate``, which decides who may ask. With ``local_page`` only callers on this host get the page and its JSON.
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
        self._operators, self._gate = operators, gate
        self._certificates = certificates
        self._open: list[_Connection] = []
        self._expositions: dict[str, asyncio.Future[tuple[str, bytes]]] = {}
        self._log = BoundedLog(lambda: self._count("eplb_log_lines_left_out"))
        self._runner = web.AppRunner(
            self._application(), access_log=None, logger=_SILENT, lingering_time=0, shutdown_timeout=0.1
        )

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncIterator[str]:
        """Answer on a socket of ``listen_on`` as long as the context lasts; yields ``host:port`` with the real port."""
        host = self._address.rpartition(":")[0]
        await self._runner.setup()
        accepting = asyncio.create_task(self._accept(listener))
        try:
            yield f"{host}:{listener.getsockname()[1]}"
        finally:
            tasks = [accepting, *(one.handshake for one in self._open if one.handshake is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()
            await self._runner.cleanup()

    async def _accept(self, listener: socket.socket) -> None:
        """Let connections in, and end those that take too long, or the place of others."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, peer = await loop.sock_accept(listener)
            except OSError:
                # Too many files are open.
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._make_room()
            connection = _Connection(str(peer[0]))
            connection.handshake = asyncio.create_task(self._begin(connection, link))
            self._open.append(connection)
            loop.call_later(_REQUEST_SECONDS, connection.end_unless_asked)
            loop.call_later(_CONNECTION_SECONDS, connection.end)

    def _make_room(self) -> None:
        """End a connection where there are too many: slow ones must not keep out those that ask."""
        self._open = [one for one in self._open if not one.over]
        if len(self._open) < MAX_CONNECTIONS:
            return
        oldest = self._open.pop(makes_room([one.host for one in self._open]))
        oldest.end()
        self._count("eplb_refusals", "resource_exhausted")
        self._log.warning("connection_made_room", address=self._address, peer=oldest.host)

    def _count(self, name: str, *labels: str) -> None:
        if self._metrics is not None:
            self._metrics.count(name, *labels)

    async def _begin(self, connection: _Connection, link: socket.socket) -> None:
        """Encrypt a connection where asked for, and have aiohttp answer it."""
        assert self._runner.server is not None
        encryption: dict[str, Any] = {}
        if self._certificates is not None:
            encryption = {"ssl": self._certificates.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        with contextlib.suppress(OSError):
            loop = asyncio.get_running_loop()
            connection.transport, _ = await loop.connect_accepted_socket(
                self._runner.server, link, **encryption
            )

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._answered])
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
    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turn errors into JSON; each connection has one request."""
        for connection in self._open:
            connection.asked |= connection.transport is request.transport
        try:
            if self._local_page and request.path != "/metrics":
                _check_local(request)
            response: web.StreamResponse = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        except Exception:
            # Bounded, since a stranger may know a request that ends here.
            self._log.error("http_answer_failed", path=request.path[:256], exc_info=True)
            message = "the service could not answer; its log has the reason"
            response = web.json_response({"error": message}, status=500)
        response.force_close()
        return response

    async def _show_metrics(self, request: web.Request) -> web.Response:
        assert self._metrics is not None
        accept = _OPENMETRICS if _OPENMETRICS in request.headers.get("Accept", "") else ""
        making = self._expositions.get(accept)
        if making is None or making.done():
            # On a thread: with many ranks the text is long. Those who ask meanwhile get the same.
            making = asyncio.ensure_future(asyncio.to_thread(self._metrics.exposition, accept))
            self._expositions[accept] = making
        return _response(request, *await asyncio.shield(making))

    async def _show_json(self, request: web.Request) -> web.Response:
        host, token = _host_of(request), _token_of(request)
        self._check_reached_as(request.headers.get("Host", ""))
        if token and self._certificates is None and not _is_on_this_host(host):
            raise web.HTTPForbidden(
                text="a token is not taken in plain text from another host: serve the page with TLS (settings page "
                "and tls_cert), or come through a tunnel"
            )
        answer = await asyncio.wait_for(self._ask(request, token, host), _ANSWER_SECONDS)
        return _response(request, "application/json", await asyncio.to_thread(_json, answer))

    def _check_reached_as(self, host: str) -> None:
        """Another site's name that resolves to this machine must not make a browser read what only this machine may."""
        assert self._gate is not None
        named = host if host.rpartition("]")[2].count(":") else f"{host}:0"
        is_local = self._local_page or is_loopback(self._address)
        if is_local and not self._gate.credentials.are_asked_for and not is_loopback(named):
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
            CALLER.set(Caller(credential, host))
            return await getattr(self._operators, call)(asked, None)
        except (StatusError, RefusedError, WireError) as error:
            if path == "service" and not token and code_of(error) is grpc.StatusCode.UNAUTHENTICATED:
                # The page begins with this question, and asks for a token before it is refused anything.
                return {"token_required": True}
            self._gate.note_refusal(f"GET {_PREFIX}{call}", host, code_of(error), str(error))
            raise _ERRORS.get(code_of(error), web.HTTPBadRequest)(text=str(error)) from error


def listen_on(address: str, flag: str) -> socket.socket:
    """Listen on ``host:port``; raises ``ListenError``, which names ``--flag``, if that is not possible."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=128)
    except OSError as error:
        reason = error.strerror or error
        raise ListenError(f"cannot serve the {flag} on {address}: {reason}") from error
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
    raise web.HTTPNotFound(text="metrics are at /metrics; the page has an address of its own")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _host_of(request: web.Request) -> str:
    """Return the caller's address; raises ``HTTPException`` if the caller has gone."""
    if request.remote is None:
        raise web.HTTPBadRequest(text="the connection has ended")
    return request.remote


def _is_on_this_host(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _check_local(request: web.Request) -> None:
    """Raise ``HTTPException`` for a caller on another host."""
    if not _is_on_this_host(_host_of(request)):
        raise web.HTTPForbidden(
            text="without credentials only this host gets the web page and its figures: set credentials or auth_token, "
            "or come through a tunnel, such as ssh -L; /metrics is open"
        )


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
