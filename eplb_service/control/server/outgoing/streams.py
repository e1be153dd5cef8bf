"""The live streams to agents, by deployment and rank."""

from __future__ import annotations

import asyncio
import time

import grpc

from eplb_service.control.core.patience import Patience
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.outgoing.plan_sending import PlanRoom, PlanSending, RankCopy
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.reporting import Reporting, encode_reporting
from eplb_service.wire.shared_plan import SharedPlan


class RankStream:
    """The service's end of one agent's stream: what is to be sent, when it and its heat were last heard, if it ends.

    ``patience`` is how long its heat still waits for that of slower ranks.
    """

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[agent_pb2.ConnectResponse | RankCopy] = asyncio.Queue()
        self.heard_at = self.heat_at = time.monotonic()
        self.patience = Patience()
        self._ending = asyncio.Event()
        self._status: StatusError | None = None

    @property
    def over(self) -> bool:
        """Whether it has been asked to end: what still comes over it counts no more."""
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
        self._streams: dict[tuple[str, int], RankStream] = {}
        self._room = PlanRoom()
        self._plans: dict[str, PlanSending] = {}

    def add(self, deployment: str, rank: int, stream: RankStream) -> None:
        """A rank has been taken in."""
        self._streams[deployment, rank] = stream

    def remove(self, deployment: str, rank: int, stream: RankStream) -> bool:
        """``stream`` is over; whether it was the rank's still, and not one that another has replaced."""
        if self._streams.get((deployment, rank)) is not stream:
            return False
        del self._streams[deployment, rank]
        return True

    def replace(self, deployment: str, rank: int, reason: str) -> bool:
        """End the rank's stream and forget it, for another to take its place; whether there was one."""
        stream = self._streams.pop((deployment, rank), None)
        if stream is not None:
            stream.end(grpc.StatusCode.ABORTED, reason)
        return stream is not None

    def replace_all(self, deployment: str, reason: str) -> None:
        """End all streams of a deployment, and forget them: others take their place."""
        for name, rank in list(self._streams):
            if name == deployment:
                self.replace(name, rank, reason)

    def send(self, deployment: str, plan: SharedPlan) -> None:
        """Its own message of a plan to each rank that is still there, by turns; none of the plan before it."""
        self.withdraw(deployment)
        sending = self._plans[deployment] = PlanSending(plan, self._room)
        for rank, stream in sorted(
            (rank, one) for (name, rank), one in self._streams.items() if name == deployment
        ):
            stream.outbox.put_nowait(RankCopy(sending, rank))

    def withdraw(self, deployment: str) -> None:
        """The plan that is being sent is over: ranks that do not have it yet do not get it."""
        sending = self._plans.pop(deployment, None)
        if sending is not None:
            sending.over = True

    def ask(self, deployment: str, reporting: Reporting) -> None:
        """Ask all ranks that are there to report so from now on."""
        message = agent_pb2.ConnectResponse(reporting=encode_reporting(reporting))
        for (name, _), stream in self._streams.items():
            if name == deployment:
                stream.outbox.put_nowait(message)

    def end(self, deployment: str, reason: str) -> None:
        """End the streams of one deployment, for the agents to introduce themselves again."""
        for (name, _), stream in self._streams.items():
            if name == deployment:
                stream.end(grpc.StatusCode.ABORTED, reason)

    def end_all(self, reason: str) -> None:
        """End every stream, for the agents to try again until a service is there."""
        for stream in self._streams.values():
            stream.end(grpc.StatusCode.UNAVAILABLE, reason)
