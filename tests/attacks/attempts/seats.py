"""Deployments that cost too much, and seats that are taken."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from eplb_service.control.server.plane.deployments import MOST_DEPLOYMENTS
from eplb_service.wire.generated import operator_pb2
from tests.attacks.attempts.registry import attempt, refused
from tests.attacks.attempts.requests import Code, hello_with, inflating_hello, shaped_hello
from tests.attacks.target import LIVE, Target
from tests.control.fake_group import FakeRank, hello_of

refused(
    "an array that inflates to 256 MB", Code.INVALID_ARGUMENT, False, lambda t: t.refusal(inflating_hello())
)
refused(
    "a shape past all bounds",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: t.refusal(hello_with(ep_size=4_000_000_000)),
)
refused(
    "a deployment that costs more memory than there is",
    Code.RESOURCE_EXHAUSTED,
    False,
    lambda t: t.refusal(shaped_hello(512, 512, 512)),
)


@attempt("names of nothing push out a paused deployment")
async def _push_out(target: Target) -> str:
    async with target.honest(deployment="kept"):
        await target.stub.Pause(operator_pb2.PauseRequest(deployment="kept"))
    for number in range(2 * MOST_DEPLOYMENTS):
        rank = target.rank()
        await rank.say(hello=hello_with(deployment=f"junk-{number}"))
        with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):
            await rank.hear()
        rank.call.cancel()
    status = await target.status("kept")
    assert status.paused
    assert status.steps_received
    return "refused: it is kept, and paused"


refused("a rank past its group", Code.INVALID_ARGUMENT, False, lambda t: t.refusal(hello_with(rank=9)))


@attempt("a rank of another group size")
async def _other_size(target: Target) -> str:
    async with target.honest():
        code = await target.refusal(hello_with(rank=7, ep_size=8))
        assert code is Code.FAILED_PRECONDITION
    return f"refused: {code.name}"


@attempt("a seat held by another forming")
async def _seat(target: Target) -> str:
    async with target.honest(group_id="robbed") as group:
        group.ranks[1].call.cancel()
        await asyncio.sleep(0.2)
        code = await target.refusal(hello_of(LIVE, 1, group_id="stolen"), number=1)
        assert code is Code.FAILED_PRECONDITION
        group.ranks[1] = FakeRank(group.channel, 1)
        await group.ranks[1].greet(hello_of(LIVE, 1, group_id="robbed"))
    return f"refused: {code.name}"
