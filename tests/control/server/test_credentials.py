"""Credentials identify callers and limit their access. The credentials file is reloaded when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.control.server.access.gate import Credentials
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.settings import SettingsError, load_settings
from tests.control.fake_group import FakeRank, first_placement, hello_of, live_of
from tests.control.server.grpc_calls import bearer, code_of
from tests.control.server.service_under_test import settings, until

AGENT = "agent-token-of-16"
OPERATOR = "operator-token-16"
READER = "reader-token-of-16"
LIVE = live_of(first_placement())
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED
FILE = f"""
- {{name: decode-agents, role: agent, deployments: [decode], ranks: 0-1, token: {AGENT}}}
- name: on-call
  role: operator
  deployments: ['*']
  token_sha256: {hashlib.sha256(OPERATOR.encode()).hexdigest()}
- {{name: dashboard, role: reader, deployments: [decode], token: {READER}}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    credentials_path = tmp_path / "credentials.yaml"
    credentials_path.write_text(FILE)
    return credentials_path


@contextlib.asynccontextmanager
async def serving(**flags: Any) -> AsyncIterator[tuple[RunningService, grpc.aio.Channel]]:
    async with (
        run_service(settings(**flags)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        yield service, channel


async def orders(channel: grpc.aio.Channel, token: str, deployment: str) -> list[grpc.StatusCode]:
    """Send a read request and a command; return their status codes."""
    stub = operator_pb2_grpc.OperatorServiceStub(channel)
    proof = bearer(token)
    read = operator_pb2.GetStatusRequest
    order = operator_pb2.PauseRequest
    return [
        await code_of(stub.GetStatus(read(deployment=deployment), metadata=proof)),
        await code_of(stub.Pause(order(deployment=deployment), metadata=proof)),
    ]


async def test_every_role_can_make_only_its_own_calls(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(credentials=path) as (_, channel):
        rank = FakeRank(channel, 0, bearer(AGENT))
        await rank.greet(hello_of(LIVE, 0))
        ok = grpc.StatusCode.OK
        assert await orders(channel, OPERATOR, "decode") == [ok, ok]
        assert await orders(channel, READER, "decode") == [ok, DENIED]
        assert await orders(channel, AGENT, "decode") == [DENIED, DENIED]
        assert await orders(channel, "wrong-token-of-16", "decode") == [UNKNOWN, UNKNOWN]
        assert await orders(channel, READER, "prefill") == [DENIED, DENIED]
        # A credential with the wrong role is rejected before the stream's first message.
        assert (await FakeRank(channel, 1, bearer(OPERATOR)).refusal())[0] == DENIED
        for message in (hello_of(LIVE, 2), hello_of(LIVE, 1, deployment="prefill")):
            rank_outside_credential = FakeRank(channel, 1, bearer(AGENT))
            await rank_outside_credential.say(hello=message)
            assert (await rank_outside_credential.refusal())[0] == DENIED
        log = capsys.readouterr().err
        (audit,) = [json.loads(line) for line in log.splitlines() if '"operator_call"' in line]
        assert (audit["caller"], audit["call"], audit["result"]) == ("on-call", "Pause", "done")
        assert OPERATOR not in log
        rank.call.cancel()


async def test_a_reader_sees_only_its_deployments(path: Path) -> None:
    async with serving(credentials=path, auth_token="everything-and-all") as (_, channel):
        ranks = [FakeRank(channel, 0, bearer("everything-and-all")) for _ in range(2)]
        for rank, name in zip(ranks, ("decode", "prefill"), strict=True):
            await rank.greet(hello_of(LIVE, 0, deployment=name))
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        for token, names in ((READER, ["decode"]), (OPERATOR, ["decode", "prefill"])):
            answer = await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=bearer(token))
            assert [status.deployment for status in answer.deployments] == names
        for rank in ranks:
            rank.call.cancel()


async def test_tokens_rotate_without_a_restart(path: Path) -> None:
    async with serving(credentials=path) as (service, channel):
        rank = FakeRank(channel, 0, bearer(AGENT))
        await rank.greet(hello_of(LIVE, 0))
        path.write_text(
            FILE + "- {name: next, role: agent, deployments: [decode], token: the-next-agent-token}\n"
        )
        stub = operator_pb2_grpc.OperatorServiceStub(channel)

        async def may_connect(token: str) -> bool:
            attempt = FakeRank(channel, 1, bearer(token))
            try:
                await attempt.say(hello=hello_of(LIVE, 1))
                await attempt.hear()
            except (AssertionError, grpc.aio.AioRpcError):
                return False
            attempt.call.cancel()
            return True

        while not await may_connect("the-next-agent-token"):
            await asyncio.sleep(0.1)
        assert await may_connect(AGENT)
        path.write_text(FILE.replace(AGENT, "the-next-agent-token"))
        await until(lambda: not service.plane.deployments["decode"].connected)
        assert not await may_connect(AGENT)
        path.write_text("- nonsense")
        await asyncio.sleep(1.5)
        answer = stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=bearer(OPERATOR))
        assert await code_of(answer) is grpc.StatusCode.OK


async def test_health_checks_have_a_separate_port(path: Path) -> None:
    async with run_service(settings(credentials=path, health="127.0.0.1:0")) as service:
        await service.warm
        assert service.health_address is not None
        async with grpc.aio.insecure_channel(service.health_address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            listed = stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=bearer(OPERATOR))
            assert await code_of(listed) is grpc.StatusCode.UNIMPLEMENTED


def entry(changes: str) -> str:
    """Return the YAML for an agent's credential with these fields changed."""
    fields = {"name": "a", "role": "agent", "deployments": ["b"], "token": "0123456789abcdef"}
    return yaml.safe_dump([{**fields, **yaml.safe_load(f"{{{changes}}}")}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must be a list"),
        ("- 7", "credential 1"),
        (entry("role: king"), "credential 1: role"),
        (entry("deployments: []"), "credential 1: deployments"),
        (entry("deployments: ['b/c']"), "credential 1: deployments"),
        (entry("token: short"), "credential 1: token"),
        ("- {name: a, role: agent, deployments: [b]}", "exactly one of"),
        (entry("certificate: c"), "exactly one of"),
        (entry("role: reader, ranks: 0-3"), "only agents have ranks"),
        (entry("ranks: 3-0"), "ranks"),
        (entry("ranks: 0-99999999"), "ranks"),
        (entry("more: 1"), "more"),
        (entry("") * 2, "two credentials have the name 'a'"),
        ("- {name: a, token: 0123456789abcdef", "is not valid YAML"),
    ],
)
def test_an_invalid_credentials_file_is_rejected_without_showing_tokens(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "credentials.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=message) as error:
        Credentials(path=path)
    assert "0123456789abcdef" not in str(error.value)


def test_a_certificate_credential_accepts_only_its_certificate(path: Path) -> None:
    path.write_text("- {name: a, role: reader, deployments: ['*'], certificate: dashboard.example}\n")
    credentials = Credentials(path=path)
    assert credentials.proven_by("", ["dashboard.example"]) is not None
    assert credentials.proven_by("", []) is None
    assert credentials.proven_by("dashboard.example", []) is None
    assert Credentials().proven_by("", []) is not None, "without credentials, every caller is accepted"


def test_a_changed_credentials_file_is_reread_regardless_of_its_modification_time(path: Path) -> None:
    credentials = Credentials(path=path)
    assert not credentials.refresh()
    path.write_text(FILE.replace("dashboard", "a-dashboard"))
    os.utime(path, (0, 0))
    assert credentials.refresh()
    credential = credentials.proven_by(READER, [])
    assert credential is not None
    assert (credential.name, list(credential.roles)) == ("a-dashboard", ["reader"])


@pytest.mark.parametrize("metadata", [None, bearer("wrong"), (("authorization", "right"),)])
async def test_only_health_checks_are_accepted_without_the_shared_token(
    metadata: tuple[tuple[str, str], ...] | None,
) -> None:
    async with serving(auth_token="right") as (service, channel):
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=metadata)
        assert error.value.code() == UNKNOWN
        assert "right" not in str(error.value.details())
        assert (await FakeRank(channel, 0, metadata).refusal())[0] == UNKNOWN
        await stub.ListDeployments(operator_pb2.ListDeploymentsRequest(), metadata=bearer("right"))
        await service.warm
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="eplb.v1.AgentService")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "flags",
    [
        {"listen": "0.0.0.0:50551"},
        {"listen": "0.0.0.0:50551", "auth_token": "x"},
        {"listen": "[::]:50551", "tls_cert": "c", "tls_key": "k"},
        {"listen": "127.example.com:50551"},
    ],
)
def test_a_service_open_to_other_hosts_requires_credentials_and_tls_unless_insecure_is_set(
    flags: dict[str, Any],
) -> None:
    with pytest.raises(SettingsError, match="is reachable from other hosts"):
        load_settings(flags)
    load_settings({**flags, "insecure": True})
    load_settings({**flags, "tls_cert": "c", "tls_key": "k", "auth_token": "x"})
    load_settings({**flags, "listen": "[::1]:50551"})
