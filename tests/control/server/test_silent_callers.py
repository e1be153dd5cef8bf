"""Callers that say nothing shut nobody out: those who speak are served beside any number of them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_service.control.server.access import quotas
from eplb_service.control.server.service import running_service
from eplb_service.control.server.web import http_server
from tests.control.fake_group import FakeRank, hello_of
from tests.control.server.grpc_calls import bearer
from tests.control.server.http_client import get
from tests.control.server.service_under_test import settings
from tests.control.server.silent_callers import APART, CHECK, LIVE, SECONDS, WATCH, healthy, served, silent

AGENT, READER = "agent-0123456789", "reader-0123456789"
CREDENTIALS = f"""
- {{name: ranks, role: agent, deployments: ['*'], token: {AGENT}}}
- {{name: looker, role: reader, deployments: ['*'], token: {READER}}}
"""
OPENED = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000 000000040100000000")
"""Preface, settings and their acknowledgement: an HTTP/2 connection that is up, and asks for nothing."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS)
    return tmp_path / "credentials.yaml"


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_silent_checks_do_not_shut_the_health_port(method: str) -> None:
    async with running_service(settings(health="127.0.0.1:0")) as service:
        assert service.health_address is not None
        async with silent(service.health_address, method, 2 * quotas.MAX_PROBES):
            for _ in range(3):
                assert await healthy(service.health_address)


async def test_watchers_of_health_make_room_for_those_who_ask() -> None:
    async with running_service(settings(health="127.0.0.1:0")) as service:
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


async def test_a_probe_that_stays_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_PROBE_SECONDS", 0.2)
    async with running_service(settings(health="127.0.0.1:0")) as service:
        assert service.health_address is not None
        async with silent(service.health_address, CHECK, 2) as calls:
            codes = await asyncio.wait_for(asyncio.gather(*(call.code() for call in calls)), SECONDS)
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


async def test_mute_streams_of_an_open_service_take_no_turn() -> None:
    async with running_service(settings()) as service, grpc.aio.insecure_channel(service.address) as channel:
        mute = [FakeRank(channel, 0) for _ in range(200)]
        await asyncio.sleep(0.3)
        await served(service.address)
        for rank in mute:
            rank.call.cancel()


@pytest.mark.parametrize("says", [b"", OPENED], ids=["TCP alone", "HTTP/2"])
async def test_silent_connections_shut_nobody_out_and_end(
    says: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eplb_service.control.server.service._HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr("eplb_service.control.server.service._IDLE_SECONDS", 1.0)
    async with running_service(settings(credentials=path)) as service:
        host, _, port = service.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for _, writer in silent:
            writer.write(says)
        await served(service.address, bearer(AGENT), bearer(READER))
        ends = asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        await asyncio.wait_for(ends, SECONDS)
        for _, writer in silent:
            writer.close()


async def test_the_streams_of_one_host_are_counted_where_they_bring_no_credential(path: Path) -> None:
    async with (
        running_service(settings(credentials=path, max_streams_per_peer=2, max_streams=64)) as service,
        grpc.aio.insecure_channel(service.address, APART) as one,
        grpc.aio.insecure_channel(service.address, APART) as other,
    ):
        channels = (one, one, other)
        ranks = [FakeRank(channel, rank, bearer(AGENT)) for rank, channel in enumerate(channels)]
        for rank in ranks:
            rank.patience = SECONDS
            await rank.greet(hello_of(LIVE, rank.rank))
        assert len(service.plane.deployments["decode"].connected) == 3


@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nHost: "])
async def test_slow_connections_do_not_blind_scrapes(says: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_service(settings()) as service:
        host, _, port = service.metrics_address.rpartition(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(70)]
        for _, writer in slow:
            writer.write(says)
        for _ in range(3):
            answer = await asyncio.wait_for(get(service.metrics_address, "/metrics"), SECONDS)
            assert b'eplb_refusals_total{code="resource_exhausted"}' in answer.body
        assert "connection_made_room" in capsys.readouterr().err
        for _, writer in slow:
            writer.close()


async def test_a_connection_that_asks_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_SECONDS", 0.2)
    async with running_service(settings()) as service:
        host, _, port = service.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()


def test_the_host_with_the_most_makes_room_and_its_oldest_goes() -> None:
    assert quotas.makes_room(["a", "b", "a", "b", "b"]) == 1
    assert quotas.makes_room(["a", "b", "c"]) == 0
