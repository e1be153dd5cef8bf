"""Callers without credentials, or with the wrong ones."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc

from eplb_core.wire.generated import operator_pb2
from tests.attacks import target as to
from tests.attacks.attempts.registry import attempt, register_rejections
from tests.attacks.attempts.requests import LIST, MIB, PAUSE, Code, hello_with, raw_call
from tests.attacks.target import Target
from tests.control.server.grpc_calls import bearer


async def _reflection(target: Target) -> Code:
    call = reflection_pb2_grpc.ServerReflectionStub(target.channel).ServerReflectionInfo()
    code: Code = await call.code()
    return code


register_rejections(
    Code.UNAUTHENTICATED,
    "no call is answered without a credential",
    {
        "reflection without a token": _reflection,
        "read without a token": lambda t: t.code_of("ListDeployments", LIST),
        "pause without a token": lambda t: t.code_of("Pause", PAUSE),
        "pause with a wrong token": lambda t: t.code_of("Pause", PAUSE, bearer("x" * 21)),
        "the right token with a different scheme": lambda t: t.code_of(
            "Pause", PAUSE, (("authorization", f"Basic {to.OPERATOR}"),)
        ),
        "a stream without a token": lambda t: t.status_of_silent_stream(),
    },
    locked=True,
)
register_rejections(
    Code.PERMISSION_DENIED,
    "a credential is valid only for its role, deployments and ranks",
    {
        "a reader forgets a deployment": lambda t: t.code_of(
            "Forget", operator_pb2.ForgetRequest(deployment="decode"), bearer(to.READER)
        ),
        "an agent requests a decision": lambda t: t.code_of(
            "Rebalance", operator_pb2.RebalanceRequest(deployment="decode"), bearer(to.AGENT)
        ),
        "a reader poses as a rank": lambda t: t.status_of_silent_stream(to.READER),
        "a reader pauses": lambda t: t.code_of("Pause", PAUSE, bearer(to.READER)),
        "an agent pauses": lambda t: t.code_of("Pause", PAUSE, bearer(to.AGENT)),
        "an operator poses as a rank": lambda t: t.status_of_silent_stream(to.OPERATOR),
        "an agent of another deployment": lambda t: t.refusal(hello_with(deployment="prefill"), to.AGENT),
        "an agent of another rank": lambda t: t.refusal(hello_with(rank=5, ep_size=8), to.AGENT),
        "a reader reads another deployment": lambda t: t.code_of(
            "GetStatus", operator_pb2.GetStatusRequest(deployment="prefill"), bearer(to.READER)
        ),
    },
    locked=True,
)


@attempt(
    "30 concurrent bodies without a token, 120 MB in total",
    "the call is rejected before its body is read",
    locked=True,
)
async def _bodies(target: Target) -> str:
    return await _flood(target, "/eplb.v1.OperatorService/Pause", 96 * MIB)


@attempt(
    "30 concurrent bodies to the health check, 120 MB in total",
    "memory is bounded for any input",
    locked=True,
)
async def _health_bodies(target: Target) -> str:
    return await _flood(
        target, f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check", 256 * MIB
    )


async def _flood(target: Target, method: str, limit_bytes: int) -> str:
    before = target.resident_bytes
    calls = [raw_call(target, method, bytes(to.MESSAGE_BYTES - 100)) for _ in range(30)]
    await asyncio.gather(*(asyncio.wait_for(call, 60) for call in calls), return_exceptions=True)
    grown = target.resident_bytes - before
    assert grown < limit_bytes, (
        f"memory grew by {grown >> 20} MiB; expected less than {limit_bytes >> 20} MiB"
    )
    return f"bounded: memory grew by {max(0, grown) >> 20} MiB"


@attempt("a megabyte of metadata", "memory is bounded for any input", locked=True)
async def _metadata(target: Target) -> str:
    many = tuple((f"key-{number}", "x" * 1000) for number in range(1000))
    code = await target.code_of("ListDeployments", LIST, many)
    assert code is not Code.OK
    assert await target.code_of("ListDeployments", LIST, bearer(to.READER)) is Code.OK
    return f"rejected: {code.name}"
