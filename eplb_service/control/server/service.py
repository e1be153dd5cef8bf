"""Starts and stops the whole service: store, metrics, gRPC server, planner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eplb_service import __version__
from eplb_service.control.server.agent_stream import AgentService, agent_handlers
from eplb_service.control.server.certificates import Certificates
from eplb_service.control.server.credentials import Credentials, shared_token
from eplb_service.control.server.gate import Gate
from eplb_service.control.server.http_server import HttpServer, Served
from eplb_service.control.server.in_flight import InFlight
from eplb_service.control.server.lease.choose import lease_of
from eplb_service.control.server.lease.interface import LeaseError
from eplb_service.control.server.lease.leadership import Leadership
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.control.server.plane import ControlPlane, pending_steps
from eplb_service.control.server.priors import PriorError
from eplb_service.control.server.probes import (
    AGENT_SERVICE,
    OPERATOR_SERVICE,
    ListenError,
    report_health,
    serve_health,
)
from eplb_service.control.server.quotas import Quotas
from eplb_service.control.server.settings import ServiceSettings, SettingsError
from eplb_service.control.server.standby import stood_by
from eplb_service.control.server.store import Store
from eplb_service.control.server.store_writer import StoreWriter
from eplb_service.control.server.web_api import WebApi
from eplb_service.io.recording import Recording
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.address import is_loopback
from eplb_service.wire.codec import MAX_MESSAGE_BYTES
from eplb_service.wire.generated import operator_pb2_grpc
from eplb_service.wire.parts import LARGEST_PART

_log = structlog.get_logger(__name__)

_TICK_SECONDS = 1.0
_GRACE_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS = 600.0
_WINDOW_BYTES = 64 << 10
_METADATA_BYTES = 8 << 10
_REFUSED_AT_A_TIME = 256


@dataclass(frozen=True)
class RunningService:
    """A service that answers.

    Parameters
    ----------
    address, metrics_address, health_address
        ``host:port`` where it listens, with the real ports; ``None`` where health has no port of its own.
    page_url
        Where browsers find the web page.
    plane
        Its deployments.
    warm
        Done when decisions can be made.
    """

    address: str
    metrics_address: str
    page_url: str
    health_address: str | None
    plane: ControlPlane
    warm: asyncio.Task[None]


@contextlib.asynccontextmanager
async def running_service(
    settings: ServiceSettings, leadership: Leadership | None = None
) -> AsyncIterator[RunningService]:
    """A service in this process and event loop, for as long as the context lasts.

    With a ``leadership``, which must be won, it has a higher leader term than those that led before it, and leaves its
    own to those after it. Raises ``ListenError``, ``StoreError``, ``SettingsError`` or ``LeaseError`` where it cannot
    start.
    """
    _check_free(settings.listen, "listen")
    _check_free(settings.metrics, "metrics")
    if settings.page is not None:
        _check_free(settings.page, "page")
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics()
        metrics.build.labels(__version__).set(1)
        metrics.leads.set(1)
        above = 0 if leadership is None else await leadership.highest_term()
        writer = StoreWriter(await asyncio.to_thread(Store, settings.store, above))
        stack.callback(writer.close)
        if leadership is not None:
            await leadership.announce(writer.store.leader_term)
        recording = None
        if settings.record is not None:
            recording = Recording(settings.record, pending_steps(settings))
            stack.callback(recording.close)
        try:
            plane = ControlPlane(settings, writer, metrics, recording)
        except PriorError as error:
            raise SettingsError(f"setting prior: {error}") from error
        stack.push_async_callback(plane.decider.close)
        await plane.resume()
        probes = health.aio.HealthServicer()
        token = settings.auth_token
        fixed = [shared_token(token.get_secret_value())] if token else []
        in_flight = InFlight(settings.max_in_flight_bytes, settings.max_message_bytes)
        metrics.in_flight_bytes.set_function(lambda: in_flight.held)
        quotas = Quotas(settings.max_streams, settings.max_streams_per_peer, in_flight)
        gate = Gate(Credentials(fixed, settings.credentials), quotas, metrics, plane.log)
        operators = OperatorService(plane)
        certificates = _certificates(settings)
        served = Served(metrics, WebApi(operators, gate), asyncio.get_running_loop(), certificates)
        metrics_address, page_url = _serve_http(settings, served, stack)
        server = _server(settings, plane, operators, probes, gate, quotas)
        address = _bind(server, settings, certificates)
        health_address = None
        if settings.health is not None:
            health_address = await serve_health(settings.health, probes, stack)
        await report_health(probes, health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        stack.push_async_callback(_shut_down, server, plane, probes)
        warm = asyncio.create_task(_warm_up(plane, probes))
        ticks = asyncio.create_task(_tick(plane, gate, metrics))
        stack.push_async_callback(_cancel, warm, ticks)
        _log.info("listening", address=address, metrics=metrics_address, leader_term=plane.leader_term)
        yield RunningService(address, metrics_address, page_url, health_address, plane, warm)


async def serve_until_stopped(settings: ServiceSettings, announce: Callable[[RunningService], None]) -> None:
    """Run until SIGTERM or SIGINT; ``announce`` is called with the ``RunningService`` once it listens.

    Where a lease is named, wait until it is held; raises ``LeaseError`` where it can be no lease, or is lost.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.lease is None:
        await _lead(settings, announce, stop, None)
        return
    leadership = Leadership(lease_of(settings.lease, settings.lease_seconds), settings.lease_seconds)
    try:
        if await stood_by(settings, leadership, stop):
            await _lead(settings, announce, stop, leadership)
    finally:
        await leadership.close()
    if leadership.lost.is_set():
        raise LeaseError(
            f"{leadership.described} is held by this service no longer; another one leads. "
            "Start it again to wait for the lease"
        )


