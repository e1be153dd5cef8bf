"""Engines that move the weights themselves can request decisions over the wire."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from eplb_core.wire.codec import encode, parts_of
from eplb_core.wire.engine import DecideRequest
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_service.control.server.service import RunningService, run_service
from tests.control.server.service_under_test import settings
from worker_agent.policy.agreement import RemoteDecisionError
from worker_agent.policy.service import ServiceDecision, service_decision
from worker_agent.settings import AgentSettings

HEAT = np.tile(np.array([2000, 1000, 6000, 1000], dtype=np.int32), (8, 1, 1))
OLD = np.array([[0, 1, 2, 3, 0, 1]])
NEW = [[0, 1, 2, 3, 0, 2]]


def ask(address: str, heat: Any = HEAT, old: Any = OLD, timed: bool = True, **changes: Any) -> Any:
    """Ask the service for a decision with an agent's settings."""
    agent = AgentSettings(service=address, **{"decision_timeout_seconds": 20.0, **changes})
    return ServiceDecision(agent, "even")(heat, old, 2, 1, timed).tolist()


async def test_the_service_makes_decisions_for_an_engine(service: RunningService) -> None:
    assert await asyncio.to_thread(ask, service.address) == NEW
    assert await asyncio.to_thread(ask, service.address, HEAT.sum(axis=0, keepdims=True), OLD, False) == NEW


async def test_a_large_window_arrives_in_parts(service: RunningService) -> None:
    """The window's 64 parts, with 8 layers and 256 experts each, take up four parts of the wire format."""
    draw = np.random.default_rng(0)
    heat = draw.poisson(300.0 / np.arange(1, 257), size=(64, 8, 256)) + 1000
    old = np.tile(np.arange(288) % 256, (8, 1))
    new = await asyncio.to_thread(ask, service.address, heat, old)
    assert np.shape(new) == (8, 288)


async def test_the_services_planner_settings_apply_to_engine_decisions() -> None:
    async with run_service(settings(policy="none")) as service:
        assert await asyncio.to_thread(ask, service.address) == OLD.tolist()


@pytest.mark.parametrize(
    ("heat", "old", "message"),
    [
        (HEAT, np.array([[0, 1, 2, 3, 0]]), "the same number on each of 2 ranks"),
        (HEAT, np.array([[0, 1, 2, 2, 0, 1]]), "expert 3 has no slot"),
        (HEAT, np.array([[0, 1, 2, 3, 0, 1]] * 2), r"expected shape \[1, any\]"),
        (-HEAT, OLD, "a count is negative"),
        (np.zeros((0, 1, 4), dtype=np.int32), OLD, "the number of parts"),
        (np.zeros((1025, 1, 4), dtype=np.int32), OLD, "the number of parts"),
        (HEAT[0], OLD, "expected shape"),
    ],
)
async def test_an_invalid_request_is_rejected_with_the_reason(
    service: RunningService, heat: Any, old: Any, message: str
) -> None:
    if heat.ndim == 2:
        heat = heat[None, None]
    with pytest.raises(RemoteDecisionError, match=message):
        await asyncio.to_thread(ask, service.address, heat, old)


async def test_a_request_from_a_different_release_is_rejected(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecideRequest, "protocol_version", 3)
    with pytest.raises(RemoteDecisionError, match="install the same release on both sides"):
        await asyncio.to_thread(ask, service.address)


async def test_an_unknown_split_is_rejected(service: RunningService) -> None:
    agent = AgentSettings(service=service.address)
    with pytest.raises(RemoteDecisionError, match="split is 'odd'"):
        await asyncio.to_thread(ServiceDecision(agent, "odd"), HEAT, OLD, 2, 1, True)


async def test_a_request_that_never_ends_is_rejected(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eplb_service.control.server.agents._WHOLE_SECONDS", 0.2)
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = agent_pb2_grpc.AgentServiceStub(channel).Decide()
        await call.write(agent_pb2.Part(data=b"x", bytes_left=1000))
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_request_beyond_the_size_limit_is_rejected_at_its_first_part() -> None:
    async with (
        run_service(settings(max_message_bytes=1 << 20)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        call = agent_pb2_grpc.AgentServiceStub(channel).Decide()
        await call.write(agent_pb2.Part(data=b"x", bytes_left=1 << 20))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_credential_grants_access_only_to_its_deployments(tmp_path: Path) -> None:
    path = tmp_path / "credentials.yaml"
    path.write_text("- {name: one, token: first-token-of-16, role: agent, deployments: [one]}\n")
    async with run_service(settings(credentials=path)) as service:
        allowed = {"deployment": "one", "auth_token": "first-token-of-16"}
        assert await asyncio.to_thread(ask, service.address, **allowed) == NEW
        with pytest.raises(RemoteDecisionError, match="may not access deployment 'two'"):
            await asyncio.to_thread(ask, service.address, **{**allowed, "deployment": "two"})
        with pytest.raises(RemoteDecisionError, match="requires 'authorization: Bearer TOKEN'"):
            await asyncio.to_thread(ask, service.address)


def test_a_missing_answer_is_an_error_after_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(RemoteDecisionError):
        ask("127.0.0.1:1", decision_timeout_seconds=0.5)
    assert time.monotonic() - began < 5


class _WrongService(agent_pb2_grpc.AgentServiceServicer):
    """A service whose answer omits an expert."""

    def Decide(self, requests: Any, context: Any) -> Any:
        request = DecideRequest(
            "wrong", 2, 1, 4, HEAT, np.array([[0, 1, 2, 2, 0, 1]], dtype=np.int32), "even"
        )
        message = encode(request)
        yield agent_pb2.DecideResponse(physical_to_logical=message.physical_to_logical)


def test_an_invalid_answer_is_an_error() -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(_WrongService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(RemoteDecisionError, match="layer 0 does not serve every expert"):
            ask(f"127.0.0.1:{port}")
    finally:
        server.stop(None)


def test_a_service_makes_decisions_only_if_the_settings_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_AGENT_SERVICE", raising=False)
    assert service_decision(AgentSettings(), "even") is None
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "127.0.0.1:1")
    assert service_decision(AgentSettings(), "even") is not None


def test_a_large_request_is_split_into_ordered_parts() -> None:
    data = bytes(range(256)) * 1024
    parts = list(parts_of(data))
    assert len(parts) == 2
    assert b"".join(part.data for part in parts) == data
    assert [part.bytes_left for part in parts] == [len(data) - (128 << 10), 0]
