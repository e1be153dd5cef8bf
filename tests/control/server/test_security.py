"""Where a token or TLS is asked for, nothing but health answers without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_service.control.server.listening.probes import ListenError
from eplb_service.control.server.service import running_service
from eplb_service.control.server.settings import SettingsError
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from tests.control.fake_group import FakeRank, first_placement, hello_of, live_of
from tests.control.server.self_signed import self_signed
from tests.control.server.test_service import settings

RIGHT, WRONG = (("authorization", "Bearer right"),), (("authorization", "Bearer wrong"),)
LIST = operator_pb2.ListDeploymentsRequest()


@pytest.mark.parametrize("metadata", [None, WRONG, (("authorization", "right"),)])
async def test_calls_without_the_token_are_turned_away(metadata: tuple[tuple[str, str], ...] | None) -> None:
    async with (
        running_service(settings(auth_token="right")) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operator_pb2_grpc.OperatorServiceStub(channel).ListDeployments(LIST, metadata=metadata)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "right" not in str(refused.value.details())
        code, _ = await FakeRank(channel, 0, metadata).refusal()
        assert code == grpc.StatusCode.UNAUTHENTICATED


async def test_calls_with_the_token_are_served_and_health_needs_none() -> None:
    async with (
        running_service(settings(auth_token="right")) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        await operator_pb2_grpc.OperatorServiceStub(channel).ListDeployments(LIST, metadata=RIGHT)
        rank = FakeRank(channel, 0, RIGHT)
        assert (await rank.greet(hello_of(live_of(first_placement()), 0))).leader_term > 0
        rank.call.cancel()
        await service.warm
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="eplb.v1.AgentService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    async with running_service(settings(tls_cert=cert, tls_key=key)) as service:
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        address = service.address.replace("127.0.0.1", "localhost")
        async with grpc.aio.secure_channel(address, credentials) as channel:
            await operator_pb2_grpc.OperatorServiceStub(channel).ListDeployments(LIST)


async def test_tls_files_that_cannot_be_read(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.pem"
    with pytest.raises(SettingsError, match="cannot read the TLS files"):
        async with running_service(settings(tls_cert=nowhere, tls_key=nowhere)):
            pass


@pytest.mark.parametrize("flag", ["listen", "metrics"])
async def test_an_address_in_use(flag: str, tmp_path: Path) -> None:
    store = tmp_path / "state.sqlite3"
    async with running_service(settings()) as service:
        with pytest.raises(ListenError, match=f"Address already in use.*--{flag}"):
            async with running_service(settings(**{flag: service.address, "store": str(store)})):
                pass
    assert not store.exists()
