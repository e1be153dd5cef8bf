"""Start-up and shutdown of the whole service: store, metrics, gRPC server and planner."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eplb_core.solver.warmup import warm_up
from eplb_core.wire.channel import is_loopback
from eplb_core.wire.codec import MAX_MESSAGE_BYTES, MAX_PART
from eplb_core.wire.generated import operator_pb2_grpc
from eplb_service import __version__
from eplb_service.control.server.access.gate import Credentials, Gate
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.agents import AgentService, agent_handlers
from eplb_service.control.server.deciding.priors import PriorError, Priors
from eplb_service.control.server.lease.errors import LeaseLostError
from eplb_service.control.server.lease.leadership import LEASE_SECONDS, Leadership, named_lease
from eplb_service.control.server.listening import (
    AGENT_SERVICE,
    OPERATOR_SERVICE,
    Certificates,
    ListenError,
    listen_error,
    report_health,
    serve_health,
)
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.settings import ServiceSettings, SettingsError, default_store
from eplb_service.control.server.store import Store, StoreWriter
from eplb_service.control.server.store_file import StoreError
from eplb_service.control.server.store_lock import lock_store
from eplb_service.control.server.web.http_server import HttpServer, listen_on
from eplb_service.telemetry.logs import BoundedLog, bounding_library_logs
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)

_MANY_RANKS = 64
"""Number of additional ranks after which all existing objects are exempted from garbage collection. The streams of
1,000 ranks comprise 150,000 objects, and one collection that visits them takes 0.1 s."""
_TICK_SECONDS = 1.0
_GRACE_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS = 10.0
_WINDOW_BYTES = 64 << 10
_METADATA_BYTES = 8 << 10
_MAX_REJECTIONS = 256
"""Maximum number of concurrent calls beyond ``max_streams`` that still reach the gate, which rejects and counts
them."""


@dataclass(frozen=True)
class RunningService:
    """A service that accepts calls.

    Parameters
    ----------
    address
        ``host:port`` for agents and operators, with the port that was bound.
    metrics_address
        ``host:port`` of ``/metrics``, with the port that was bound.
    page_url
        URL of the web page.
    health_address
        ``host:port`` of the health checks, with the port that was bound; ``None`` if the setting ``health`` is not set.
    plane
        The control plane.
    warm
        Task that ends once the kernels are compiled and decisions can be made.
    """

    address: str
    metrics_address: str
    page_url: str
    health_address: str | None
    plane: ControlPlane
    warm: asyncio.Task[None]


@contextlib.asynccontextmanager
async def run_service(
    settings: ServiceSettings, leadership: Leadership | None = None
) -> AsyncIterator[RunningService]:
    """Run a service in this process and event loop until the context exits.

    Raises ``ListenError``, ``StoreError``, ``SettingsError`` or ``LeaseError`` if it cannot start.

    Parameters
    ----------
    settings
        Settings of the service.
    leadership
        Leadership that this service has acquired; ``None`` without a lease. With a lease, the service uses a higher
        leader term than all previous leaders and records it for its successors.
    """
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics()
        log = BoundedLog(lambda: metrics.count("eplb_log_lines_left_out"))
        stack.enter_context(bounding_library_logs(log))
        # Check the settings and bind the ports before opening the store, so that a failed start creates no store.
        priors = _load_priors(settings)
        quotas = Quotas(settings.max_streams, settings.max_streams_per_peer)
        token = settings.auth_token.get_secret_value() if settings.auth_token else ""
        gate = Gate(Credentials(token, settings.credentials), quotas, metrics, log)
        certificates = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            certificates = Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        listeners = [stack.enter_context(listen_on(settings.metrics, "metrics"))]
        if settings.page is not None:
            listeners.append(stack.enter_context(listen_on(settings.page, "page")))
        server, address = _bound_server(settings, gate, certificates)
        probes = health.aio.HealthServicer()
        await report_health(probes, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_address = None
        if settings.health is not None:
            health_address = await serve_health(settings.health, probes, gate, stack)
        writer = await _open_store(stack, settings, metrics, leadership)
        plane = ControlPlane(settings, writer, metrics, log, priors)
        stack.push_async_callback(plane.decider.close)
        await plane.resume()
        metrics_address, page_url = await _serve_http(
            stack, settings, metrics, plane, gate, certificates, listeners
        )
        _add_services(server, plane, probes, quotas)
        await server.start()
        stack.push_async_callback(_shut_down, server, plane, probes)
        warm = asyncio.create_task(_warm_up(plane, probes))
        ticks = asyncio.create_task(_tick(plane, gate, metrics, certificates))
        stack.push_async_callback(_cancel, warm, ticks)
        _log.info("listening", address=address, metrics=metrics_address, leader_term=plane.leader_term)
        yield RunningService(address, metrics_address, page_url, health_address, plane, warm)


def _load_priors(settings: ServiceSettings) -> Priors:
    try:
        return Priors(settings.prior or "", settings.window_steps)
    except PriorError as error:
        raise SettingsError(f"setting prior: {error}") from error


async def _open_store(
    stack: contextlib.AsyncExitStack,
    settings: ServiceSettings,
    metrics: Metrics,
    leadership: Leadership | None,
) -> StoreWriter:
    """Open the store, to be closed when ``stack`` unwinds, and announce its leader term to later leaders."""
    highest_term = 0 if leadership is None else await leadership.highest_term()
    path = _store_path(settings)
    stack.enter_context(lock_store(path, settings.lease))
    store = await asyncio.to_thread(Store, path, highest_term)
    writer = StoreWriter(store, lambda: metrics.count("eplb_store_failures"))
    stack.callback(writer.close)
    if leadership is not None:
        await leadership.announce(store.leader_term)
    return writer


def _store_path(settings: ServiceSettings) -> str:
    """Return the path of the store, creating the default store's directory; raises ``StoreError`` if that fails."""
    if settings.store is not None:
        return settings.store
    path = default_store()
    if Path("eplb-state.sqlite3").exists():
        _log.warning(
            "store_moved", path=str(path), reason="eplb-state.sqlite3 in the current folder is no longer used"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot create the folder for the store {str(path)!r}: {error.strerror}; specify another one with --store"
        ) from error
    return str(path)


