"""Agents that run as coroutines, several per process: real streams and synthetic heat, but no model.

The agents carry out plans on a fixed schedule. All ranks receive a start step, and then switch one layer every few
steps. Like real agents, they send the plan's statuses and end their reports at each switch. From then on, a slot's
tokens are drawn for the expert that it now holds.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import grpc

from benchmarks.scale.heat import Reports, Scale, expected_tokens
from benchmarks.scale.measured_service import asked_by
from eplb_core.placement import Float64, combine_digests, layer_digest
from eplb_core.wire.agent import Heartbeat, Hello, PlanState, PlanStatus, Shape
from eplb_core.wire.codec import MAX_MESSAGE_BYTES, encode, in_parts
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.plan import RankLayer, RankPlan, decode_plan
from worker_agent.stream import HeartbeatSchedule

DEPLOYMENT = "scale"
_CONNECT = "/eplb.v1.AgentService/Connect"
_JOIN_SECONDS = 300.0
_STREAMS_PER_CHANNEL = 64
_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
_JOINING_AT_ONCE = 2
"""Number of Hellos sent at a time. The service accepts four at a time from one host."""
_QUEUED_REPORTS = 64
"""Maximum number of queued reports, as in a real agent."""
_HEARTBEAT_SECONDS = 2.0
_MOMENT_SECONDS = 0.01
_HEAD_BYTES = 32
"""Length of the prefix that identifies a plan message. It contains the size, plan number, leader term and base."""


@dataclass(frozen=True)
class Load:
    """Load that a deployment puts on the service.

    Parameters
    ----------
    scale
        Size of the deployment.
    steps_per_second
        Steps per second that the model runs.
    report_steps
        Number of steps per report; ``None`` for the number that the service requests.
    switch_steps
        Number of steps between two layer switches.
    interval
        Number of steps before the first decision.
    """

    scale: Scale
    steps_per_second: float
    report_steps: int | None
    switch_steps: int = 16
    interval: int = 256


@dataclass(frozen=True)
class Tally:
    """Counters summed over agents.

    Parameters
    ----------
    dropped_steps
        Number of steps that could not be sent in time.
    sent_bytes
        Number of bytes of heat sent.
    reports
        Number of heat reports sent.
    switched
        Number of layers switched.
    heat_at
        For each agent, the time at which it had sent the interval's last step, in seconds since 1970; 0 if not yet.
    plans_at
        For each agent, the time at which it received its first plan, in seconds since 1970; 0 if not yet.
    cpu
        CPU seconds that the agents' processes have used.
    """

    dropped_steps: int = 0
    sent_bytes: int = 0
    reports: int = 0
    switched: int = 0
    heat_at: tuple[float, ...] = ()
    plans_at: tuple[float, ...] = ()
    cpu: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class RankProcesses:
    """Handle to all ranks after they have joined. Step 0 begins at ``start``, in seconds since 1970."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.start = 0.0

    def begin(self) -> None:
        """Make the model's steps start one second from now."""
        self.start = time.time() + 1.0
        self._send(self.start)

    def switch_from(self, step: int) -> None:
        """Make all ranks carry out their plan from ``step`` onwards. No rank may have begun to report that step."""
        self._send(step)

    def _send(self, value: float) -> None:
        for pipe in self._pipes:
            pipe.send(value)

    def tally(self) -> Tally:
        """Return the counters, summed over all agents."""
        for pipe in self._pipes:
            pipe.send("tally")
        return sum((pipe.recv() for pipe in self._pipes), Tally())


@contextmanager
def rank_processes(address: str, load: Load, processes: int) -> Iterator[RankProcesses]:
    """Run all of a deployment's ranks while the context is active. All ranks have joined when it is entered."""
    spawn = multiprocessing.get_context("spawn")
    shares = [range(first, load.scale.ranks, processes) for first in range(processes)]
    pipes = []
    started = []
    try:
        for share in shares:
            parent_pipe, child_pipe = spawn.Pipe()
            process = spawn.Process(
                target=_run_agents, args=(child_pipe, address, load, share), name="eplb-ranks"
            )
            process.start()
            child_pipe.close()
            pipes.append(parent_pipe)
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
    requests: asyncio.Queue[Any] = asyncio.Queue()
    crew = _Crew()
    agents = _agents(load, share, crew)
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
        asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: requests.put_nowait(asked_by(pipe)))
        pipe.send("joined")
        start = await requests.get()
        running = [asyncio.create_task(agent.run(start)) for agent in agents]
        while (request := await requests.get()) is not None:
            for task in running:
                if task.done():
                    task.result()
            if request == "tally":
                pipe.send(sum((agent.tally for agent in agents), Tally(cpu=time.process_time())))
            else:
                crew.begin(request, load)
        for task in running:
            task.cancel()


