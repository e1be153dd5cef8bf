"""The gRPC stream between one rank's agent and the service, on simulated processes and their network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from pydantic import PrivateAttr

from eplb_core.wire.generated import agent_pb2
from tests.simulation.network import Network
from tests.simulation.scheduler import Process
from worker_agent.settings import AgentSettings

NAME = "service"


class Lost(grpc.RpcError):
    def details(self) -> str:
        return "the stream is lost"


class SimulatedSettings(AgentSettings):
    """Agent settings with simulated streams to the service."""

    _streams: Any = PrivateAttr()

    @property
    def security(self) -> Any:
        channel = SimpleNamespace(stream_stream=lambda *_, **__: self._streams)
        return SimpleNamespace(open=lambda _: contextlib.nullcontext(channel))


class Call:
    """Both ends of one stream. The agent iterates and cancels, and the service reads and writes.

    A separate thread pulls the requests. Messages do not overtake each other.
    """

    def __init__(self, process: Process, network: Network, service: Any, requests: Iterator[Any]) -> None:
        self._process = process
        self._network = network
        self._service = service
        self._responses = process.queue()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._requests = requests
        self._last = 0.0
        self.over = False
        process.on_end.append(self.end)
        if self._reachable():
            service.serve(self)
            process.spawn("grpc", self._pull)
        else:
            process.later(0.1, self.cancel)

    # Interface for the agent

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        response = self._responses.get()
        if response is None:
            raise Lost
        return agent_pb2.ConnectResponse.FromString(response)

    def end(self) -> None:
        if not self.over:
            self.over = True
            self._responses.put(None)
            self._inbox.put_nowait(grpc.aio.EOF)
            if self._process.alive:
                self._process.on_end.remove(self.end)

    cancel = end

    # Interface for the service

    async def read(self) -> Any:
        return await self._inbox.get()

    async def write(self, answer: Any) -> None:
        """Send ``answer`` to the rank.

        Plans are the only messages passed as bytes. They are lost while the service's host withholds plans.
        """
        if not isinstance(answer, bytes):
            answer = answer.SerializeToString()
        elif self._service.withholds():
            return
        self._carry(lambda: self._responses.put(answer))

    def _pull(self) -> None:
        for request in self._requests:
            if self.over:
                return
            message = agent_pb2.ConnectRequest.FromString(request.SerializeToString())
            self._carry(lambda message=message: self._inbox.put_nowait(message))

    def _carry(self, deliver: Callable[[], object]) -> None:
        scheduler = self._network.scheduler
        if not self._reachable():
            self.end()
            return
        self._last = max(self._last, scheduler.now + self._network.latency())
        scheduler.at(self._last, lambda: None if self.over else deliver())

    def _reachable(self) -> bool:
        service = self._service
        cut = self._network.is_cut(self._process.name, NAME)
        return service is not None and service.process.alive and not cut