async def _lead(
    settings: ServiceSettings,
    announce: Callable[[RunningService], None],
    stop: asyncio.Event,
    leadership: Leadership | None,
) -> None:
    """Serve until asked to stop, or until the lease is lost."""
    async with running_service(settings, leadership) as service:
        announce(service)
        over = [asyncio.create_task(stop.wait())]
        if leadership is not None:
            over.append(asyncio.create_task(leadership.lost.wait()))
        await asyncio.wait([*over, service.warm], return_when=asyncio.FIRST_COMPLETED)
        if service.warm.done():
            service.warm.result()
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(*over)
        _log.info("stopping")
    if service.plane.decider.computing:
        # All is closed, but the interpreter would wait for the kernels that are still being compiled or run.
        if leadership is not None:
            await leadership.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if stop.is_set() else 1)


def _server(
    settings: ServiceSettings,
    plane: ControlPlane,
    operators: OperatorService,
    probes: Any,
    gate: Gate,
    quotas: Quotas,
) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[gate],
        # Calls beyond max_streams are refused by the gate, which counts them, and a flood of them by the library.
        maximum_concurrent_rpcs=settings.max_streams + _REFUSED_AT_A_TIME,
        options=[
            ("grpc.max_receive_message_length", LARGEST_PART),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ("grpc.max_concurrent_streams", settings.max_streams_per_peer),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # A connection that says nothing ends; one that is served is kept up by its streams.
            ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.http2.settings_timeout", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
            # What a call sends before anybody reads it stays this small: windows do not grow by themselves.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # Two services on one port would share its connections unseen.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ],
    )
    server.add_generic_rpc_handlers((agent_handlers(AgentService(plane, quotas)),))
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operators, server)
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    names = (AGENT_SERVICE, OPERATOR_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _bind(server: grpc.aio.Server, settings: ServiceSettings, certificates: Certificates | None) -> str:
    if settings.insecure and not is_loopback(settings.listen):
        _log.warning("serving_insecurely", address=settings.listen)
    try:
        if certificates is None:
            bound = server.add_insecure_port(settings.listen)
        else:
            asks = settings.tls_client_ca is not None
            bound = server.add_secure_port(settings.listen, _credentials(certificates, asks))
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {settings.listen}: {error}; choose another with --listen"
        ) from error
    if not bound:
        raise ListenError(f"cannot listen on {settings.listen}; choose another with --listen")
    return f"{settings.listen.rpartition(':')[0]}:{bound}"


def _certificates(settings: ServiceSettings) -> Certificates | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _credentials(certificates: Certificates, asks_for_clients: bool) -> grpc.ServerCredentials:
    return grpc.dynamic_ssl_server_credentials(
        certificates.current(),
        certificates.changed,  # type: ignore[arg-type, unused-ignore]  # None means: the same as before
        asks_for_clients,
    )


def _serve_http(
    settings: ServiceSettings, served: Served, stack: contextlib.AsyncExitStack
) -> tuple[str, str]:
    """Metrics, in plain text, and the web page; the address of the first and the URL of the second."""
    if settings.page is None:
        both = _http(settings.metrics, "metrics", replace(served, tls=None), stack)
        return both, f"http://{both}/"
    page = _http(settings.page, "page", replace(served, metrics=None), stack)
    scheme = "http" if served.tls is None else "https"
    return _http(settings.metrics, "metrics", Served(served.metrics), stack), f"{scheme}://{page}/"


def _http(address: str, flag: str, served: Served, stack: contextlib.AsyncExitStack) -> str:
    try:
        server = HttpServer(*_split(address), served)
    except OSError as error:
        raise ListenError(f"cannot serve the {flag} on {address}: {error.strerror or error}") from error
    stack.callback(server.close)
    return f"{address.rpartition(':')[0]}:{server.port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_free(address: str, flag: str) -> None:
    """Raise ``ListenError`` where a port is taken, before the store counts this as a start."""
    host, port = _split(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: {error.strerror or error}; stop what listens there, or choose another "
            f"address with --{flag}"
        ) from error


async def _warm_up(plane: ControlPlane, probes: Any) -> None:
    await plane.decider.warm_up()
    await report_health(probes, health_pb2.HealthCheckResponse.SERVING)
    _log.info("warm")


async def _tick(plane: ControlPlane, gate: Gate, metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            gate.refresh()
            plane.tick()
        except Exception:
            _log.exception("tick_failed")
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        metrics.loop_delay.observe(max(0.0, loop.time() - due))


async def _shut_down(server: grpc.aio.Server, plane: ControlPlane, probes: Any) -> None:
    await probes.enter_graceful_shutdown()
    plane.streams.end_all("the service is stopping; connect again until it is back")
    plane.feed.close("the service is stopping")
    await server.stop(_GRACE_SECONDS)
    plane.remember_all()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
