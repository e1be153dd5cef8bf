"""Fake ranks that implement the agents' side of the stream and carry out every plan immediately."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import numpy as np

from eplb_core.placement import Int32, Placement
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import PROTOCOL_VERSION, in_parts, pack
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc, operator_pb2_grpc
from eplb_core.wire.plan import RankPlan, check_sources, decode_plan
from eplb_service.control.core.deployed_layout import DeployedLayout

LAYERS = 3
EXPERTS = 8
RANKS = 4
SLOTS = 3
BYTES_PER_EXPERT = 1000
STEP_MICROS = 20_000
"""Wall time of every step, in microseconds."""


def first_placement() -> Placement:
    return Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)


def live_of(placement: Placement, epoch: int = 0) -> DeployedLayout:
    return DeployedLayout.of(placement, placement.default_log2phy(), epoch, (epoch,) * placement.layers)


def hello_of(live: DeployedLayout, rank: int, **changes: Any) -> agent_pb2.Hello:
    placement = live.placement
    hello = agent_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        deployment="decode",
        rank=rank,
        ep_size=placement.ranks,
        node=f"node-{rank // 2}",
        token_group=rank,
        shape=agent_pb2.ModelShape(
            layers=placement.layers,
            experts=placement.experts,
            slots=placement.slots,
            bytes_per_expert=BYTES_PER_EXPERT,
        ),
        placement=agent_pb2.PlacementState(
            epoch=live.epoch,
            digest=live.digest,
            layer_epochs=live.layer_epochs,
            local_physical_to_logical=pack(live.placement.phy2log_LRS[:, rank]),
            log2phy=pack(live.log2phy_RLE[rank]),
        ),
        agent_version="test",
        group_id="first",
    )
    for name, value in changes.items():
        setattr(hello, name, value)
    return hello


def heat_report(live: DeployedLayout, rank: int, first_step: int, heat_TLE: Int32) -> agent_pb2.HeatReport:
    """Return the report of ``rank`` if every rank dispatches ``heat_TLE`` with the sending rank's own tables."""
    _, ranks, slots = live.placement.phy2log_LRS.shape
    steps, layers, _ = heat_TLE.shape
    slot_TLP = np.zeros((steps, layers, ranks * slots), dtype=np.int64)
    for source in range(ranks):
        for layer in range(layers):
            np.add.at(slot_TLP[:, layer], (slice(None), live.log2phy_RLE[source, layer]), heat_TLE[:, layer])
    return agent_pb2.HeatReport(
        first_step=first_step,
        layer_epochs=live.layer_epochs,
        slot_counts=pack(slot_TLP[:, :, rank * slots : (rank + 1) * slots]),
        source_counts=pack(heat_TLE),
        step_phases=bytes([agent_pb2.STEP_PHASE_DECODE] * steps),
        step_tokens=heat_TLE[:, 0].sum(axis=1).tolist(),
        step_micros=[STEP_MICROS] * steps,
    )


class FakeRank:
    """One rank's stream to the service."""

    patience: float | None = 60
    """Seconds to wait for a message, or ``None`` for no limit. A read that times out also ends the stream."""

    def __init__(self, channel: grpc.aio.Channel, rank: int, metadata: Any = None) -> None:
        self.rank = rank
        self.reporting_requests: list[agent_pb2.Reporting] = []
        self._write_lock = asyncio.Lock()
        self.call: Any = agent_pb2_grpc.AgentServiceStub(channel).Connect(metadata=metadata)

    async def say(self, **message: Any) -> None:
        # The service may already have ended the stream (see refusal_of), so errors are ignored. The lock is needed
        # because concurrent writes end the stream and would interleave the parts of two messages.
        async with self._write_lock:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for part in in_parts(agent_pb2.ConnectRequest(**message)):
                    await self.call.write(part)

    async def hear(self, *, calls: bool = False) -> agent_pb2.ConnectResponse:
        """Return the next message other than a balance.

        Reporting requests are skipped and kept in ``reporting_requests``. Call-offs are also skipped unless ``calls``
        is true. These ranks carry out a plan immediately, so a call-off always arrives too late.
        """
        skipped_kinds = {"reporting", "balance"} if calls else {"reporting", "balance", "call_off"}
        message = await asyncio.wait_for(self.call.read(), self.patience)
        while message != grpc.aio.EOF and message.WhichOneof("message") in skipped_kinds:
            if message.WhichOneof("message") == "reporting":
                self.reporting_requests.append(message.reporting)
            message = await asyncio.wait_for(self.call.read(), self.patience)
        if message == grpc.aio.EOF:
            raise AssertionError(f"rank {self.rank}: {await self.call.code()}: {await self.call.details()}")
        return message

    async def hear_reporting(self) -> agent_pb2.Reporting:
        """Return the next reporting request; only balances may arrive before it."""
        message = await asyncio.wait_for(self.call.read(), 20)
        while message.WhichOneof("message") == "balance":
            message = await asyncio.wait_for(self.call.read(), 20)
        assert message.WhichOneof("message") == "reporting"
        return message.reporting

    async def greet(self, hello: agent_pb2.Hello) -> agent_pb2.Welcome:
        await self.say(hello=hello)
        return (await self.hear()).welcome

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Return the code and details of the status with which the service ends the stream."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), 60) != grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


