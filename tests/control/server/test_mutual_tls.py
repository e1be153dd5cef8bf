"""Mutual TLS: only valid client certificates are accepted, and all certificate files can be rotated at run time."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import ssl
from pathlib import Path

import grpc
import pytest

from eplb_core.wire.agent import Heartbeat, Shape
from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.settings import SettingsError
from tests.agent import live as agents
from tests.control.fake_group import BYTES_PER_EXPERT, EXPERTS, LAYERS, RANKS, SLOTS, first_placement
from tests.control.server.certificates import Authority
from tests.control.server.http_client import get
from tests.control.server.mutual_tls import flags, replace_file
from tests.control.server.service_under_test import settings, until
from worker_agent.stream import Outbox, ServiceStream
from worker_agent.swap.rank_layout import Identity, RankLayout

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the tests require openssl to generate certificates"
)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def agent(service: RunningService, ca: Path, proof: tuple[Path, Path]) -> ServiceStream:
    """Return a real agent's stream to the service."""
    placement = first_placement()
    installed = RankLayout.first(0, placement, placement.default_log2phy()[0])
    shape = Shape(RANKS, LAYERS, EXPERTS, SLOTS, BYTES_PER_EXPERT)
    identity = Identity("decode", "group", 0, "node-0", tuple(range(RANKS)), shape)
    agent_settings = agents.settings(service=service.address, tls_ca=ca, tls_cert=proof[0], tls_key=proof[1])
    return ServiceStream(
        agent_settings,
        identity,
        Outbox(2),
        lambda: installed,
        int,
        lambda: Heartbeat(digest=installed.digest),
    )


async def code_of(service: RunningService, ca: Path, proof: tuple[Path, Path]) -> grpc.StatusCode:
    """Return the status code of an operator call made with the certificate ``proof``."""
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), proof[1].read_bytes(), proof[0].read_bytes())
    async with grpc.aio.secure_channel(service.address, credentials) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        try:
            await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_an_agent_is_identified_by_its_certificate(tmp_path: Path, authority: Authority) -> None:
    other_authority = Authority(tmp_path / "theirs")
    decode_certificate = authority.sign("decode.agents")
    prefill_certificate = authority.sign("prefill.agents")
    async with run_service(settings(**flags(tmp_path, authority))) as service:
        stream = agent(service, authority.ca, decode_certificate)
        await until(lambda: stream.connected)
        await until(lambda: len(service.plane.deployments["decode"].connected) == 1)
        rejected = {
            "another authority": agent(service, authority.ca, other_authority.sign("decode.agents")),
            "expired": agent(service, authority.ca, authority.sign("decode.agents", expired=True)),
            "another deployment": agent(service, authority.ca, prefill_certificate),
            "unknown name": agent(service, authority.ca, authority.sign("somebody")),
            "rejects the service's authority": agent(service, other_authority.ca, decode_certificate),
        }
        # This is enough time for two attempts by each stream. The accepted stream shows that the service responds.
        await asyncio.sleep(2.0)
        assert [name for name, attempt in rejected.items() if attempt.connected or attempt.welcome] == []
        assert stream.connected
        for attempt in (stream, *rejected.values()):
            await asyncio.to_thread(attempt.close, 5)
        assert list(service.plane.deployments) == ["decode"]
        assert await code_of(service, authority.ca, authority.sign("on-call")) is grpc.StatusCode.OK
        assert await code_of(service, authority.ca, decode_certificate) is grpc.StatusCode.PERMISSION_DENIED
        stranger = await code_of(service, authority.ca, other_authority.sign("on-call"))
        assert stranger is grpc.StatusCode.UNAVAILABLE


