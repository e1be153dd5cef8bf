"""Agents as coroutines, a share of a deployment's ranks in each process: real streams, made-up heat, no model."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from benchmarks.scale.asking import asked_by
from benchmarks.scale.heat import Scale, drawn_reports
from eplb_service.placement import combine_digests, layer_digest
from eplb_service.wire.codec import MAX_MESSAGE_BYTES
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import encode_heat_report
from eplb_service.wire.hello import Hello, Shape, encode_hello
from eplb_service.wire.parts import in_parts
from eplb_service.wire.status import Heartbeat, encode_heartbeat
from worker_agent.heartbeats import Heartbeats

DEPLOYMENT = "scale"
_CONNECT = "/eplb.v1.AgentService/Connect"
_JOIN_SECONDS = 300.0
_STREAMS_PER_CHANNEL = 64
_JOINING_AT_ONCE = 2
"""A service hears four Hellos of one host at a time."""
_QUEUED_REPORTS = 64
"""As an agent keeps them."""
_HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True)
class Load:
    """What the ranks do.

    Parameters
    ----------
    scale
        Of the whole deployment.
    steps_per_second, report_steps
        How fast the model steps, and how many steps a report has; ``None`` for as many as the service asks for.
    sums
        Whether own tokens are counted as sums over each report; otherwise step by step, as agents did before.
    """

    scale: Scale
    steps_per_second: float
    report_steps: int | None
    sums: bool


@dataclass(frozen=True)
class Tally:
    """What the agents of one process have seen.

    Parameters
    ----------
    dropped_steps
        That they could not send in time, over all ranks.
    sent_bytes, reports
        Heat that they have sent.
    plans_at
        When each rank got its last plan, in seconds since 1970.
    cpu
        Seconds of CPU that the process took.
    """

    dropped_steps: int
    sent_bytes: int
    reports: int
    plans_at: tuple[float, ...]
    cpu: float


class RankProcesses:
    """All ranks, once they have joined."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def begin(self) -> None:
        """The model begins to step."""
        start = time.time() + 1.0
        for pipe in self._pipes:
            pipe.send(start)

    def tallies(self) -> list[Tally]:
        """What the agents have seen so far."""
        for pipe in self._pipes:
            pipe.send("tally")
        return [pipe.recv() for pipe in self._pipes]


@contextmanager
def rank_processes(address: str, load: Load, processes: int) -> Iterator[RankProcesses]:
    """All ranks of a deployment, joined; they leave at the end."""
    spawn = multiprocessing.get_context("spawn")
    shares = [range(first, load.scale.ranks, processes) for first in range(processes)]
    pipes, started = [], []
    try:
        for share in shares:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, address, load, share), name="eplb-ranks")
            process.start()
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


def _serve(pipe: Connection, address: str, load: Load, share: range) -> None:
    asyncio.run(_run(pipe, address, load, share))


async def _run(pipe: Connection, address: str, load: Load, share: range) -> None:
    heard: asyncio.Queue[Any] = asyncio.Queue()
    agents = _agents(load, share)
    turns = asyncio.Semaphore(_JOINING_AT_ONCE)
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(_channel(address, index))
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
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(
                Tally(
                    sum(agent.dropped_steps for agent in agents),
                    sum(agent.sent_bytes for agent in agents),
                    sum(agent.reports for agent in agents),
                    tuple(agent.plan_at for agent in agents),
                    used.ru_utime + used.ru_stime,
                )
            )
        for task in running:
            task.cancel()


def _channel(address: str, index: int) -> grpc.aio.Channel:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("eplb.channel", index),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def _agents(load: Load, share: range) -> list[_Agent]:
    scale = load.scale
    placement = scale.placement()
    # The tables of linear placements are made rank by rank: all of them at once are large.
    digests = [layer_digest(layer, row_RS) for layer, row_RS in enumerate(placement.phy2log_LRS)]
    digest = combine_digests(scale.experts, digests)
    tables_RLE = placement.default_log2phy()
    shape = Shape(scale.ranks, scale.layers, scale.experts, scale.slots, bytes_per_expert=1 << 20)
    agents = []
    for rank in share:
        hello = Hello(
            DEPLOYMENT,
            rank,
            f"node-{rank // 8}",
            rank,
            "forming",
            shape,
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
        self._hello = agent_pb2.ConnectRequest(hello=encode_hello(hello)).SerializeToString()
        self._asked_steps = self._step = 0
        self._reports: list[agent_pb2.ConnectRequest] = []
        self._call: Any = None
        self._writing = asyncio.Lock()

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
                self._draw(steps)
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

    def _draw(self, steps: int) -> None:
        drawn = drawn_reports(self._load.scale, self._rank, steps, sums=self._load.sums)
        self._reports = [agent_pb2.ConnectRequest(heat_report=encode_heat_report(report)) for report in drawn]

    async def _write(self, data: bytes) -> None:
        """One at a time: gRPC gives up a call on which two writes meet, and the service hears nothing of it."""
        async with self._writing:
            await self._call.write(data)

    async def _beat(self) -> None:
        await asyncio.sleep(_HEARTBEAT_SECONDS * self._rank / self._load.scale.ranks)
        heartbeats, reports = Heartbeats(time.monotonic()), 0
        while True:
            if self.reports > reports:
                heartbeats.said_other()
            reports = self.reports
            beat = Heartbeat(step=self._step, epoch=0, digest=self._digest, error="")
            if heartbeats.look(time.monotonic(), beat, _HEARTBEAT_SECONDS):
                message = agent_pb2.ConnectRequest(heartbeat=encode_heartbeat(beat))
                await self._write(message.SerializeToString())
            await asyncio.sleep(heartbeats.left(time.monotonic()))

    async def _hear(self) -> None:
        while (answer := await self._call.read()) != grpc.aio.EOF:
            if answer.HasField("plan"):
                self.plan_at = time.time()
            elif answer.HasField("reporting"):
                self._asked_steps = answer.reporting.report_steps or self._asked_steps
        raise RuntimeError(f"rank {self._rank}: the stream ended: {await self._call.details()}")