def _add_services(server: grpc.aio.Server, plane: ControlPlane, probes: Any, quotas: Quotas) -> None:
    """Add all gRPC services to a server that has not started yet."""
    server.add_generic_rpc_handlers((agent_handlers(AgentService(plane, quotas)),))
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(OperatorService(plane), server)
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    names = (AGENT_SERVICE, OPERATOR_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _bound_server(
    settings: ServiceSettings, gate: Gate, certificates: Certificates | None
) -> tuple[grpc.aio.Server, str]:
    """Create a gRPC server behind ``gate`` and bind its port, without adding services or starting it.

    Returns
    -------
    tuple of grpc.aio.Server and str
        The server, and its ``host:port`` with the port that was bound.
    """
    server = grpc.aio.server(
        interceptors=[gate],
        # The gate rejects and counts calls beyond max_streams. gRPC itself rejects floods of calls or connections.
        maximum_concurrent_rpcs=settings.max_streams + _MAX_REJECTIONS,
        options=[
            ("grpc.max_receive_message_length", MAX_PART),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_allowed_incoming_connections", settings.max_streams + _MAX_REJECTIONS),
            ("grpc.max_concurrent_streams", settings.max_streams_per_peer),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
            # Close connections that send nothing or open no call. Open streams keep a connection alive.
            ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.http2.settings_timeout", int(1000 * _HANDSHAKE_SECONDS)),
            ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
            # Fixed flow-control windows limit how much a call can send before the server reads it.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            # With SO_REUSEPORT, a second service could bind the same port and silently share the connections.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ],
    )
    if settings.insecure and not is_loopback(settings.listen):
        _log.warning("serving_insecurely", address=settings.listen)
    try:
        if certificates is None:
            port = server.add_insecure_port(settings.listen)
        else:
            credentials = grpc.dynamic_ssl_server_credentials(
                certificates.current(),
                certificates.changed,  # type: ignore[arg-type, unused-ignore]  # None means unchanged
                settings.tls_client_ca is not None,
            )
            port = server.add_secure_port(settings.listen, credentials)
    except RuntimeError as error:
        raise listen_error("cannot listen on", settings.listen, "listen", error) from error
    return server, f"{settings.listen.rpartition(':')[0]}:{port}"


async def _serve_http(
    stack: contextlib.AsyncExitStack,
    settings: ServiceSettings,
    metrics: Metrics,
    plane: ControlPlane,
    gate: Gate,
    certificates: Certificates | None,
    listeners: Sequence[socket.socket],
) -> tuple[str, str]:
    """Serve metrics in plain text, and the web page at the same address or a separate one.

    Without credentials, only callers on this host can open the page, unless the setting ``insecure`` marks the network
    as trusted.

    Returns
    -------
    tuple of str and str
        ``host:port`` of the metrics, and the URL of the page.
    """
    operators = OperatorService(plane)
    local_page = not (gate.credentials.are_asked_for or settings.insecure)
    shared = (operators, gate) if settings.page is None else (None, None)
    server = HttpServer(settings.metrics, metrics, *shared, local_page=local_page)
    address = page = await stack.enter_async_context(server.serving(listeners[0]))
    if settings.page is not None:
        server = HttpServer(settings.page, None, operators, gate, certificates, local_page=local_page)
        page = await stack.enter_async_context(server.serving(listeners[1]))
    if local_page and not is_loopback(page):
        _log.warning("page_for_this_host_only", reason="no credentials are configured", address=page)
        page = f"127.0.0.1:{page.rpartition(':')[2]}"
    encrypted = settings.page is not None and certificates is not None
    return address, f"{'https' if encrypted else 'http'}://{page}/"


async def serve_until_stopped(settings: ServiceSettings, announce: Callable[[RunningService], None]) -> None:
    """Run a service until SIGTERM or SIGINT.

    With a lease, first wait until this service holds it. Raises ``LeaseError`` if the lease cannot be used, and
    ``LeaseLostError`` if it is lost.

    Parameters
    ----------
    settings
        Settings of the service.
    announce
        Function called once the service accepts calls.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.lease is None:
        await _lead(settings, announce, stop, None)
        return
    leadership = Leadership(named_lease(settings.lease, LEASE_SECONDS), LEASE_SECONDS)
    try:
        if await _wait_until_leader(settings, leadership, stop):
            await _lead(settings, announce, stop, leadership)
    finally:
        await leadership.close()
    if leadership.lost.is_set():
        raise LeaseLostError(
            f"this service has lost {leadership.described}, and another service is now leading; restart this service "
            "to wait for the lease"
        )


async def _lead(
    settings: ServiceSettings,
    announce: Callable[[RunningService], None],
    stop: asyncio.Event,
    leadership: Leadership | None,
) -> None:
    """Serve until ``stop`` is set or the lease is lost."""
    async with run_service(settings, leadership) as service:
        announce(service)
        endings = [asyncio.create_task(stop.wait())]
        if leadership is not None:
            endings.append(asyncio.create_task(leadership.lost.wait()))
        await asyncio.wait([*endings, service.warm], return_when=asyncio.FIRST_COMPLETED)
        if service.warm.done():
            service.warm.result()
            # The compiler leaves about 100,000 objects. Freeze them, so that no later collection visits them.
            gc.collect()
            gc.freeze()
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(*endings)
        _log.info("stopping")
    if service.plane.decider.computing:
        # Everything is closed, but a regular exit would wait for planner threads that cannot be interrupted.
        if leadership is not None:
            await leadership.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if stop.is_set() else 1)


async def _wait_until_leader(settings: ServiceSettings, leadership: Leadership, stop: asyncio.Event) -> bool:
    """Wait until this service holds the lease or ``stop`` is set; return True if it holds the lease.

    While it waits, the service compiles its kernels and answers health checks and metrics scrapes, but ranks cannot
    connect to it.
    """
    serving = health_pb2.HealthCheckResponse
    probes = health.aio.HealthServicer()
    metrics = Metrics()
    metrics.show([("eplb_build_info", 1, __version__), ("eplb_leads", 0)])

    async def win() -> None:
        await asyncio.to_thread(warm_up, settings.planner().threads)
        await report_health(probes, serving.NOT_SERVING, ready=serving.SERVING)
        await leadership.won()

    log = BoundedLog(lambda: metrics.count("eplb_log_lines_left_out"))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(bounding_library_logs(log))
        try:
            listener = listen_on(settings.metrics, "metrics")
            await stack.enter_async_context(HttpServer(settings.metrics, metrics).serving(listener))
            if settings.health is not None:
                await report_health(probes, serving.NOT_SERVING)
                gate = Gate(Credentials(), Quotas(1, 1), metrics, log)
                await serve_health(settings.health, probes, gate, stack)
        except ListenError as error:
            # If both services run on one host, the leader may already use these ports.
            _log.warning("standing_by_unseen", reason=str(error))
        winning = asyncio.create_task(win())
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([winning, stopping], return_when=asyncio.FIRST_COMPLETED)
        await _cancel(winning, stopping)
    if winning in done:
        winning.result()
    return winning in done and not stop.is_set()


async def _warm_up(plane: ControlPlane, probes: Any) -> None:
    await plane.decider.warm_up()
    await report_health(probes, health_pb2.HealthCheckResponse.SERVING)
    _log.info("warm")


async def _tick(plane: ControlPlane, gate: Gate, metrics: Metrics, certificates: Certificates | None) -> None:
    """Check credentials and deadlines and update the metrics every second.

    Objects of newly connected ranks are exempted from garbage collection.
    """
    loop = asyncio.get_running_loop()
    frozen_ranks = 0
    while True:
        try:
            gate.refresh()
            for _ in plane.ticking(certificates.validity() if certificates else {}):
                await asyncio.sleep(0)
            ranks = sum(len(deployment.connected) for deployment in plane.deployments.values())
            frozen_ranks = min(frozen_ranks, ranks)
            if ranks >= frozen_ranks + _MANY_RANKS:
                gc.collect(1)
                gc.freeze()
                frozen_ranks = ranks
        except Exception:
            _log.exception("tick_failed")
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        metrics.observe("eplb_loop_delay_seconds", max(0.0, loop.time() - due))


async def _shut_down(server: grpc.aio.Server, plane: ControlPlane, probes: Any) -> None:
    await probes.enter_graceful_shutdown()
    plane.streams.end_all("the service is stopping; reconnect once it is back")
    plane.feed.close("the service is stopping")
    await server.stop(_GRACE_SECONDS)
    plane.save_all()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
