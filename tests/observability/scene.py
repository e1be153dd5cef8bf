"""Fake groups that serve until they are stopped, each with its own faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import numpy as np

from eplb_core.placement import Int32, Placement
from eplb_core.wire.generated import agent_pb2
from tests.control.fake_group import (
    BYTES_PER_EXPERT,
    EXPERTS,
    RANKS,
    SLOTS,
    FakeGroup,
    FakeRank,
    heat_report,
    hello_of,
    live_of,
    skewed_heat,
)

TOKEN = "operator-0123456789"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
_STEPS = 16


class PatientRank(FakeRank):
    """A fake rank that waits for messages without a time limit."""

    patience = None


@dataclass
class Faults:
    """The current faults of a group. Every field can be changed at any time."""

    name: str
    heat: Callable[[int], Int32] = field(default=lambda seed: skewed_heat(_STEPS, seed))
    half_silent_ranks: tuple[int, ...] = ()
    abort_plans: bool = False
    dummies: bool = False
    halted: str = ""


async def rejoin(group: FakeGroup, faults: Faults, rank: int) -> None:
    """Reconnect a rank whose stream has ended."""
    new_rank = PatientRank(group.channel, rank, METADATA)
    await new_rank.greet(hello_of(group.live, rank, deployment=faults.name))
    group.ranks[rank] = new_rank


def no_heat(_seed: int) -> Int32:
    """Return steps in which no rank counts a token."""
    return np.zeros_like(skewed_heat(_STEPS))


@contextlib.asynccontextmanager
async def serving(address: str, name: str, layers: int = 3) -> AsyncIterator[tuple[FakeGroup, Faults]]:
    """Run a group of deployment ``name`` that runs steps, carries out plans, and shows the faults set in ``Faults``."""
    live = live_of(Placement.linear(layers, EXPERTS, RANKS, SLOTS))
    async with FakeGroup(address, live) as group:
        faults = Faults(name)
        for rank in range(RANKS):
            group.ranks.append(PatientRank(group.channel, rank, METADATA))
            await group.ranks[rank].greet(hello_of(group.live, rank, deployment=name))
        tasks = [
            asyncio.create_task(_step(group, faults, layers)),
            asyncio.create_task(_follow(group, faults)),
        ]
        try:
            yield group, faults
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def other_heat(seed: int) -> Int32:
    """Return heat that is imbalanced under the placement for ``skewed_heat``."""
    return np.roll(skewed_heat(_STEPS, seed), 4, axis=2)


async def _step(group: FakeGroup, faults: Faults, layers: int) -> None:
    for seed in range(1_000_000):
        heat_TLE = np.ascontiguousarray(faults.heat(seed)[:, :layers])
        live = group.live
        for rank in group.ranks:
            if seed % 2 and rank.rank in faults.half_silent_ranks:
                continue
            report = heat_report(live, rank.rank, group.step, heat_TLE)
            if not heat_TLE.any():
                # Report tokens. Otherwise, the service considers ranks that have counted tokens before to be idle.
                report.step_tokens[:] = [64] * len(heat_TLE)
            if faults.dummies:
                report.step_phases = bytes([agent_pb2.STEP_PHASE_DUMMY] * len(heat_TLE))
            await rank.say(heat_report=report)
            heartbeat = agent_pb2.Heartbeat(
                step=group.step,
                # The current layout: layers may have been committed since the step began.
                epoch=group.live.epoch,
                digest=group.live.digest,
                error=faults.halted,
                calls=group.step,
                call_micros=200 * group.step,
                vote_micros=50 * group.step,
                staging_bytes=BYTES_PER_EXPERT,
                ring_bytes=1 << 16,
            )
            await rank.say(heartbeat=heartbeat)
        group.step += len(heat_TLE)
        await asyncio.sleep(0.4)


async def _follow(group: FakeGroup, faults: Faults) -> None:
    while True:
        try:
            plans = await group.hear_plan()
        except (AssertionError, grpc.aio.AioRpcError):
            await asyncio.sleep(0.2)
            continue
        if faults.abort_plans:
            first = plans[0].layers[0].layer
            await group.say_all(
                plans[0].plan_id, first, agent_pb2.PLAN_STATE_ABORTED, "the fault of this test"
            )
        else:
            await group.carry_out(plans)