async def test_the_page_identifies_its_reader_by_the_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    tls_flags = {**flags(tmp_path, authority), "page": "localhost:0"}
    async with run_service(settings(**tls_flags)) as service:
        page = service.page_url.removeprefix("https://").rstrip("/")
        statuses = []
        for name in ("on-call", "decode.agents", "somebody"):
            context = ssl.create_default_context(cafile=str(authority.ca))
            context.load_cert_chain(*authority.sign(name))
            statuses.append((await get(page, "/api/v1/deployments", context=context)).status)
        assert statuses == [200, 403, 401]
        with pytest.raises((OSError, http.client.HTTPException)):
            await get(page, "/", context=ssl.create_default_context(cafile=str(authority.ca)))


async def test_service_and_agent_certificates_rotate_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    tls_flags = flags(tmp_path, authority)
    certificate, key = authority.sign("decode.agents")
    async with run_service(settings(**tls_flags)) as service:
        stream = agent(service, authority.ca, (certificate, key))
        await until(lambda: stream.connected)
        before = presented_certificate(service.address)
        # First renew the service's certificate in place, then the authority on both sides. The open stream continues.
        authority.sign("localhost")
        assert presented_certificate(service.address) != before
        assert stream.connected
        renewed = Authority(tmp_path / "renewed")
        for source, target in (
            (renewed.sign("localhost"), (tls_flags["tls_cert"], tls_flags["tls_key"])),
            (renewed.sign("decode.agents"), (certificate, key)),
        ):
            for new, old in zip(source, target, strict=True):
                replace_file(old, new.read_bytes())
        replace_file(authority.ca, renewed.ca.read_bytes())
        assert stream.connected
        await asyncio.to_thread(stream.close, 5)
        reconnected = agent(service, authority.ca, (certificate, key))
        # An agent rereads its certificate files for every connection.
        await until(lambda: reconnected.connected)
        await asyncio.to_thread(reconnected.close, 5)
        assert await code_of(service, authority.ca, renewed.sign("on-call")) is grpc.StatusCode.OK


async def test_an_incomplete_renewal_keeps_the_previous_certificate(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    tls_flags = {**flags(tmp_path, authority), "page": "localhost:0"}
    operator = authority.sign("on-call")
    async with run_service(settings(**tls_flags)) as service:
        listeners = service.address, service.page_url.removeprefix("https://").rstrip("/")

        async def presented_certificates() -> set[str]:
            assert await code_of(service, authority.ca, operator) is grpc.StatusCode.OK
            return {await asyncio.to_thread(presented_certificate, address) for address in listeners}

        (before,) = await presented_certificates()
        renewed = Authority(tmp_path / "renewed")
        certificate, key = renewed.sign("localhost")
        _replace(tls_flags["tls_key"], key.read_bytes())
        for _ in range(3):
            assert await presented_certificates() == {before}
        _replace(tls_flags["tls_cert"], b"-----BEGIN CERTIFICATE-----")
        assert await presented_certificates() == {before}
        tls_flags["tls_cert"].unlink()
        assert await presented_certificates() == {before}
        # Clients still trust the old authority, which did not sign this certificate, so do not verify it here.
        _replace(tls_flags["tls_cert"], certificate.read_bytes())
        after = {await asyncio.to_thread(presented_certificate, address) for address in listeners}
        assert len(after) == 1
        assert before not in after
    log = [line for line in capsys.readouterr().err.splitlines() if "certificate_not_renewed" in line]
    assert len(log) == 3, log
    assert "KEY_VALUES_MISMATCH" in log[0]


async def test_a_service_does_not_start_if_the_key_does_not_match_its_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    tls_flags = flags(tmp_path, authority)
    _, tls_flags["tls_key"] = authority.sign("on-call")
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        async with run_service(settings(**tls_flags)):
            pass
    no_key = tmp_path / "no key"
    no_key.write_text("no key")
    for key, message in (
        (no_key, "cannot use the TLS files"),
        (tmp_path / "nowhere", "cannot read the TLS files"),
    ):
        with pytest.raises(SettingsError, match=message):
            async with run_service(settings(**{**tls_flags, "tls_key": key})):
                pass


def presented_certificate(address: str) -> str:
    """Return the certificate that a listener presents."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=20)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, as a renewal does."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)
