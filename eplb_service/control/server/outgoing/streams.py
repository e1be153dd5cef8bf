"""Live streams to agents, by deployment and rank, and plans on their way over them.

Copies of a plan go out by turns, in the order of ranks: together they are large. What has not gone out by the time that
the plan is over is not sent: ranks drop a plan that not all of them hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from eplb_core.wire.agent import CallOff, Reporting
from eplb_core.wire.codec import encode
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.plan import SharedPlan
from eplb_service.control.server.listening import StatusError

_AT_A_TIME = 2
"""Copies of plans that may be on their way."""
_MAX_TURN_SECONDS = 1.0
"""Who takes longer goes on beside those whose turn comes next: one frozen rank must not keep a plan from the others."""


@dataclass
class _PlanSending:
    """One plan on its way to all ranks, by turns.

    ``over`` says that no more copies are to go out, ``out`` is set then, or once as many as are left are out.
    """

    _plan: SharedPlan
    _turns: asyncio.Semaphore
    _left: int
    over: bool = False
    out: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, rank: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Send one rank its copy by ``write`` when its turn comes, unless the plan is over by then."""
        async with self._turns:
            if self.over:
                return
            writing = asyncio.ensure_future(write(self._plan.response(rank)))
            try:
                await asyncio.wait([writing], timeout=_MAX_TURN_SECONDS)
            except asyncio.CancelledError:
                writing.cancel()
                raise
        await writing
        self._left -= 1
        if not self._left:
            self.out.set()


class RankStream:
    """The service's end of one agent's stream: what is to be sent, when it and its heat were last heard, if it ends.

    A plan waits in ``outbox`` as its sending and the rank; its heat waits for others since ``ahead_since``.
    """

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[agent_pb2.ConnectResponse | tuple[_PlanSending, int]] = asyncio.Queue()
        self.heard_at = self.heat_at = time.monotonic()
        self.ahead_since: float | None = None
        self._ending = asyncio.Event()
        self._status: StatusError | None = None

    @property
    def over(self) -> bool:
        """True once it has been asked to end: input that still comes counts no more."""
        return self._status is not None

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with a status on which agents connect again."""
        if self._status is None:
            self._status = StatusError(code, reason)
            self._ending.set()

    async def ended(self) -> None:
        """Wait for ``end``; raises what it was given."""
        await self._ending.wait()
        assert self._status is not None
        raise self._status


class Streams:
    """All streams of all deployments."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[int, RankStream]] = {}
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._plans: dict[str, _PlanSending] = {}
        self._asked: dict[str, Reporting] = {}

    def add(self, deployment: str, rank: int, stream: RankStream) -> None:
        """Add the stream of a rank that has been taken in."""
        self._streams.setdefault(deployment, {})[rank] = stream

    def remove(self, deployment: str, rank: int, stream: RankStream) -> bool:
        """Remove a stream that is over; returns whether it was the rank's still, and no other has replaced it."""
        streams = self._streams.get(deployment, {})
        if streams.get(rank) is not stream:
            return False
        del streams[rank]
        return True

    def replace(self, deployment: str, rank: int, reason: str) -> bool:
        """End the rank's stream and forget it, for another to take its place; returns whether there was one."""
        stream = self._streams.get(deployment, {}).pop(rank, None)
        if stream is not None:
            stream.end(grpc.StatusCode.ABORTED, reason)
        return stream is not None

    def replace_all(self, deployment: str, reason: str) -> None:
        """End all streams of a deployment, and forget them and what they were asked for: others take their place."""
        self.end(deployment, reason)
        self._streams.pop(deployment, None)
        self._asked.pop(deployment, None)

    def send(self, deployment: str, plan: SharedPlan) -> None:
        """Send each rank that is still there its own message of a plan, by turns; none of the plan before it."""
        self.withdraw(deployment)
        streams = sorted(self._streams.get(deployment, {}).items())
        sending = self._plans[deployment] = _PlanSending(plan, self._turns, len(streams))
        for rank, stream in streams:
            stream.outbox.put_nowait((sending, rank))

    def call_off(self, deployment: str, call: CallOff, rank: int | None = None) -> None:
        """Send a call-off to all connected ranks, or to one. Ranks that do not have the plan yet do not get it."""
        self.withdraw(deployment)
        message = agent_pb2.ConnectResponse(call_off=encode(call))
        streams = self._streams.get(deployment, {})
        for stream in streams.values() if rank is None else [streams[rank]]:
            stream.outbox.put_nowait(message)

    async def sent(self, deployment: str) -> None:
        """Wait until all copies of the plan under way are out, or it is over."""
        if deployment in self._plans:
            await self._plans[deployment].out.wait()

    def withdraw(self, deployment: str) -> None:
        """Stop sending the deployment's plan: ranks that do not have it yet do not get it."""
        sending = self._plans.pop(deployment, None)
        if sending is not None:
            sending.over = True
            sending.out.set()

    def asked(self, deployment: str, reporting: Reporting) -> Reporting:
        """Return what the ranks were asked to report last; ``reporting`` where this is the first."""
        return self._asked.setdefault(deployment, reporting)

    def ask(self, deployment: str, reporting: Reporting) -> None:
        """Ask all ranks that are there to report so from now on, where it is something else than before."""
        if self.asked(deployment, reporting) == reporting:
            return
        self._asked[deployment] = reporting
        message = agent_pb2.ConnectResponse(reporting=encode(reporting))
        for stream in self._streams.get(deployment, {}).values():
            stream.outbox.put_nowait(message)

    def end(self, deployment: str, reason: str) -> None:
        """End the streams of one deployment, for the agents to introduce themselves again."""
        for stream in self._streams.get(deployment, {}).values():
            stream.end(grpc.StatusCode.ABORTED, reason)

    def end_all(self, reason: str) -> None:
        """End every stream, for the agents to try again until a service is there."""
        for streams in self._streams.values():
            for stream in streams.values():
                stream.end(grpc.StatusCode.UNAVAILABLE, reason)
