"""One life of a simulated engine, from when its ranks' agents meet until one rank's process exits."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from eplb_core.wire.agent import Shape
from tests.simulation.lines import failing_lines
from tests.simulation.model import Misfits, Model, SimulatedLayer
from tests.simulation.network import SimulatedGroup, SimulatedPeers
from tests.simulation.scheduler import Process
from tests.simulation.service import DEPLOYMENT
from tests.simulation.stream import Call, SimulatedSettings
from worker_agent.agent import Agent
from worker_agent.forward_clock import StepTimer
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.lane import Lanes
from worker_agent.swap.peers import seconds_until_gone
from worker_agent.swap.rank_layout import Identity, RankLayout
from worker_agent.swap.rendezvous import Rendezvous

_WARM_PASSES = 5000
"""Number of passes before the agents meet."""
_SECRET = b"of this formation"


class Engine:
    """Engine whose ranks meet, serve, and end together. ``number`` is the number of its current life."""

    def __init__(self, world: Any, number: int) -> None:
        self.scheduler = world.scheduler
        self.network = world.network
        self.shapes = world.shapes
        self.number = number
        self._world = world
        self.fatal: dict[int, str] = {}
        self.agents: dict[int, Agent] = {}
        self.layers: dict[int, list[SimulatedLayer]] = {}
        self.counters: dict[int, torch.Tensor] = {}
        self.failing_installs: dict[int, int] = {}
        self.misfits = [Misfits() for _ in range(self.shapes.ranks)]
        drift = self.scheduler.random.uniform
        names = [f"rank {rank}" for rank in range(self.shapes.ranks)]
        self.ranks = [Process(self.scheduler, name, drift(0.98, 1.02), self.network) for name in names]
        self.model = Model(self.ranks, self.shapes, world.breach, world.stride)
        self.drift(world.drawn_heat())
        peers = [SimulatedPeers("127.0.0.1", process) for process in self.ranks]
        addresses = [peer.address for peer in peers]
        patience = world.settings["peer_timeout_seconds"]
        self._settings = SimulatedSettings(deployment=DEPLOYMENT, service="127.0.0.1:1", **world.settings)
        for rank, process in enumerate(self.ranks):
            group = SimulatedGroup(peers[rank], _SECRET, rank, addresses, patience)
            group.network = self.network
            group.formation = f"engine {number}"
            process.spawn("model", lambda rank=rank, group=group: self._serve(rank, group))

    @property
    def over(self) -> bool:
        """True once a rank has exited, so that the model no longer serves."""
        return any(not process.alive for process in self.ranks) or bool(self.fatal)

    def end(self) -> None:
        for process in self.ranks:
            process.kill()

    def drift(self, heat_LE: Any) -> None:
        """Set the tokens that each rank has per pass from now on, int32 ``[L, E]``."""
        self._heat_LE = heat_LE
        for rank in self.layers:
            self._heat_up(rank)

    def _heat_up(self, rank: int) -> None:
        for layer, heat_E in zip(self.layers[rank], self._heat_LE, strict=True):
            layer.source_load[:] = torch.from_numpy(heat_E)

    def _serve(self, rank: int, group: SimulatedGroup) -> None:
        process = self.ranks[rank]
        scheduler = self.scheduler
        shapes = self.shapes
        counter = self.counters[rank] = torch.tensor(_WARM_PASSES)
        memory_LX = torch.zeros(shapes.layers, 2 * shapes.slots + shapes.experts // 2, dtype=torch.int64)
        memory = enumerate(memory_LX)
        self.layers[rank] = [
            SimulatedLayer(rank, layer, memory_X, shapes.placement, counter) for layer, memory_X in memory
        ]
        self._heat_up(rank)
        try:
            agent = self._agent(rank, group, self.layers[rank])
        except RuntimeError as error:
            self._end(rank, f"could not meet: {error}")
            return
        # The host's queued work is complete once the simulated device has run it.
        exact = agent._clock.exact
        agent._clock.at_rest = partial(self.model.at_rest, rank)
        agent._clock.exact = lambda: exact() if self.model.at_rest(rank) else 0
        agent._timer = StepTimer(lambda: int(1e9 * scheduler.now))
        self.agents[rank] = agent
        try:
            while True:
                process.sleep(shapes.pass_seconds * scheduler.random.uniform(0.05, 0.1))
                self.model.queue(rank, memory_LX, counter)
                counter += self.misfits[rank].counted
                self.misfits[rank].counted = 0
                self._call(rank, agent)
        except FatalSwitchError as fatal:
            self._end(rank, f"FatalSwitchError: {fatal}")
        except Exception as error:
            self._world.breach(f"rank {rank}: {type(error).__name__} reached the model: {error}")

    def _end(self, rank: int, reason: str) -> None:
        self.fatal[rank] = reason
        # If the network is silent for long enough, the agents have no choice but to stop.
        patience = self._settings.peer_timeout_seconds
        gone = seconds_until_gone(patience)
        for cause, seconds in (
            ("did not answer", patience),
            ("did not install", patience),
            ("cannot be reached", gone),
            ("aborted vote", gone),
        ):
            # The rank's first datagram may have been lost a second after the rank began to wait.
            silent = self.network.was_silent(self.ranks[rank].name, seconds - 1.0)
            self._world.excused |= cause in reason and silent
        self.scheduler.note(f"rank {rank}", reason)

    def _call(self, rank: int, agent: Agent) -> None:
        misfits = self.misfits[rank]
        calls = 1 - min(misfits.missed, 1) + min(misfits.doubled, 1)
        misfits.missed, misfits.doubled = max(0, misfits.missed - 1), max(0, misfits.doubled - 1)
        process = self.ranks[rank]
        for _ in range(calls):
            # A host may catch an interrupt and continue.
            with suppress(KeyboardInterrupt), failing_lines(process):
                agent.step()

    def _agent(self, rank: int, group: SimulatedGroup, layers: list[SimulatedLayer]) -> Agent:
        process = self.ranks[rank]
        shapes = self.shapes
        settings = self._settings.model_copy(update={"node": f"node {rank}"})
        settings._streams = lambda requests, metadata: Call(
            process, self.network, self._world.service, requests
        )
        votes = group.process_group("vote")
        patience = timedelta(seconds=settings.transfer_timeout_seconds)
        lanes = Lanes(group, "gloo", torch.device("cpu"), patience)
        lanes.lane(0)
        shape = Shape(shapes.ranks, shapes.layers, shapes.experts, shapes.slots, bytes_per_expert=16, width=1)
        identity = Identity(
            DEPLOYMENT, f"engine {self.number}", rank, f"node {rank}", tuple(range(shapes.ranks)), shape
        )
        installed = RankLayout.first(rank, shapes.placement, shapes.placement.default_log2phy()[rank])
        rendezvous = Rendezvous(group, votes, lanes, identity, installed)
        return Agent(layers, settings, rendezvous, lambda _: self._installed(rank), process)

    def _installed(self, rank: int) -> None:
        if self.failing_installs.pop(rank, 0):
            raise RuntimeError("simulated: the layer could not be installed")