def _agents(load: Load, share: range, crew: _Crew) -> list[_Agent]:
    scale = load.scale
    placement = scale.placement()
    # The digest is combined layer by layer, which needs less memory than building all tables at once.
    digests = [layer_digest(layer, row_RS) for layer, row_RS in enumerate(placement.phy2log_LRS)]
    digest = combine_digests(scale.experts, digests)
    crew.digests = digests
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
        agents.append(_Agent(load, hello, crew, expected_tokens(scale, placement, rank)))
    return agents


class _Crew:
    """Plan that all ranks in a process carry out, and the steps at which its layers switch."""

    def __init__(self) -> None:
        self.plan: RankPlan | None = None
        self._head = b""
        self.digests: list[int] = []
        self.versions: list[tuple[int, int]] = []
        self.switches: list[int] = []
        self.begun = asyncio.Event()

    def hear(self, data: bytes, shape: Shape) -> agent_pb2.ConnectResponse | None:
        """Decode a message from the service. Return ``None`` for the first plan.

        The plan is decoded only once per process. Real ranks run on other machines, so the agents here must take as
        little CPU time from the service as possible.
        """
        if self._head and data.startswith(self._head):
            return None
        answer = agent_pb2.ConnectResponse.FromString(data)
        if self.plan is not None or not answer.HasField("plan"):
            return answer
        self.plan = decode_plan(answer.plan, shape)
        # The plan's number is in this prefix.
        self._head = data[:_HEAD_BYTES]
        for epoch, update in enumerate(self.plan.layers, start=1):
            self.digests[update.layer] = layer_digest(update.layer, update.phy2log_RS)
            self.versions.append((epoch, combine_digests(shape.experts, self.digests)))
        return None

    def switched(self, index: int) -> tuple[RankLayer, int]:
        """Return the layer with the given index in the plan, and its epoch after the switch."""
        assert self.plan is not None
        return self.plan.layers[index], self.versions[index][0]

    def begin(self, step: int, load: Load) -> None:
        """Schedule the switch of one layer every few steps, starting at ``step``."""
        assert self.plan is not None
        self.switches = [step + load.switch_steps * index for index in range(len(self.plan.layers))]
        self.begun.set()

    def segment_end(self, step: int, report_steps: int) -> int:
        """Return the end (exclusive) of a report that begins at ``step``. Reports do not span a switch."""
        end = (step // report_steps + 1) * report_steps
        upcoming = bisect.bisect_right(self.switches, step)
        return min([end, *self.switches[upcoming : upcoming + 1]])


class _Agent:
    """One rank's agent and its stream."""

    def __init__(self, load: Load, hello: Hello, crew: _Crew, expected_LS: Float64) -> None:
        self.dropped_steps = 0
        self.sent_bytes = 0
        self.reports = 0
        self.switched = 0
        self.heat_at = 0.0
        self.plan_at = 0.0
        self._load = load
        self._rank = hello.rank
        self._crew = crew
        self._version = hello.version
        self._hello = agent_pb2.ConnectRequest(hello=encode(hello)).SerializeToString()
        self._requested_steps = 0
        self._step = 0
        self._reports = Reports(load.scale, hello.rank, expected_LS)
        self._call: Any = None
        self._writing = asyncio.Lock()

    @property
    def tally(self) -> Tally:
        """Counters of this agent."""
        return Tally(
            self.dropped_steps, self.sent_bytes, self.reports, self.switched, (self.heat_at,), (self.plan_at,)
        )

    async def join(self, channel: grpc.aio.Channel, turns: asyncio.Semaphore) -> None:
        connect = channel.stream_stream(_CONNECT, None, None)
        async with turns:
            self._call = connect()
            await self._call.write(self._hello)
            data = await self._call.read()
        answer = (
            agent_pb2.ConnectResponse()
            if data == grpc.aio.EOF
            else agent_pb2.ConnectResponse.FromString(data)
        )
        if not answer.HasField("welcome"):
            raise RuntimeError(f"rank {self._rank}: {await self._call.details()}")
        self._requested_steps = answer.welcome.report_steps

    async def run(self, start: float) -> None:
        await asyncio.gather(self._send(start), self._beat(), self._hear(), self._carry_out(start))

    async def _send(self, start: float) -> None:
        step = 0
        rate = self._load.steps_per_second
        while True:
            self._step = step
            # As in a real agent, reports end at a multiple of their length.
            steps = self._crew.segment_end(step, self._load.report_steps or self._requested_steps) - step
            # All ranks step at the same time, so they also report at the same time.
            due = start + (step + steps) / rate
            await asyncio.sleep(max(0.0, due - time.time()))
            behind = int((time.time() - due) * rate / steps)
            if behind > _QUEUED_REPORTS:
                self.dropped_steps += steps * (behind - _QUEUED_REPORTS)
                step += steps * (behind - _QUEUED_REPORTS)
            switched = bisect.bisect_right(self._crew.switches, step)
            while self.switched < switched:
                # An agent reports a switch before it reports the steps that follow.
                await asyncio.sleep(_MOMENT_SECONDS)
            for index in range(len(self._reports.switched), switched):
                self._reports.switch(*self._crew.switched(index))
            switching = switched not in (0, len(self._crew.switches))
            message = self._reports.message(step, steps, self.dropped_steps, switching)
            for part in in_parts(message):
                data = part.SerializeToString()
                await self._write(data)
                self.sent_bytes += len(data)
            self.reports += 1
            step += steps
            if step >= self._load.interval:
                self.heat_at = self.heat_at or time.time()

    async def _carry_out(self, start: float) -> None:
        """Report each of the plan's layers when its step is due."""
        await self._crew.begun.wait()
        assert self._crew.plan is not None
        for index, update in enumerate(self._crew.plan.layers):
            step = self._crew.switches[index]
            await asyncio.sleep(max(0.0, start + step / self._load.steps_per_second - time.time()))
            epoch, digest = self._crew.versions[index]
            await self._report(PlanState.TRANSFERRED, update.layer, *self._version, step)
            self._version = epoch, digest
            await self._report(PlanState.COMMITTED, update.layer, epoch, digest, step)
            self.switched += 1

    async def _report(self, state: PlanState, layer: int, epoch: int, digest: int, step: int) -> None:
        assert self._crew.plan is not None
        status = PlanStatus(
            self._crew.plan.plan_id, state, layer, epoch=epoch, digest=digest, step=step, transfer_seconds=0.1
        )
        await self._write(agent_pb2.ConnectRequest(plan_status=encode(status)).SerializeToString())

    async def _write(self, data: bytes) -> None:
        """Write one message at a time, because gRPC cancels a call on which two writes overlap."""
        async with self._writing:
            await self._call.write(data)

    async def _beat(self) -> None:
        await asyncio.sleep(_HEARTBEAT_SECONDS * self._rank / self._load.scale.ranks)
        heartbeats = HeartbeatSchedule(time.monotonic())
        reports = 0
        while True:
            if self.reports > reports:
                heartbeats.note_heat()
            reports = self.reports
            epoch, digest = self._version
            beat = Heartbeat(step=self._step, epoch=epoch, digest=digest, error="")
            if heartbeats.is_due(time.monotonic(), beat, _HEARTBEAT_SECONDS):
                message = agent_pb2.ConnectRequest(heartbeat=encode(beat))
                await self._write(message.SerializeToString())
            await asyncio.sleep(heartbeats.seconds_left(time.monotonic()))

    async def _hear(self) -> None:
        crew = self._crew
        while (data := await self._call.read()) != grpc.aio.EOF:
            answer = crew.hear(data, self._load.scale.shape)
            if answer is None:
                self.plan_at = self.plan_at or time.time()
                assert crew.plan is not None
                status = PlanStatus(crew.plan.plan_id, PlanState.ACCEPTED, crew.plan.layers[0].layer)
            elif answer.HasField("plan"):
                layer = answer.plan.layers[0].layer
                reason = "the benchmark's ranks execute only one plan"
                status = PlanStatus(answer.plan.plan_id, PlanState.REFUSED, layer, reason=reason)
            else:
                if answer.HasField("reporting"):
                    self._requested_steps = answer.reporting.report_steps or self._requested_steps
                continue
            await self._write(agent_pb2.ConnectRequest(plan_status=encode(status)).SerializeToString())
        raise RuntimeError(f"rank {self._rank}: the stream ended: {await self._call.details()}")
