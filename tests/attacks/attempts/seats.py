"""Deployments that cost too much, and seats that are taken."""

from __future__ import annotations

import contextlib

import grpc

from eplb_service.control.server.plane.deployments import MOST_DEPLOYMENTS
from eplb_service.wire.generated import operator_pb2
from tests.attacks.attempts.registry import attempt, refused
from tests.attacks.attempts.requests import Code, hello_with, inflating_hello, shaped_hello
from tests.attacks.target import Target

refused(
    Code.INVALID_ARGUMENT,
    {
        "an array that inflates to 256 MB": lambda t: t.refusal(inflating_hello()),
        "a shape past all bounds": lambda t: t.refusal(hello_with(ep_size=4_000_000_000)),
        "a rank past its group": lambda t: t.refusal(hello_with(rank=9)),
    },
)
refused(
    Code.RESOURCE_EXHAUSTED,
    {"a deployment that costs more memory than there is": lambda t: t.refusal(shaped_hello(512, 512, 512))},
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
