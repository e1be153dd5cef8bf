"""Agents as coroutines, a share of a deployment's ranks in each process: real streams, made-up heat, no model."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from benchmarks.scale.measured_service import asked_by
from eplb_service.placement import Placement, combine_digests, layer_digest
from eplb_service.wire.agent import Heartbeat, Hello, Shape
from eplb_service.wire.codec import MAX_MESSAGE_BYTES, encode, in_parts
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import HeatReport, StepPhase
from worker_agent.stream import HeartbeatSchedule

_VARIANTS = 4
_TOKENS, _TOP_K = 64, 8
_SLOTS_OVER_EXPERTS = 1.125


@dataclass(frozen=True)
class Scale:
    """A deployment's size: R, L and E."""

    ranks: int
    layers: int
    experts: int

    @property
    def shape(self) -> Shape:
        """With an eighth more slots than experts, in whole slots per rank."""
        slots = -(-int(_SLOTS_OVER_EXPERTS * self.experts) // self.ranks)
        return Shape(self.ranks, self.layers, self.experts, slots, bytes_per_expert=1 << 20)

    def placement(self) -> Placement:
        """The placement that it starts with."""
        return Placement.linear(self.layers, self.experts, self.ranks, self.shape.slots)


def drawn_reports(scale: Scale, rank: int, steps: int) -> list[HeatReport]:
    """A few reports of ``steps`` steps of a rank that decodes 64 sequences with 8 choices each; epoch 0, from step 0.

    Own tokens are summed over a report's steps. Popularity is skewed, in each layer for other experts, and the same for
    all ranks.
    """
    weights_LE = np.exp(0.9 * np.random.default_rng(7).standard_normal((scale.layers, scale.experts)))
    popularity_LE = weights_LE / weights_LE.sum(axis=1, keepdims=True)
    choices, slots = _TOKENS * _TOP_K, scale.shape.slots
    experts_S = np.arange(rank * slots, (rank + 1) * slots) % scale.experts
    replicas = scale.ranks * slots / scale.experts
    expected_LS = choices * scale.ranks * popularity_LE[:, experts_S] / replicas
    rng = np.random.default_rng(rank)
    return [
        HeatReport(
            first_step=0,
            layer_epochs=(0,) * scale.layers,
            slot_counts_TLS=rng.poisson(expected_LS, (steps, *expected_LS.shape)),
            phase_T=np.full(steps, StepPhase.DECODE, dtype=np.uint8),
            tokens_T=np.full(steps, _TOKENS),
            source_sums_LE=rng.poisson(steps * choices * popularity_LE),
        )
        for _ in range(_VARIANTS)
    ]


DEPLOYMENT = "scale"
_CONNECT = "/eplb.v1.AgentService/Connect"
_JOIN_SECONDS = 300.0
_STREAMS_PER_CHANNEL = 64
_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
_JOINING_AT_ONCE = 2
"""A service hears four Hellos of one host at a time."""
_QUEUED_REPORTS = 64
"""As an agent keeps them."""
_HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True)
class Load:
    """A deployment's size, steps per second, and steps of a report; ``None`` for as many as the service asks for."""

    scale: Scale
    steps_per_second: float
    report_steps: int | None


