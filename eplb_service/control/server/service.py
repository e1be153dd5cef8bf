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
from grpc_health.v1 import health, health_pb2

from eplb_service import __version__
from eplb_service.control.server.access.credentials import Credentials, shared_token
from eplb_service.control.server.access.gate import Gate
from eplb_service.control.server.access.in_flight import InFlight
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.deciding.priors import PriorError
from eplb_service.control.server.grpc_server import bound, certificates_of, grpc_server
from eplb_service.control.server.lease.choose import lease_of
from eplb_service.control.server.lease.interface import LeaseLostError
from eplb_service.control.server.lease.leadership import Leadership
from eplb_service.control.server.listening.probes import (
    ListenError,
    report_health,
    serve_health,
)
from eplb_service.control.server.operators.operator_api import OperatorService
from eplb_service.control.server.plane.bounds import pending_steps
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.settings import ServiceSettings, SettingsError
from eplb_service.control.server.short_pauses import short_pauses
from eplb_service.control.server.standby import stood_by
from eplb_service.control.server.store.store import Store
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.web.http_server import HttpServer, Served
from eplb_service.control.server.web.web_api import WebApi
from eplb_service.io.recording import Recording
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)

_TICK_SECONDS = 1.0
_GRACE_SECONDS = 2.0


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
        metrics.service.build.labels(__version__).set(1)
        metrics.service.leads.set(1)
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
        metrics.service.in_flight_bytes.set_function(lambda: in_flight.held)
        quotas = Quotas(settings.max_streams, settings.max_streams_per_peer, in_flight)
        gate = Gate(Credentials(fixed, settings.credentials), quotas, metrics, plane.log)
        operators = OperatorService(plane)
        certificates = certificates_of(settings)
        served = Served(metrics, WebApi(operators, gate), asyncio.get_running_loop(), certificates)
        metrics_address, page_url = _serve_http(settings, served, stack)
        server = grpc_server(settings, plane, operators, probes, gate, quotas)
        address = bound(server, settings, certificates)
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
    leadership = Leadership(lease_of(settings.lease, settings.lease_seconds), settings.lease_seconds)
    try:
        if await stood_by(settings, leadership, stop):
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
            for _ in plane.ticking():
                await asyncio.sleep(0)
        except Exception:
            _log.exception("tick_failed")
        due = loop.time() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        metrics.service.loop_delay.observe(max(0.0, loop.time() - due))


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
