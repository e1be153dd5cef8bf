"""Deployments that need too many resources, and attempts to take over another rank's seat."""

from __future__ import annotations

import contextlib

import grpc

from eplb_core.placement import Placement
from eplb_core.wire.generated import operator_pb2
from eplb_service.control.server.plane.deployments import MAX_DEPLOYMENTS
from tests.attacks.attempts.registry import attempt, register_rejections
from tests.attacks.attempts.requests import Code, hello_with, shaped_hello
from tests.attacks.target import Target
from tests.control.fake_group import LAYERS, SLOTS, hello_of, live_of

_ALONE = live_of(Placement.linear(LAYERS, SLOTS, 1, SLOTS))

register_rejections(
    Code.INVALID_ARGUMENT,
    "shapes are validated before memory is allocated",
    {
        "a group of four billion ranks": lambda t: t.refusal(hello_with(ep_size=4_000_000_000)),
        "a rank number outside its group": lambda t: t.refusal(hello_with(rank=9)),
    },
)
register_rejections(
    Code.RESOURCE_EXHAUSTED,
    "the memory for heat is estimated before it is allocated",
    {"a deployment that needs more memory than allowed": lambda t: t.refusal(shaped_hello(512, 512, 512))},
)


@attempt(
    "more one-rank deployments than the limit, each leaving immediately",
    "deployments that have left do not block new ones",
)
async def _came_and_left(target: Target) -> str:
    for number in range(MAX_DEPLOYMENTS + 20):
        rank = target.rank()
        await rank.greet(hello_of(_ALONE, 0, deployment=f"came-{number}"))
        rank.call.cancel()
    async with target.honest(deployment="new"):
        pass
    return "bounded: the deployments that left first are forgotten"


@attempt("a rank with a different group id claims an occupied seat", "connected ranks keep their seats")
async def _taken_seat(target: Target) -> str:
    async with target.honest():
        code = await target.refusal(hello_with(group_id="another"))
    assert code in (Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS), code
    return f"rejected: {code.name}"


@attempt("junk deployments try to crowd out a paused one", "operator commands are not forgotten")
async def _push_out(target: Target) -> str:
    async with target.honest(deployment="kept"):
        await target.stub.Pause(operator_pb2.PauseRequest(deployment="kept"))
    for number in range(2 * MAX_DEPLOYMENTS):
        rank = target.rank()
        await rank.say(hello=hello_with(deployment=f"junk-{number}"))
        with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):
            await rank.hear()
        rank.call.cancel()
    status = await target.status("kept")
    assert status.paused
    assert status.steps_received
    return "rejected: the deployment is kept and stays paused"
