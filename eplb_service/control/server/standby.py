"""A service that waits to lead: alive and seen, its kernels compiled, but nothing that ranks could reach."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import structlog
from grpc_health.v1 import health, health_pb2

from eplb_service import __version__
from eplb_service.control.server.lease.leadership import Leadership
from eplb_service.control.server.listening.probes import ListenError, report_health, serve_health
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.web.http_server import HttpServer, Served
from eplb_service.solver.warmup import warm_up
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


async def stood_by(settings: ServiceSettings, leadership: Leadership, stop: asyncio.Event) -> bool:
    """Wait until the lease is held, or ``stop`` is set; whether it is held.

    Kernels are compiled first: who takes the lease can decide at once.
    """
    probes = health.aio.HealthServicer()
    async with _seen(settings, probes):
        won = asyncio.create_task(_won(settings, leadership, probes))
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([won, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in (won, stopped):
            task.cancel()
        await asyncio.gather(won, stopped, return_exceptions=True)
        if won in done:
            won.result()
    return won in done and not stop.is_set()


async def _won(settings: ServiceSettings, leadership: Leadership, probes: Any) -> None:
    await asyncio.to_thread(warm_up, settings.planner().threads)
    serving = health_pb2.HealthCheckResponse
    await report_health(probes, serving.NOT_SERVING, ready=serving.SERVING)
    await leadership.won()


@contextlib.asynccontextmanager
async def _seen(settings: ServiceSettings, probes: Any) -> AsyncIterator[None]:
    """Answer probes and scrapes where the ports are free: on one host they may be the leader's."""
    metrics = Metrics()
    metrics.service.build.labels(__version__).set(1)
    metrics.service.leads.set(0)
    async with contextlib.AsyncExitStack() as stack:
        host, _, port = settings.metrics.rpartition(":")
        try:
            server = HttpServer(host.strip("[]"), int(port), Served(metrics))
            stack.callback(server.close)
            if settings.health is not None:
                await report_health(probes, health_pb2.HealthCheckResponse.NOT_SERVING)
                await serve_health(settings.health, probes, stack)
        except (OSError, ListenError) as error:
            _log.warning("standing_by_unseen", reason=str(error))
        yield
