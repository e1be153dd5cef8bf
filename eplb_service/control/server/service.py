"""Starts and stops the whole service: store, metrics, gRPC server, planner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2

from eplb_service import __version__
from eplb_service.control.server.access.gate import Credentials, Gate
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.deciding.computing import PriorError
from eplb_service.control.server.grpc_server import grpc_server
from eplb_service.control.server.lease.leadership import (
    LEASE_SECONDS,
    Leadership,
    LeaseLostError,
    named_lease,
)
from eplb_service.control.server.listening import Certificates, ListenError, report_health, serve_health
from eplb_service.control.server.memory import short_pauses
from eplb_service.control.server.operator_api import OperatorService
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.plane.deployments import limits_of
from eplb_service.control.server.settings import ServiceSettings, SettingsError
from eplb_service.control.server.store.store import Store, StoreWriter
from eplb_service.control.server.web.http_server import HttpServer
from eplb_service.io.recorder import Recording
from eplb_service.solver.warmup import warm_up
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)

_TICK_SECONDS = 1.0
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class RunningService:
    """A service that answers, with the real ports of its addresses; ``warm`` is done when decisions can be made."""

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
    """A service in this process and event loop, as long as the context lasts.

    With a ``leadership``, which must be won, it has a higher leader term than those that led before it, and leaves its
    own to those after it. Raises ``ListenError``, ``StoreError``, ``SettingsError`` or ``LeaseError`` where it cannot
    start.
    """
    for flag in ("listen", "metrics", "page"):
        if (address := getattr(settings, flag)) is not None:
            _check_free(address, flag)
    async with contextlib.AsyncExitStack() as stack:
        metrics = _metrics(leads=True)
        above = 0 if leadership is None else await leadership.highest_term()
        writer = StoreWriter(await asyncio.to_thread(Store, settings.store, above))
        stack.callback(writer.close)
        if leadership is not None:
            await leadership.announce(writer.store.leader_term)
        recording = None
        if settings.record is not None:
            recording = Recording(settings.record, limits_of(settings).pending_steps)
            stack.callback(recording.close)
        try:
            plane = ControlPlane(settings, writer, metrics, recording)
        except PriorError as error:
            raise SettingsError(f"setting prior: {error}") from error
        stack.push_async_callback(plane.decider.close)
        await plane.resume()
        probes = health.aio.HealthServicer()
        quotas = Quotas(
            settings.max_streams,
            settings.max_streams_per_peer,
            settings.in_flight_bytes,
            settings.max_message_bytes,
        )
        token = settings.auth_token.get_secret_value() if settings.auth_token else ""
        gate = Gate(Credentials(token, settings.credentials), quotas, metrics, plane.log)
        operators = OperatorService(plane)
        certificates = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            certificates = Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        metrics_address, page_url = await _serve_http(stack, settings, metrics, operators, gate, certificates)
        server, address = grpc_server(settings, plane, operators, probes, gate, quotas, certificates)
        health_address = None
        if settings.health is not None:
            health_address = await serve_health(settings.health, probes, stack)
        await report_health(probes, health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        stack.push_async_callback(_shut_down, server, plane, probes)
        warm = asyncio.create_task(_warm_up(plane, probes))
        ticks = asyncio.create_task(_tick(plane, gate, quotas, metrics))
        stack.push_async_callback(_cancel, warm, ticks)
        _log.info("listening", address=address, metrics=metrics_address, leader_term=plane.leader_term)
        yield RunningService(address, metrics_address, page_url, health_address, plane, warm)


async def _serve_http(
    stack: contextlib.AsyncExitStack,
    settings: ServiceSettings,
    metrics: Metrics,
    operators: OperatorService,
    gate: Gate,
    certificates: Certificates | None,
) -> tuple[str, str]:
    """Serve metrics, and the page where it shares their address, in plain text; returns their address and its URL."""
    shared = (operators, gate) if settings.page is None else (None, None)
    server = HttpServer(settings.metrics, metrics, *shared)
    address = await stack.enter_async_context(server.serving("metrics"))
    if settings.page is None:
        return address, f"http://{address}/"
    server = HttpServer(settings.page, None, operators, gate, certificates)
    page = await stack.enter_async_context(server.serving("page"))
    return address, f"{'http' if certificates is None else 'https'}://{page}/"


async def serve_until_stopped(settings: ServiceSettings, announce: Callable[[RunningService], None]) -> None:
    """Run until SIGTERM or SIGINT; ``announce`` is called with the ``RunningService`` once it listens.

    Where a lease is named, wait until it is held; raises ``LeaseError`` where it can be no lease, and
    ``LeaseLostError`` where it is lost.
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
            async with short_pauses() as set_aside:
                _log.info("settled", objects=set_aside)
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


async def _wait_until_leader(settings: ServiceSettings, leadership: Leadership, stop: asyncio.Event) -> bool:
    """Wait until the lease is held, or ``stop`` is set; returns whether it is held.

    A waiting service answers probes and scrapes, compiles its kernels, and is not reached by ranks.
    """
    probes = health.aio.HealthServicer()
    async with _standing_by(settings, probes):
        won = asyncio.create_task(_win(settings, leadership, probes))
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([won, stopped], return_when=asyncio.FIRST_COMPLETED)
        await _cancel(won, stopped)
        if won in done:
            won.result()
    return won in done and not stop.is_set()


async def _win(settings: ServiceSettings, leadership: Leadership, probes: Any) -> None:
    await asyncio.to_thread(warm_up, settings.planner().threads)
    serving = health_pb2.HealthCheckResponse
    await report_health(probes, serving.NOT_SERVING, ready=serving.SERVING)
    await leadership.won()


@contextlib.asynccontextmanager
async def _standing_by(settings: ServiceSettings, probes: Any) -> AsyncIterator[None]:
    """Answer probes and scrapes where the ports are free: on one host they may be the leader's."""
    async with contextlib.AsyncExitStack() as stack:
        server = HttpServer(settings.metrics, _metrics(leads=False))
        try:
            await stack.enter_async_context(server.serving("metrics"))
            if settings.health is not None:
                await report_health(probes, health_pb2.HealthCheckResponse.NOT_SERVING)
                await serve_health(settings.health, probes, stack)
        except ListenError as error:
            _log.warning("standing_by_unseen", reason=str(error))
        yield


def _metrics(leads: bool) -> Metrics:
    metrics = Metrics()
    metrics.set("eplb_build_info", 1, __version__)
    metrics.set("eplb_leads", leads)
    return metrics


def _check_free(address: str, flag: str) -> None:
    """Raise ``ListenError`` where a port is taken, before the store counts this as a start."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
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


async def _tick(plane: ControlPlane, gate: Gate, quotas: Quotas, metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            gate.refresh()
            metrics.set("eplb_in_flight_bytes", quotas.held)
            for _ in plane.ticking():
                await asyncio.sleep(0)
        except Exception:
            _log.exception("tick_failed")
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        metrics.observe("eplb_loop_delay_seconds", max(0.0, loop.time() - due))


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
