"""Certificates alone prove who calls: the right one is served, every other refused; all rotate without a restart."""

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
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.control.server.settings import SettingsError
from tests.agent import live as agents
from tests.control.fake_group import BYTES_PER_EXPERT, EXPERTS, LAYERS, RANKS, SLOTS, first_placement
from tests.control.server.certificates import Authority
from tests.control.server.http_client import get
from tests.control.server.mutual_tls import flags, replace_file
from tests.control.server.service_under_test import settings, until
from worker_agent.stream import Outbox, ServiceStream
from worker_agent.swap.rank_layout import Identity, RankLayout

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def agent(service: RunningService, ca: Path, proof: tuple[Path, Path]) -> ServiceStream:
    """The stream of a real agent."""
    placement = first_placement()
    installed = RankLayout.first(0, placement, placement.default_log2phy()[0])
    shape = Shape(RANKS, LAYERS, EXPERTS, SLOTS, BYTES_PER_EXPERT)
    identity = Identity("decode", "group", 0, "here", tuple(range(RANKS)), shape)
    made = agents.settings(service=service.address, tls_ca=ca, tls_cert=proof[0], tls_key=proof[1])
    return ServiceStream(
        made, identity, Outbox(2), lambda: installed, int, lambda: Heartbeat(digest=installed.digest)
    )


async def code_of(service: RunningService, ca: Path, proof: tuple[Path, Path]) -> grpc.StatusCode:
    """What an operator's question is answered with."""
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), proof[1].read_bytes(), proof[0].read_bytes())
    async with grpc.aio.secure_channel(service.address, credentials) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        try:
            await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_an_agent_is_its_certificate(tmp_path: Path, authority: Authority) -> None:
    theirs = Authority(tmp_path / "theirs")
    ours, other = authority.sign("decode.agents"), authority.sign("prefill.agents")
    async with running_service(settings(**flags(tmp_path, authority))) as service:
        stream = agent(service, authority.ca, ours)
        await until(lambda: stream.connected)
        await until(lambda: len(service.plane.deployments["decode"].connected) == 1)
        refused = {
            "of another authority": agent(service, authority.ca, theirs.sign("decode.agents")),
            "expired": agent(service, authority.ca, authority.sign("decode.agents", expired=True)),
            "of another deployment": agent(service, authority.ca, other),
            "of nobody": agent(service, authority.ca, authority.sign("somebody")),
            "that takes the service for another's": agent(service, theirs.ca, ours),
        }
        # Time enough for each to have tried twice; the one that is served shows that the service answers.
        await asyncio.sleep(2.0)
        assert [name for name, tried in refused.items() if tried.connected or tried.welcome] == []
        assert stream.connected
        for one in (stream, *refused.values()):
            await asyncio.to_thread(one.close, 5)
        assert list(service.plane.deployments) == ["decode"]
        assert await code_of(service, authority.ca, authority.sign("on-call")) is grpc.StatusCode.OK
        assert await code_of(service, authority.ca, ours) is grpc.StatusCode.PERMISSION_DENIED
        stranger = await code_of(service, authority.ca, theirs.sign("on-call"))
        assert stranger is grpc.StatusCode.UNAVAILABLE


async def test_the_page_knows_its_reader_by_the_certificate(tmp_path: Path, authority: Authority) -> None:
    given = {**flags(tmp_path, authority), "page": "localhost:0"}
    async with running_service(settings(**given)) as service:
        page = service.page_url.removeprefix("https://").rstrip("/")
        statuses = []
        for name in ("on-call", "decode.agents", "somebody"):
            context = ssl.create_default_context(cafile=str(authority.ca))
            context.load_cert_chain(*authority.sign(name))
            statuses.append((await get(page, "/api/v1/deployments", context=context)).status)
        assert statuses == [200, 403, 401]
        with pytest.raises((OSError, http.client.HTTPException)):
            await get(page, "/", context=ssl.create_default_context(cafile=str(authority.ca)))


async def test_certificates_of_both_sides_rotate_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    given = flags(tmp_path, authority)
    certificate, key = authority.sign("decode.agents")
    async with running_service(settings(**given)) as service:
        stream = agent(service, authority.ca, (certificate, key))
        await until(lambda: stream.connected)
        before = shown(service.address)
        # The service's certificate, then the authority of both, are renewed in place; the open stream goes on.
        authority.sign("localhost")
        assert shown(service.address) != before
        assert stream.connected
        renewed = Authority(tmp_path / "renewed")
        for source, target in (
            (renewed.sign("localhost"), (given["tls_cert"], given["tls_key"])),
            (renewed.sign("decode.agents"), (certificate, key)),
        ):
            for new, old in zip(source, target, strict=True):
                replace_file(old, new.read_bytes())
        replace_file(authority.ca, renewed.ca.read_bytes())
        assert stream.connected
        await asyncio.to_thread(stream.close, 5)
        again = agent(service, authority.ca, (certificate, key))
        # The agent's own files are read at every connection.
        await until(lambda: again.connected)
        await asyncio.to_thread(again.close, 5)
        assert await code_of(service, authority.ca, renewed.sign("on-call")) is grpc.StatusCode.OK


async def test_a_renewal_that_is_half_done_shows_the_pair_before(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**flags(tmp_path, authority), "page": "localhost:0"}
    operator = authority.sign("on-call")
    async with running_service(settings(**given)) as service:
        listeners = service.address, service.page_url.removeprefix("https://").rstrip("/")

        async def all_show() -> set[str]:
            assert await code_of(service, authority.ca, operator) is grpc.StatusCode.OK
            return {await asyncio.to_thread(shown, address) for address in listeners}

        (before,) = await all_show()
        renewed = Authority(tmp_path / "renewed")
        certificate, key = renewed.sign("localhost")
        replace_file(given["tls_key"], key.read_bytes())
        for _ in range(3):
            assert await all_show() == {before}
        replace_file(given["tls_cert"], b"-----BEGIN CERTIFICATE-----")
        assert await all_show() == {before}
        given["tls_cert"].unlink()
        assert await all_show() == {before}
        # The authority has not changed, and would not vouch for this one.
        replace_file(given["tls_cert"], certificate.read_bytes())
        after = {await asyncio.to_thread(shown, address) for address in listeners}
        assert len(after) == 1
        assert before not in after
    log = [line for line in capsys.readouterr().err.splitlines() if "certificate_not_renewed" in line]
    assert len(log) == 3, log
    assert "KEY_VALUES_MISMATCH" in log[0]


async def test_a_service_does_not_start_with_another_certificates_key(
    tmp_path: Path, authority: Authority
) -> None:
    given = flags(tmp_path, authority)
    _, given["tls_key"] = authority.sign("on-call")
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        async with running_service(settings(**given)):
            pass
    no_key = tmp_path / "no key"
    no_key.write_text("no key")
    for key, says in (
        (no_key, "cannot use the TLS files"),
        (tmp_path / "nowhere", "cannot read the TLS files"),
    ):
        with pytest.raises(SettingsError, match=says):
            async with running_service(settings(**{**given, "tls_key": key})):
                pass


def shown(address: str) -> str:
    """The certificate that a listener shows."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=20)
