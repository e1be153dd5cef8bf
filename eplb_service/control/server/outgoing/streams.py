"""Streams to agents, by deployment and rank, and the sending of plans over them.

A plan is sent to a few ranks at a time, in rank order, because the messages to all ranks together are large. If the
plan ends first, it is not sent to the remaining ranks. This is harmless, because ranks drop a plan that some of them
have not received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from eplb_core.wire.agent import Balance, CallOff, Reporting
from eplb_core.wire.codec import encode
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.plan import SharedPlan
from eplb_service.control.server.listening import CallError

_MAX_CONCURRENT = 2
"""Maximum number of ranks to which plans are sent at the same time."""
_MAX_TURN_SECONDS = 1.0
"""Time after which a send no longer delays the next one, so that a frozen rank cannot block the others."""


@dataclass
class _PlanSending:
    """Transmission of one plan to all ranks.

    Parameters
    ----------
    _plan
        The plan.
    _turns
        Semaphore that limits the number of concurrent messages.
    _remaining
        Number of ranks to which the plan has not been sent yet.
    over
        True if the plan has ended and must not be sent to further ranks.
    out
        Event that is set once the plan has been sent to all ranks, or has ended.
    """

    _plan: SharedPlan
    _turns: asyncio.Semaphore
    _remaining: int
    over: bool = False
    out: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, rank: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the plan to a rank with ``write`` when its turn comes, unless the plan has ended by then."""
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
        self._remaining -= 1
        if not self._remaining:
            self.out.set()


class RankStream:
    """The service's side of one agent's stream.

    It has these attributes:

    - ``outbox``: messages to send; a plan is enqueued as a pair (its transmission, the rank).
    - ``heard_at``, ``heat_at``: times of the last message and of the last heat report.
    - ``ahead_since``: time at which the rank's heat began to wait for slower ranks; ``None`` if it is not waiting.
    """

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[agent_pb2.ConnectResponse | tuple[_PlanSending, int]] = asyncio.Queue()
        self.heard_at = self.heat_at = time.monotonic()
        self.ahead_since: float | None = None
        self._ending = asyncio.Event()
        self._status: CallError | None = None

    @property
    def over(self) -> bool:
        """True after ``end``. Messages that arrive later are ignored."""
        return self._status is not None

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with a status that makes agents reconnect."""
        if self._status is None:
            self._status = CallError(code, reason)
            self._ending.set()

    async def ended(self) -> None:
        """Wait for ``end``, then raise its status as ``CallError``."""
        await self._ending.wait()
        assert self._status is not None
        raise self._status


class Streams:
    """The streams of all deployments."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[int, RankStream]] = {}
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT)
        self._plans: dict[str, _PlanSending] = {}
        self._asked: dict[str, Reporting] = {}

    def add(self, deployment: str, rank: int, stream: RankStream) -> None:
        """Add the stream of a rank that has been registered."""
        self._streams.setdefault(deployment, {})[rank] = stream

    def remove(self, deployment: str, rank: int, stream: RankStream) -> bool:
        """Remove a stream that has ended; return False if another stream of the rank has replaced it."""
        streams = self._streams.get(deployment, {})
        if streams.get(rank) is not stream:
            return False
        del streams[rank]
        return True

    def replace(self, deployment: str, rank: int, reason: str) -> bool:
        """End and remove a rank's stream, so that a new one can replace it; return True if there was one."""
        stream = self._streams.get(deployment, {}).pop(rank, None)
        if stream is not None:
            stream.end(grpc.StatusCode.ABORTED, reason)
        return stream is not None

    def replace_all(self, deployment: str, reason: str) -> None:
        """End and remove all streams of a deployment and forget its requested reporting."""
        self.end(deployment, reason)
        self._streams.pop(deployment, None)
        self._asked.pop(deployment, None)

    def send(self, deployment: str, plan: SharedPlan) -> None:
        """Send a plan to all connected ranks, and stop sending the previous one."""
        self.withdraw(deployment)
        streams = sorted(self._streams.get(deployment, {}).items())
        sending = self._plans[deployment] = _PlanSending(plan, self._turns, len(streams))
        for rank, stream in streams:
            stream.outbox.put_nowait((sending, rank))

    def call_off(self, deployment: str, call: CallOff, rank: int | None = None) -> None:
        """Send a call-off to all connected ranks, or only to ``rank``, and stop sending the plan to further ranks."""
        self.withdraw(deployment)
        message = agent_pb2.ConnectResponse(call_off=encode(call))
        streams = self._streams.get(deployment, {})
        for stream in streams.values() if rank is None else [streams[rank]]:
            stream.outbox.put_nowait(message)

    async def sent(self, deployment: str) -> None:
        """Wait until the current plan has been sent to all ranks or has ended."""
        if deployment in self._plans:
            await self._plans[deployment].out.wait()

    def withdraw(self, deployment: str) -> None:
        """Stop sending the deployment's plan to ranks that have not received it yet."""
        sending = self._plans.pop(deployment, None)
        if sending is not None:
            sending.over = True
            sending.out.set()

    def asked(self, deployment: str, reporting: Reporting) -> Reporting:
        """Return the ``Reporting`` last requested from the ranks. If there is none, record and return ``reporting``."""
        return self._asked.setdefault(deployment, reporting)

    def ask(self, deployment: str, reporting: Reporting) -> None:
        """Request reporting options from all connected ranks, unless they are already in effect."""
        if self.asked(deployment, reporting) == reporting:
            return
        self._asked[deployment] = reporting
        message = agent_pb2.ConnectResponse(reporting=encode(reporting))
        for stream in self._streams.get(deployment, {}).values():
            stream.outbox.put_nowait(message)

    def tell(self, deployment: str, balance: Balance) -> None:
        """Send the deployment's balance to rank 0, if it is connected."""
        stream = self._streams.get(deployment, {}).get(0)
        if stream is not None:
            stream.outbox.put_nowait(agent_pb2.ConnectResponse(balance=encode(balance)))

    def end(self, deployment: str, reason: str) -> None:
        """End the streams of a deployment, so that its agents reconnect with a new Hello."""
        for stream in self._streams.get(deployment, {}).values():
            stream.end(grpc.StatusCode.ABORTED, reason)

    def end_all(self, reason: str) -> None:
        """End every stream, so that agents retry until a service is available."""
        for streams in self._streams.values():
            for stream in streams.values():
                stream.end(grpc.StatusCode.UNAVAILABLE, reason)
