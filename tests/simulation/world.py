"""A complete run: an engine, a service, faults drawn from the seed, and the invariants that must hold despite them."""

from __future__ import annotations

import gc
import logging
import operator
import random as python_random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Placement
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store import StoreError
from tests.simulation.engine import Engine
from tests.simulation.faults import BEYOND, CALL_OFF, FAULTS, LONE_OUTCOME
from tests.simulation.network import Network
from tests.simulation.scheduler import Scheduler
from tests.simulation.service import DEPLOYMENT, Disk, Service, simulated

_QUIET_PASSES = 50
"""Number of passes before the first fault, during which the ranks vote and receive a first plan."""
_FAULTY_PASSES = 200
"""Number of passes during which faults happen."""
BOUND_SECONDS = 1800.0
"""Maximum number of seconds from the last fault to the next completed plan."""
_RESTART_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_STILL_SECONDS = 3.0
_DRIFT_SECONDS = 10.0
_SERVICE = {"window_steps": 64, "decision_interval": 16, "report_steps": 8, "store": ":memory:", "threads": 1}


class Outcome(NamedTuple):
    """Outcome of a run: its breaches and its progress."""

    seed: int
    breaches: tuple[str, ...]
    fingerprint: tuple[int, int, int]
    seconds: float
    passes: int
    plans: int
    healed_after: float
    faults: int
    log: tuple[tuple[float, str, str], ...]


def simulate(seed: int, *arguments: Any) -> Outcome:
    """Simulate one of many runs. Garbage collection ignores objects from earlier runs."""
    gc.collect()
    gc.freeze()
    return World(seed, *arguments).run()._replace(log=())


