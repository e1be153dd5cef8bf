"""No number of silent callers can make the service unavailable to callers that send requests."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_service.control.server.access import quotas
from eplb_service.control.server.service import run_service
from eplb_service.control.server.web import http_server
from tests.control.fake_group import FakeRank, hello_of
from tests.control.server.grpc_calls import bearer
from tests.control.server.http_client import get
from tests.control.server.service_under_test import settings
from tests.control.server.silent_callers import (
    CHECK,
    LIVE,
    SECONDS,
    SEPARATE_CONNECTION,
    WATCH,
    check_served,
    healthy,
    silent,
)

AGENT = "agent-0123456789"
READER = "reader-0123456789"
CREDENTIALS = f"""
- {{name: ranks, role: agent, deployments: ['*'], token: {AGENT}}}
- {{name: looker, role: reader, deployments: ['*'], token: {READER}}}
"""
OPENED = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000 000000040100000000")
"""Preface, settings and acknowledgement of settings, which open an HTTP/2 connection without a request."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS)
    return tmp_path / "credentials.yaml"


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_silent_health_checks_do_not_block_the_health_port(method: str) -> None:
    async with run_service(settings(health="127.0.0.1:0")) as service:
        assert service.health_address is not None
        async with silent(service.health_address, method, 2 * quotas.MAX_PROBES):
            for _ in range(3):
                assert await healthy(service.health_address)


async def test_health_watchers_are_evicted_for_new_health_checks() -> None:
    async with run_service(settings(health="127.0.0.1:0")) as service:
        assert service.health_address is not None
        async with grpc.aio.insecure_channel(service.health_address) as channel:
            request = health_pb2.HealthCheckRequest(service="liveness")
            watches = [
                health_pb2_grpc.HealthStub(channel).Watch(request) for _ in range(quotas.MAX_PROBES + 8)
            ]
            reading = [asyncio.ensure_future(watch.read()) for watch in watches]
            await asyncio.sleep(0.3)
            assert await healthy(service.health_address)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def test_a_silent_health_check_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_PROBE_SECONDS", 0.2)
    async with run_service(settings(health="127.0.0.1:0")) as service:
        assert service.health_address is not None
        async with silent(service.health_address, CHECK, 2) as calls:
            codes = await asyncio.wait_for(asyncio.gather(*(call.code() for call in calls)), SECONDS)
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


async def test_silent_streams_do_not_block_a_service_without_credentials() -> None:
    async with run_service(settings()) as service, grpc.aio.insecure_channel(service.address) as channel:
        silent_ranks = [FakeRank(channel, 0) for _ in range(200)]
        await asyncio.sleep(0.3)
        await check_served(service.address)
        for rank in silent_ranks:
            rank.call.cancel()


@pytest.mark.parametrize("content", [b"", OPENED], ids=["only TCP", "HTTP/2"])
async def test_silent_connections_do_not_block_callers_and_are_closed(
    content: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eplb_service.control.server.service._HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr("eplb_service.control.server.service._IDLE_SECONDS", 1.0)
    async with run_service(settings(credentials=path)) as service:
        host, _, port = service.address.rpartition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for _, writer in connections:
            writer.write(content)
        await check_served(service.address, bearer(AGENT), bearer(READER))
        ends = asyncio.gather(*(reader.read() for reader, _ in connections), return_exceptions=True)
        await asyncio.wait_for(ends, SECONDS)
        for _, writer in connections:
            writer.close()


async def test_streams_with_a_credential_are_not_limited_per_host(path: Path) -> None:
    async with (
        run_service(settings(credentials=path, max_streams_per_peer=2, max_streams=64)) as service,
        grpc.aio.insecure_channel(service.address, SEPARATE_CONNECTION) as shared_channel,
        grpc.aio.insecure_channel(service.address, SEPARATE_CONNECTION) as separate_channel,
    ):
        channels = (shared_channel, shared_channel, separate_channel)
        ranks = [FakeRank(channel, rank, bearer(AGENT)) for rank, channel in enumerate(channels)]
        for rank in ranks:
            rank.patience = SECONDS
            await rank.greet(hello_of(LIVE, rank.rank))
        assert len(service.plane.deployments["decode"].connected) == 3


@pytest.mark.parametrize("content", [b"", b"GET /metrics HTTP/1.1\r\nHost: "])
async def test_slow_connections_do_not_block_scrapes(
    content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_service(settings()) as service:
        host, _, port = service.metrics_address.rpartition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(70)]
        for _, writer in connections:
            writer.write(content)
        for _ in range(3):
            answer = await asyncio.wait_for(get(service.metrics_address, "/metrics"), SECONDS)
            assert b'eplb_refusals_total{code="resource_exhausted"}' in answer.body
        assert "connection_made_room" in capsys.readouterr().err
        for _, writer in connections:
            writer.close()


async def test_a_connection_without_a_complete_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_SECONDS", 0.2)
    async with run_service(settings()) as service:
        host, _, port = service.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()


def test_the_oldest_connection_of_the_host_with_the_most_connections_is_evicted() -> None:
    assert quotas.index_to_evict(["a", "b", "a", "b", "b"]) == 1
    assert quotas.index_to_evict(["a", "b", "c"]) == 0