@dataclass(frozen=True)
class Tally:
    """Steps that agents could not send in time, heat that they sent, and when each got its last plan, since 1970."""

    dropped_steps: int = 0
    sent_bytes: int = 0
    reports: int = 0
    plans_at: tuple[float, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class RankProcesses:
    """All ranks, once they have joined."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def begin(self) -> None:
        """The model begins to step."""
        start = time.time() + 1.0
        for pipe in self._pipes:
            pipe.send(start)

    def tally(self) -> Tally:
        """Return what all agents have seen so far."""
        for pipe in self._pipes:
            pipe.send("tally")
        return sum((pipe.recv() for pipe in self._pipes), Tally())


@contextmanager
def rank_processes(address: str, load: Load, processes: int) -> Iterator[RankProcesses]:
    """All ranks of a deployment, joined; they leave at the end."""
    spawn = multiprocessing.get_context("spawn")
    shares = [range(first, load.scale.ranks, processes) for first in range(processes)]
    pipes, started = [], []
    try:
        for share in shares:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_run_agents, args=(theirs, address, load, share), name="eplb-ranks"
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        for pipe in pipes:
            if not pipe.poll(_JOIN_SECONDS):
                raise TimeoutError(f"not all ranks joined within {_JOIN_SECONDS:g} s")
            pipe.recv()
        yield RankProcesses(pipes)
    finally:
        for process in started:
            process.terminate()
            process.join()


def _run_agents(pipe: Connection, address: str, load: Load, share: range) -> None:
    asyncio.run(_serve(pipe, address, load, share))


async def _serve(pipe: Connection, address: str, load: Load, share: range) -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    agents = _agents(load, share)
    turns = asyncio.Semaphore(_JOINING_AT_ONCE)
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=[*_OPTIONS, ("eplb.channel", index)])
            )
            for index in range(-(-len(agents) // _STREAMS_PER_CHANNEL))
        ]
        await asyncio.gather(
            *(
                agent.join(channels[index // _STREAMS_PER_CHANNEL], turns)
                for index, agent in enumerate(agents)
            )
        )
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: heard.put_nowait(asked_by(pipe)))
        pipe.send("joined")
        start = await heard.get()
        running = [asyncio.create_task(agent.run(start)) for agent in agents]
        while await heard.get() == "tally":
            for task in running:
                if task.done():
                    task.result()
            pipe.send(sum((agent.tally for agent in agents), Tally()))
        for task in running:
            task.cancel()


def _agents(load: Load, share: range) -> list[_Agent]:
    scale = load.scale
    placement = scale.placement()
    # The tables of linear placements are made rank by rank: all of them at once are large.
    digests = [layer_digest(layer, row_RS) for layer, row_RS in enumerate(placement.phy2log_LRS)]
    digest = combine_digests(scale.experts, digests)
    tables_RLE = placement.default_log2phy()
    agents = []
    for rank in share:
        hello = Hello(
            DEPLOYMENT,
            rank,
            f"node-{rank // 8}",
            rank,
            "forming",
            scale.shape,
            0,
            digest,
            (0,) * scale.layers,
            placement.phy2log_LRS[:, rank],
            tables_RLE[rank],
        )
        agents.append(_Agent(load, hello))
    return agents


class _Agent:
    """One rank's stream."""

    def __init__(self, load: Load, hello: Hello) -> None:
        self.dropped_steps = self.sent_bytes = self.reports = 0
        self.plan_at = 0.0
        self._load = load
        self._rank = hello.rank
        self._digest = hello.digest
        self._hello = agent_pb2.ConnectRequest(hello=encode(hello)).SerializeToString()
        self._asked_steps = self._step = 0
        self._reports: list[agent_pb2.ConnectRequest] = []
        self._call: Any = None
        self._writing = asyncio.Lock()

    @property
    def tally(self) -> Tally:
        """All that it has sent and received."""
        return Tally(self.dropped_steps, self.sent_bytes, self.reports, (self.plan_at,))

    async def join(self, channel: grpc.aio.Channel, turns: asyncio.Semaphore) -> None:
        connect = channel.stream_stream(_CONNECT, None, agent_pb2.ConnectResponse.FromString)
        async with turns:
            self._call = connect()
            await self._call.write(self._hello)
            answer = await self._call.read()
        if answer == grpc.aio.EOF or not answer.HasField("welcome"):
            raise RuntimeError(f"rank {self._rank}: {await self._call.details()}")
        self._asked_steps = answer.welcome.report_steps

    async def run(self, start: float) -> None:
        await asyncio.gather(self._send(start), self._beat(), self._hear())

    async def _send(self, start: float) -> None:
        step = steps = 0
        while True:
            self._step = step
            asked = self._load.report_steps or self._asked_steps
            # A longer report than the last one begins at a multiple of its steps, as agents cut theirs.
            if asked != steps and step % asked == 0:
                steps = asked
                drawn = drawn_reports(self._load.scale, self._rank, steps)
                self._reports = [agent_pb2.ConnectRequest(heat_report=encode(report)) for report in drawn]
            seconds = steps / self._load.steps_per_second
            # Ranks report at times of their own, though they step together.
            due = (
                start
                + step / self._load.steps_per_second
                + seconds * (1 + self._rank / self._load.scale.ranks)
            )
            await asyncio.sleep(max(0.0, due - time.time()))
            behind = int((time.time() - due) / seconds)
            if behind > _QUEUED_REPORTS:
                self.dropped_steps += steps * (behind - _QUEUED_REPORTS)
                step += steps * (behind - _QUEUED_REPORTS)
            message = self._reports[(step // steps + self._rank) % len(self._reports)]
            message.heat_report.first_step = step
            message.heat_report.dropped_steps = self.dropped_steps
            for part in in_parts(message):
                data = part.SerializeToString()
                await self._write(data)
                self.sent_bytes += len(data)
            self.reports += 1
            step += steps

    async def _write(self, data: bytes) -> None:
        """One at a time: gRPC gives up a call on which two writes meet, and the service hears nothing of it."""
        async with self._writing:
            await self._call.write(data)

    async def _beat(self) -> None:
        await asyncio.sleep(_HEARTBEAT_SECONDS * self._rank / self._load.scale.ranks)
        heartbeats, reports = HeartbeatSchedule(time.monotonic()), 0
        while True:
            if self.reports > reports:
                heartbeats.note_heat()
            reports = self.reports
            beat = Heartbeat(step=self._step, epoch=0, digest=self._digest, error="")
            if heartbeats.is_due(time.monotonic(), beat, _HEARTBEAT_SECONDS):
                message = agent_pb2.ConnectRequest(heartbeat=encode(beat))
                await self._write(message.SerializeToString())
            await asyncio.sleep(heartbeats.seconds_left(time.monotonic()))

    async def _hear(self) -> None:
        while (answer := await self._call.read()) != grpc.aio.EOF:
            if answer.HasField("plan"):
                self.plan_at = time.time()
            elif answer.HasField("reporting"):
                self._asked_steps = answer.reporting.report_steps or self._asked_steps
        raise RuntimeError(f"rank {self._rank}: the stream ended: {await self._call.details()}")