async def refusal_of(
    address: str, *messages: agent_pb2.ConnectRequest, metadata: Any = None
) -> tuple[grpc.StatusCode, str]:
    """Send ``messages`` on a new stream and return the status with which the service ends it.

    This uses the blocking client, as agents do. If the service ends the stream during a write, the asyncio client
    raises its own error instead of returning the status.
    """

    def listen() -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(address) as channel:
            call = agent_pb2_grpc.AgentServiceStub(channel).Connect(
                iter(messages), metadata=metadata, timeout=60
            )
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
            return call.code(), call.details()

    return await asyncio.to_thread(listen)


class FakeGroup:
    """All ranks in a group. They always report the same steps."""

    def __init__(self, address: str, live: DeployedLayout | None = None, *, by_slot: bool = True) -> None:
        self.live = live or live_of(first_placement())
        self.by_slot = by_slot
        self.step = 0
        self.channel = grpc.aio.insecure_channel(address)
        self.operator = operator_pb2_grpc.OperatorServiceStub(self.channel)
        self.address = address
        self.ranks: list[FakeRank] = []

    async def __aenter__(self) -> FakeGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        await self.channel.close()

    async def join(
        self, *, rank_bound: bool = False, observed: bool = False, **changes: Any
    ) -> list[agent_pb2.Welcome]:
        self.ranks = [FakeRank(self.channel, rank) for rank in range(self.live.placement.ranks)]
        hellos = [hello_of(self.live, rank.rank, **changes) for rank in self.ranks]
        for hello in hellos:
            hello.shape.rank_bound = rank_bound
            hello.shape.observed = observed
        return [await rank.greet(hello) for rank, hello in zip(self.ranks, hellos, strict=True)]

    async def leave(self) -> None:
        for rank in self.ranks:
            rank.call.cancel()

    async def send_heat(self, heat_TLE: Int32) -> None:
        for rank in self.ranks:
            report = heat_report(self.live, rank.rank, self.step, heat_TLE)
            if not self.by_slot:
                report.ClearField("slot_counts")
            await rank.say(heat_report=report)
        self.step += len(heat_TLE)

    async def fill_window(self) -> None:
        """Send enough heat for the service to make a decision."""
        for _ in range(4):
            await self.send_heat(skewed_heat(8))

    async def hear_plan(self) -> list[RankPlan]:
        """Receive every rank's plan and check it as an agent would."""
        shape = self.live.placement
        plans = []
        for rank in self.ranks:
            sizes = Shape(shape.ranks, shape.layers, shape.experts, shape.slots, BYTES_PER_EXPERT)
            plan = decode_plan((await rank.hear()).plan, sizes)
            assert (plan.base_epoch, plan.base_digest) == (self.live.epoch, self.live.digest)
            for layer in plan.layers:
                check_sources(layer, shape.phy2log_LRS[layer.layer])
            plans.append(plan)
        assert len({plan.digest for plan in plans}) == 1
        return plans

    async def say_all(self, plan_id: int, layer: int, state: int, reason: str = "", **facts: float) -> None:
        for rank in self.ranks:
            await rank.say(
                plan_status=agent_pb2.PlanStatus(
                    plan_id=plan_id,
                    layer=layer,
                    state=state,
                    reason=reason,
                    epoch=self.live.epoch,
                    digest=self.live.digest,
                    step=self.step,
                    **facts,
                )
            )

    async def carry_out(self, plans: list[RankPlan]) -> None:
        """Commit all layers, and report each commit from every rank."""
        first = plans[0]
        await self.say_all(first.plan_id, first.layers[0].layer, agent_pb2.PLAN_STATE_ACCEPTED)
        for index, layer in enumerate(first.layers):
            tables_RE = np.stack([plan.layers[index].log2phy_E for plan in plans])
            await self.say_all(first.plan_id, layer.layer, agent_pb2.PLAN_STATE_TRANSFERRED)
            self.live = self.live.with_layer(layer.layer, layer.phy2log_RS, tables_RE)
            await self.say_all(first.plan_id, layer.layer, agent_pb2.PLAN_STATE_COMMITTED)

    async def heartbeat(self) -> None:
        for rank in self.ranks:
            await rank.say(
                heartbeat=agent_pb2.Heartbeat(step=self.step, epoch=self.live.epoch, digest=self.live.digest)
            )


def skewed_heat(steps: int, seed: int = 0) -> Int32:
    """Return heat with one hot expert per layer, int32 ``[steps, LAYERS, EXPERTS]``."""
    heat_TLE = np.random.default_rng(seed).poisson(20, (steps, LAYERS, EXPERTS)).astype(np.int32)
    for layer in range(LAYERS):
        heat_TLE[:, layer, 3 + layer] += 200
    return heat_TLE
