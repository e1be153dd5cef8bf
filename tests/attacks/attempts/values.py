"""Values that no honest rank or operator sends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from eplb_core.wire.codec import pack
from eplb_core.wire.generated import agent_pb2, operator_pb2
from tests.attacks.attempts.registry import attempt, register_rejections
from tests.attacks.attempts.requests import LIST, Code, hello_with, spoilt_heat, status_after
from tests.attacks.target import LIVE, Target
from tests.control.fake_group import FakeGroup


def _counts(count: int) -> agent_pb2.HeatReport:
    return spoilt_heat(slot_counts=pack(np.full((8, 3, 3), count, np.int32)))


async def _first(target: Target, **message: Any) -> Code:
    rank = target.rank()
    await rank.say(**message)
    code, _ = await rank.refusal()
    return code


register_rejections(
    Code.INVALID_ARGUMENT,
    "data from the wire is validated before it is used",
    {
        "a second Hello": lambda t: status_after(t, hello=hello_with()),
        "a first message other than a Hello": lambda t: _first(t, heartbeat=agent_pb2.Heartbeat()),
        "an empty message": status_after,
        "counts of the wrong shape": lambda t: status_after(
            t, heat_report=spoilt_heat(slot_counts=pack(np.ones((8, 3, 4), np.int32)))
        ),
        "negative counts": lambda t: status_after(t, heat_report=_counts(-1)),
        "counts whose sum overflows": lambda t: status_after(t, heat_report=_counts(2**31 - 1)),
        "a node name with an ESC character": lambda t: t.refusal(hello_with(node="\x1b[2J")),
        "a deployment name that is a path": lambda t: t.refusal(hello_with(deployment="../x")),
        "a status request for a name of 100 kB": lambda t: t.code_of(
            "GetStatus", operator_pb2.GetStatusRequest(deployment="x" * 100_000)
        ),
    },
)


@attempt(
    "heat for a step in the far future, six times", "one rank's claim does not stop the heat of other ranks"
)
async def _far(target: Target) -> str:
    async with target.honest() as group:
        for number in range(6):
            report = spoilt_heat((1 << 47) + 4096 * number)
            await group.ranks[0].say(heat_report=report)
    assert await target.code_of("ListDeployments", LIST) is Code.OK
    return "bounded: honest heat still arrives"


@attempt(
    "arbitrary step numbers in heartbeats, heat and plan reports", "a jump in a step counter excludes no rank"
)
async def _any_step(target: Target) -> str:
    async with target.honest() as group:
        rank = group.ranks[0]
        for step in (1 << 48, (1 << 62) - 100, (1 << 63) + 7, (1 << 64) - 1):
            await rank.say(
                heartbeat=agent_pb2.Heartbeat(step=step, calls=step, epoch=LIVE.epoch, digest=LIVE.digest)
            )
            await rank.say(heat_report=spoilt_heat(step))
            await rank.say(plan_status=agent_pb2.PlanStatus(plan_id=1, state=1, step=step))
    return "bounded: step numbers wrap at 2**48, and honest heat still arrives"


@attempt(
    "a heartbeat whose error contains an ESC character", "no control characters reach an operator's terminal"
)
async def _escape(target: Target) -> str:
    async with FakeGroup(target.service.address) as group:
        await group.join()
        await group.ranks[0].say(
            heartbeat=agent_pb2.Heartbeat(epoch=LIVE.epoch, digest=LIVE.digest, error="\x1b]0;owned\x07")
        )
        for _ in range(100):
            if problems := (await target.status()).problems:
                break
            await asyncio.sleep(0.05)
        assert problems
        assert all(problem.isprintable() for problem in problems)
    return "bounded: the error is shown without control characters"