class World:
    """One run with one seed.

    ``kinds`` are the faults to draw from and ``many`` is their number. By default, all kinds may be drawn and their
    number is random. If ``bound`` is 0, the run does not wait for balancing to recover and only checks for
    forbidden states.
    """

    def __init__(
        self, seed: int, kinds: Any = (), ranks: int = 0, bound: float = BOUND_SECONDS, many: int = -1
    ) -> None:
        self.seed = seed
        self.bound = bound
        self.many = many
        self.scheduler = Scheduler(seed)
        random = self.random = self.scheduler.random
        self.network = Network(self.scheduler)
        self.breaches = self.network.breaches
        ranks = ranks or random.choice((3, 3, 4, 4, 8))
        self.shapes = SimpleNamespace(
            ranks=ranks, layers=random.choice((1, 2, 3)), experts=2 * ranks, slots=3
        )
        self.shapes.pass_seconds = random.choice((0.1, 0.3, 1.0))
        self.shapes.ahead = random.choice((1, 1, 2, 4))
        self.settings = {
            "vote_interval": random.choice((1, 2, 4, 4, 8)),
            "vote_timeout_seconds": random.choice((3.0, 10.0)),
            "commit_timeout_seconds": random.choice((0.5, 1.0)),
            "peer_timeout_seconds": random.choice((30.0, 600.0)),
            "transfer_timeout_seconds": random.choice((5.0, 20.0)),
            "bytes_per_step": random.choice((None, None, 16 if self.shapes.pass_seconds < 1.0 else 64)),
            "verify_transfers": random.random() < 0.5,
        }
        self.service_settings = ServiceSettings(policy=random.choice(("deepseek", "flashlb")), **_SERVICE)
        self._states: list[Any] = []
        self._since = 0.0
        self.healed = False
        self.lives = self.passes = self.plans_done = 0
        self.disk = Disk()
        self.service: Service | None = None
        self.excused = False
        self.kinds = kinds or tuple(kind for kind in FAULTS if kind not in (*BEYOND, CALL_OFF, LONE_OUTCOME))
        self.faults = self._drawn()
        # Use a separate generator, so that the other faults of existing seeds do not change.
        self.calls = python_random.Random(seed)
        if not kinds:
            ends = [self.calls.random() for _ in range(self.calls.choice((0, 4, 8)))]
            self.faults += [(_FAULTY_PASSES * end * self.shapes.pass_seconds, CALL_OFF) for end in ends]
            if self.calls.random() < 0.25:
                begin = _FAULTY_PASSES * self.calls.random() * self.shapes.pass_seconds
                self.faults.append((begin, LONE_OUTCOME))

    def run(self) -> Outcome:
        logging.disable(logging.CRITICAL)
        # Links close when their last reference is dropped, so the run itself must determine when garbage is collected.
        gc.disable()
        try:
            with simulated(self.scheduler, self.disk, self.breach):
                return self._run()
        finally:
            gc.enable()
            logging.disable(logging.NOTSET)

    def _run(self) -> Outcome:
        python_random.seed(self.seed)
        self._note(f"{self.shapes} {self.settings}")
        shape = self.shapes.layers, self.shapes.experts, self.shapes.ranks, self.shapes.slots
        self.shapes.placement = Placement.linear(*shape)
        self.start_service()
        self.start_engine()
        self.scheduler.at(_LOOK_SECONDS, self._look)
        self.scheduler.at(_DRIFT_SECONDS, self._drift)
        for moment, kind in self.faults:
            self.scheduler.at(moment, lambda kind=kind: self._happen(kind))
        self._until((_QUIET_PASSES + _FAULTY_PASSES) * self.shapes.pass_seconds, lambda: False)
        self._heal()
        healed_after = self._balance_comes_back()
        self.engine.end()
        if self.service is not None:
            self.service.process.kill()
        gc.collect()
        ran = self.scheduler.fingerprint(), self.scheduler.now, self.passes, self.plans_done
        log = tuple(self.scheduler.log)
        return Outcome(self.seed, tuple(self.breaches), *ran, healed_after, len(self.faults), log)

    # Starting and stopping the service and the engine

    def start_service(self) -> None:
        try:
            self.service = Service(self.scheduler, self.service_settings)
        except StoreError as error:
            self._note(f"the service cannot start: {error}")
            self.later(1.0, lambda: self.service or self.start_service())
        else:
            self._note(f"a service with leader term {self.service.leader_term} has started")

    def stop_service(self) -> None:
        if self.service is not None:
            self.plans_done += self.service.done
            self.service.process.kill()
            self.service = None

    def start_engine(self) -> None:
        self.lives += 1
        self.excused = False
        self.engine = Engine(self, self.lives)

    def breach(self, what: str) -> None:
        self._note(what)
        self.breaches.append(what)

    # Events

    def _until(self, moment: float, over: Callable[[], bool]) -> None:
        while self.scheduler.now < moment and not over() and not self.breaches:
            self.scheduler.run(min(moment, self.scheduler.now + _LOOK_SECONDS))

    def _balance_comes_back(self) -> float:
        healed = self.scheduler.now
        before = self._plans()
        self._until(healed + self.bound, lambda: self._plans() > before)
        if self._plans() == before and self.bound and not self.breaches:
            reasons = {rank: agent.halted or agent.votes_lost for rank, agent in self.engine.agents.items()}
            self.breach(f"no plan was carried out within {self.bound:g} s after the last fault: {reasons}")
        if self.service is not None:
            self.plans_done += self.service.done
            self._until(self.scheduler.now + _LOOK_SECONDS, lambda: False)
            self._check_service(self.service)
        self.passes += self.engine.model.passes
        return self.scheduler.now - healed

    def _check_service(self, service: Service) -> None:
        """Check that an idle service knows the ranks' layout and that its store has the outcomes of all plans."""
        if not self.bound or self.breaches or len(self.engine.agents) < self.shapes.ranks:
            return
        deployment = service.deployments[DEPLOYMENT]
        served = {(agent.installed.epoch, agent.installed.digest) for agent in self.engine.agents.values()}
        if deployment.plan is None and {deployment.live and deployment.live.version} != served:
            self.breach("the service does not know the ranks' layout")
        plans = service.writer.store.plans(DEPLOYMENT)
        if service.writer.failing or sum(not plan.outcome for plan in plans) > (deployment.plan is not None):
            self.breach(f"the store lacks the outcomes of plans: {service.writer.failing}")

    def _plans(self) -> int:
        return self.plans_done + (self.service.done if self.service else 0)

    def _look(self) -> None:
        """Restart the engine if it has exited, and report a breach if a rank stopped without a valid cause."""
        engine = self.engine
        # An error between a vote's outcome and the install of its layer must end the engine. Other ranks may learn of
        # the error but not its reason.
        due = ("simulated", "could not meet", "another rank could not install")
        for rank, reason in engine.fatal.items():
            if not (self.excused or any(cause in reason for cause in due)):
                self.breach(f"rank {rank} stopped serving without a valid cause: {reason}")
        if engine.over:
            self._note("the engine is restarted")
            self.passes += engine.model.passes
            engine.end()
            self.later(_RESTART_SECONDS, self.start_engine)
            self.later(_RESTART_SECONDS + _LOOK_SECONDS, self._look)
            return
        gc.collect(1)
        self.later(_LOOK_SECONDS, self._look)

    def _heal(self) -> None:
        self._note("all faults are over")
        self.healed = True
        self.network.heal()
        self.disk.fill(full=False)
        if self.service is None:
            self.start_service()
        assert self.service is not None
        self.service.withheld = 0.0

    def _drawn(self) -> list[tuple[float, str]]:
        number = self.random.choice((0, 4, 8, 16)) if self.many < 0 else self.many
        draw = self.random.random
        unit = self.shapes.pass_seconds
        moments = sorted((_QUIET_PASSES + _FAULTY_PASSES * draw()) * unit for _ in range(number))
        return [(moment, self.random.choice(self.kinds)) for moment in moments]

    def stride(self) -> int:
        """Return the number of passes to run between two calls.

        A second's worth of passes is run between two calls if all faults are over and the agents' states have not
        changed for a while.
        """
        states = [agent._switch.state for agent in self.engine.agents.values()]
        alike = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        if not alike or not self.healed:
            self._states = states
            self._since = self.scheduler.now
        waits = self.scheduler.now - self._since > _STILL_SECONDS and not self._gathers_heat()
        return max(1, int(1.0 / self.shapes.pass_seconds)) if waits else 1

    def _gathers_heat(self) -> bool:
        """Return True if the next plan waits for heat from more steps."""
        deployment = self.service and self.service.deployments.get(DEPLOYMENT)
        can_vote = all(agent.votes_lost is None for agent in self.engine.agents.values())
        return can_vote and (deployment is None or deployment.plan is None)

    def drawn_heat(self) -> npt.NDArray[np.int32]:
        """Draw one rank's tokens for a pass, int32 ``[L, E]``. A few experts are hot."""
        draw = self.random.paretovariate
        shape = (self.shapes.layers, self.shapes.experts)
        return np.array([int(10 * draw(1.0)) for _ in range(shape[0] * shape[1])], np.int32).reshape(shape)

    def _drift(self) -> None:
        self.engine.drift(self.drawn_heat())
        self.later(_DRIFT_SECONDS, self._drift)

    def _happen(self, kind: str) -> None:
        self._note(f"FAULT {kind}: {FAULTS[kind](self)}")

    def _note(self, what: str) -> None:
        self.scheduler.note("world", what)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        self.scheduler.at(self.scheduler.now + seconds, call)

    def rank(self) -> int:
        return self.random.randrange(self.shapes.ranks)
