"""One life of a simulated engine: its ranks' processes, from the meeting of their agents to the end of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from eplb_service.placement import Placement
from eplb_service.wire.agent import Shape
from tests.simulation.control import Channel, SimulatedSettings
from tests.simulation.model import Misfits, Model, SimulatedLayer
from tests.simulation.network import Network, SimulatedGroup, SimulatedPeers
from tests.simulation.scheduler import Process, Scheduler
from worker_agent.agent import Agent
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.installed import Identity, Installed
from worker_agent.swap.lane import Lanes
from worker_agent.swap.rendezvous import Rendezvous

_SECRET = b"of this formation"


@dataclass(frozen=True)
class Shapes:
    """Shape of a simulated deployment, and how its host behaves."""

    ranks: int
    layers: int
    experts: int
    slots: int
    pass_seconds: float
    ahead: int

    @property
    def placement(self) -> Placement:
        """Placement that an engine starts with."""
        return Placement.linear(self.layers, self.experts, self.ranks, self.slots)


class Engine:
    """Ranks that meet, serve, and end together; ``number`` counts the engine's lives."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        shapes: Shapes,
        settings: dict[str, Any],
        number: int,
        service: Callable[[], Any],
        breach: Callable[[str], None],
    ) -> None:
        self.scheduler, self.network, self.shapes = scheduler, network, shapes
        self.number = number
        self.fatal: dict[int, str] = {}
        self.agents: dict[int, Agent] = {}
        self.misfits = [Misfits() for _ in range(shapes.ranks)]
        self._settings = settings
        self._service = service
        self._breach = breach
        self.ranks = [self._process(rank) for rank in range(shapes.ranks)]
        self.model = Model(self.ranks, shapes.placement, shapes.ahead, shapes.pass_seconds, breach)
        peers = [SimulatedPeers("127.0.0.1", process) for process in self.ranks]  # type: ignore[arg-type]
        addresses = [one.address for one in peers]
        for rank, process in enumerate(self.ranks):
            group = SimulatedGroup(peers[rank], _SECRET, rank, addresses, settings["peer_timeout_seconds"])
            group.network, group.formation = network, f"engine {number}"
            process.spawn("model", lambda rank=rank, group=group: self._serve(rank, group))  # type: ignore[misc]

    @property
    def over(self) -> bool:
        """True once a rank has ended: the model serves no other token."""
        return any(not process.alive for process in self.ranks) or bool(self.fatal)

    def end(self) -> None:
        """End all ranks."""
        for process in self.ranks:
            process.kill()

    def _process(self, rank: int) -> Process:
        process = Process(self.scheduler, f"rank {rank}", self.scheduler.random.uniform(0.98, 1.02))
        process.network = self.network
        return process

    def _serve(self, rank: int, group: SimulatedGroup) -> None:
        process, scheduler = self.ranks[rank], self.scheduler
        counter = torch.zeros((), dtype=torch.int64)
        placement = self.shapes.placement
        layers = [SimulatedLayer(rank, layer, placement, counter) for layer in range(self.shapes.layers)]
        try:
            agent = self._agent(rank, group, layers)
        except RuntimeError as error:
            self._end(rank, f"could not meet: {error}")
            return
        # Work that the host has queued is done once the simulated device has run it.
        agent._clock.at_rest = lambda seconds: self.model.at_rest(rank, seconds)  # type: ignore[method-assign]
        self.agents[rank] = agent
        try:
            while True:
                process.sleep(self.shapes.pass_seconds * scheduler.random.uniform(0.05, 0.1))
                counter += 1
                self.model.queue(rank, layers)
                self._call(rank, agent)
        except FatalSwitchError as fatal:
            self._end(rank, f"FatalSwitchError: {fatal}")
        except Exception as error:
            self._breach(f"rank {rank}: {type(error).__name__} reached the model: {error}")
            scheduler.note(process.name, f"{type(error).__name__}: {error}")

    def _end(self, rank: int, reason: str) -> None:
        self.fatal[rank] = reason
        self.scheduler.note(f"rank {rank}", reason)

    def _call(self, rank: int, agent: Agent) -> None:
        misfits = self.misfits[rank]
        if misfits.missed:
            misfits.missed -= 1
            return
        agent.step()
        if misfits.doubled:
            misfits.doubled -= 1
            agent.step()

    def _agent(self, rank: int, group: SimulatedGroup, layers: list[SimulatedLayer]) -> Agent:
        process, shapes = self.ranks[rank], self.shapes
        settings = SimulatedSettings(
            deployment="simulated", node=f"node {rank}", service="127.0.0.1:1", **self._settings
        )
        settings._opens = lambda: Channel(process, self.network, self._service)
        votes = group.process_group("vote")
        lanes = Lanes(
            group, "gloo", torch.device("cpu"), timedelta(seconds=settings.transfer_timeout_seconds)
        )
        lanes.lane(0)
        shape = Shape(shapes.ranks, shapes.layers, shapes.experts, shapes.slots, bytes_per_expert=16, width=1)
        identity = Identity(
            "simulated", f"engine {self.number}", rank, f"node {rank}", tuple(range(shapes.ranks)), shape
        )
        installed = Installed.first(rank, shapes.placement, shapes.placement.default_log2phy()[rank])
        rendezvous = Rendezvous(group, votes, lanes, identity, installed)
        return Agent(layers, settings, rendezvous, lambda _: None, process)  # type: ignore[arg-type]
