"""The HTTP side of a service: metrics for Prometheus, the web page, and the JSON that it shows.

Requests are read on threads of their own, few and for a bounded time; answers are made on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import structlog

from eplb_service import __version__
from eplb_service.control.server.listening.certificates import Certificates
from eplb_service.control.server.web.page_files import PAGE_FILES, Content
from eplb_service.control.server.web.web_api import PREFIX, HttpError, WebApi
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.address import is_loopback
from eplb_service.wire.document import as_document

_log = structlog.get_logger(__name__)

MOST_CONNECTIONS = 64
"""Connections at a time; who comes beyond is turned away at once."""
_CONNECTION_SECONDS = 30.0
_SOCKET_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_COMPRESSED_FROM_BYTES = 1024
_HEADERS = {
    # Nothing of another origin is fetched, nothing inline runs, and no other page may frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Served:
    """What one address answers with; ``None`` for what it does not have.

    Parameters
    ----------
    metrics
        At ``/metrics``.
    api, loop
        The page at ``/`` and the JSON behind it, and the loop that the JSON is made on.
    tls
        What connections are encrypted with.
    """

    metrics: Metrics | None = None
    api: WebApi | None = None
    loop: asyncio.AbstractEventLoop | None = None
    tls: Certificates | None = None


class HttpServer:
    """A running server; raises ``OSError`` where it cannot listen.

    Parameters
    ----------
    host, port
        Where; port 0 takes a free one.
    served
        What it answers with.
    """

    def __init__(self, host: str, port: int, served: Served) -> None:
        self._server = _Server(host, port, served)
        self._thread = threading.Thread(target=self._server.serve_forever, name="eplb-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, host: str, port: int, served: Served) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self.served = served
        self.on_loopback = is_loopback(f"{host}:{port}")
        self._open: dict[socket.socket, tuple[float, socket.socket]] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are too many; those that take too long end."""
        now = time.monotonic()
        with self._lock:
            for since, other in self._open.values():
                if now - since > _CONNECTION_SECONDS:
                    with contextlib.suppress(OSError):
                        other.shutdown(socket.SHUT_RDWR)
            if len(self._open) >= MOST_CONNECTIONS:
                super().shutdown_request(request)
                return
            self._open[request] = now, request
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the connection's thread: encrypt it where that is asked for, then answer."""
        request.settimeout(_SOCKET_SECONDS)
        if self.served.tls is None:
            super().finish_request(request, client_address)
            return
        wrap = self.served.tls.context().wrap_socket
        with wrap(request, server_side=True, do_handshake_on_connect=False) as encrypted:
            with self._lock:
                self._open[request] = time.monotonic(), encrypted
            encrypted.do_handshake()
            super().finish_request(encrypted, client_address)  # type: ignore[arg-type, unused-ignore]

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """What strangers send is none of the log's business, and what went wrong here is debugged there."""
        _log.debug("http_request_failed", peer=client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"eplb/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """Metrics, a file of the page, or JSON."""
        status, content = HTTPStatus.OK, None
        try:
            content = self._content(unquote(urlsplit(self.path).path))
        except HttpError as error:
            status, content = error.status, _json({"error": str(error)})
        except Exception:
            _log.exception("http_answer_failed", path=self.path[:256])
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            content = _json({"error": "the service could not answer; its log has the reason"})
        self._send(status, content)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a scrape every few seconds is no news."""

    def _content(self, path: str) -> Content:
        served = self.server.served
        if path == "/metrics" and served.metrics is not None:
            kind, body = served.metrics.exposition(self.headers.get("Accept", ""))
            return Content(kind, body)
        if served.api is None:
            raise HttpError(
                HTTPStatus.NOT_FOUND, "metrics are at /metrics; the page has an address of its own"
            )
        if path.startswith(PREFIX):
            self._refuse_other_sites(served.api)
            return _json(self._ask(served, path.removeprefix(PREFIX)))
        if path not in PAGE_FILES:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is nothing here; the page is at /")
        return PAGE_FILES[path]

    def _refuse_other_sites(self, api: WebApi) -> None:
        """Another site's name that resolves to this machine must not make a browser read what only this machine may."""
        host = self.headers.get("Host", "")
        if self.server.on_loopback and not api.asks_for_credentials and not is_loopback(_with_port(host)):
            raise HttpError(
                HTTPStatus.FORBIDDEN, f"this service is reached as localhost, not as {host[:64]!r}"
            )

    def _ask(self, served: Served, path: str) -> Mapping[str, Any]:
        assert served.api is not None
        assert served.loop is not None
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        token = token.strip() if kind == "Bearer" else ""
        host = str(self.client_address[0])
        if token and served.tls is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise HttpError(
                HTTPStatus.FORBIDDEN,
                "a token is not taken in plain text from another host: serve the page with TLS (settings page and "
                "tls_cert), or come through a tunnel",
            )
        asked = served.api.answer(path, token, _names(self.connection), host)
        answer = asyncio.run_coroutine_threadsafe(asked, served.loop).result(_ANSWER_SECONDS)
        return answer if isinstance(answer, Mapping) else as_document(answer)

    def _send(self, status: HTTPStatus, content: Content) -> None:
        body = content.body
        self.send_response(status)
        if len(body) >= _COMPRESSED_FROM_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _json(document: Mapping[str, Any]) -> Content:
    body = json.dumps(_finite(document), allow_nan=False, separators=(",", ":"))
    return Content("application/json", body.encode())


def _finite(value: Any) -> Any:
    """The same with ``None`` for ratios that there are not."""
    if isinstance(value, Mapping):
        return {name: _finite(of_name) for name, of_name in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124 - NaN alone


def _names(connection: Any) -> list[str]:
    """Names in the client certificate that was verified; none without one."""
    if not isinstance(connection, ssl.SSLSocket):
        return []
    certificate: Any = connection.getpeercert() or {}
    subject = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]
    return subject + [value for _, value in certificate.get("subjectAltName", ())]


def _with_port(host: str) -> str:
    return host if host.rpartition("]")[2].count(":") else f"{host}:0"
