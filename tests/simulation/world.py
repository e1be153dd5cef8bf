"""A whole run: an engine, a service, faults drawn from the seed, and what must hold in spite of them."""

from __future__ import annotations

import gc
import logging
import random as python_random
from collections.abc import Callable
from typing import NamedTuple

from tests.simulation.control import NAME, Giver
from tests.simulation.engine import Engine, Shapes
from tests.simulation.network import Network
from tests.simulation.scheduler import Process, Scheduler

QUIET_SECONDS = 30.0
"""Before the first fault: the ranks vote, and a first plan goes out."""
FAULTS_SECONDS = 120.0
BOUND_SECONDS = 1800.0
"""After the last fault a plan must have been carried out within so long."""
_RESTART_SECONDS = 5.0
_MANY = 24
"""Faults of a run that is made for a few kinds of them."""
_LOOK_SECONDS = 0.5


class Outcome(NamedTuple):
    """Outcome of a run: what went wrong, if anything, and how far it came."""

    seed: int
    breaches: tuple[str, ...]
    fingerprint: tuple[int, int, int]
    seconds: float
    passes: int
    plans: int
    healed_after: float
    faults: int
    log: tuple[tuple[float, str, str], ...]


class World:
    """One run of one seed; ``kinds`` are the faults that may be drawn, all where ``None``.

    With a ``bound`` of 0 nobody waits for balance to come back: only what must never happen counts.
    """

    def __init__(
        self,
        seed: int,
        kinds: tuple[str, ...] | None = None,
        ranks: int | None = None,
        bound: float = BOUND_SECONDS,
    ) -> None:
        self.seed = seed
        self.bound = bound
        self.scheduler = Scheduler(seed)
        random = self.random = self.scheduler.random
        self.network = Network(self.scheduler)
        self.breaches = self.network.breaches
        ranks = ranks or random.choice((3, 3, 4, 4, 8))
        self.shapes = Shapes(
            ranks=ranks,
            layers=random.choice((1, 2, 3)),
            experts=2 * ranks,
            slots=3,
            pass_seconds=random.choice((0.1, 0.3, 1.0)),
            ahead=random.choice((1, 1, 2, 4)),
        )
        self.settings = {
            "vote_interval": random.choice((1, 2, 4, 4, 8)),
            "vote_timeout_seconds": random.choice((3.0, 10.0)),
            "commit_timeout_seconds": random.choice((0.5, 1.0)),
            "peer_timeout_seconds": random.choice((30.0, 600.0)),
            "transfer_timeout_seconds": random.choice((5.0, 20.0)),
            "bytes_per_step": random.choice((None, None, 16)),
            "verify_transfers": random.random() < 0.5,
        }
        self.lives = 0
        self.plans_done = self.plan_id = self.term = 0
        self.service: Giver | None = None
        self.excused = False
        self.kinds = tuple(FAULTS) if kinds is None else kinds
        self.faults = self._drawn()

    def run(self) -> Outcome:
        """Go through the run."""
        logging.disable(logging.CRITICAL)
        try:
            return self._run()
        finally:
            logging.disable(logging.NOTSET)

    def _run(self) -> Outcome:
        python_random.seed(self.seed)
        self._note(f"{self.shapes}")
        self._note(f"{self.settings}")
        self.start_service()
        self.start_engine()
        self.scheduler.at(_LOOK_SECONDS, self._look)
        for moment, kind in self.faults:
            self.scheduler.at(moment, lambda kind=kind: self._happen(kind))  # type: ignore[misc]
        last = QUIET_SECONDS + (FAULTS_SECONDS if self.faults else 0.0)
        self._until(last, lambda: False)
        self._heal()
        healed_after = self._balance_comes_back()
        self.engine.end()
        if self.service is not None:
            self.service.process.kill()
        gc.collect()
        return Outcome(
            self.seed,
            tuple(self.breaches),
            self.scheduler.fingerprint(),
            self.scheduler.now,
            self.passes,
            self.plans_done,
            healed_after,
            len(self.faults),
            tuple(self.scheduler.log),
        )

    # Parts that end and begin

    def start_service(self) -> None:
        """Begin to serve, with a higher term than any service before."""
        self.term += 1
        process = Process(self.scheduler, NAME)
        self.service = Giver(process, self.shapes.ranks, self.term, self.plan_id)
        self._note(f"a service of term {self.term} is there")

    def stop_service(self) -> None:
        """End the service's process."""
        if self.service is not None:
            self.plans_done += self.service.done
            self.plan_id = self.service.plan_id
            self.service.process.kill()
            self.service = None

    def start_engine(self) -> None:
        """Begin the engine's next life."""
        self.lives += 1
        self.passes = getattr(self, "passes", 0)
        self.excused = False
        self.engine = Engine(
            self.scheduler,
            self.network,
            self.shapes,
            self.settings,
            self.lives,
            lambda: self.service,
            self.breach,
        )

    def breach(self, what: str) -> None:
        """Note that something went wrong that must not."""
        self._note(what)
        self.breaches.append(what)

    # What happens

    def _until(self, moment: float, over: Callable[[], bool]) -> None:
        while self.scheduler.now < moment and not over() and not self.breaches:
            self.scheduler.run(min(moment, self.scheduler.now + _LOOK_SECONDS))

    def _balance_comes_back(self) -> float:
        healed = self.scheduler.now
        before = self._plans()
        self._until(healed + self.bound, lambda: self._plans() > before)
        if self._plans() == before and self.bound and not self.breaches:
            reasons = {
                rank: agent.halted or agent.unheard or agent._switch.votes.complaint
                for rank, agent in self.engine.agents.items()
            }
            self.breach(f"no plan was carried out within {self.bound:g} s after the last fault: {reasons}")
        if self.service is not None:
            self.plans_done += self.service.done
        self.passes += self.engine.model.run
        return self.scheduler.now - healed

    def _plans(self) -> int:
        return self.plans_done + (self.service.done if self.service else 0)

    def _look(self) -> None:
        """Restart an engine that has ended, and ask whether it had to."""
        engine = self.engine
        if engine.fatal and not self.excused:
            rank, reason = min(engine.fatal.items())
            self.breach(f"rank {rank} serves no more without need: {reason}")
        if engine.over:
            self._note("the engine is restarted")
            self.passes += engine.model.run
            engine.end()
            self.engine = engine
            self.scheduler.at(self.scheduler.now + _RESTART_SECONDS, self.start_engine)
            self.scheduler.at(self.scheduler.now + _RESTART_SECONDS + _LOOK_SECONDS, self._look)
            return
        gc.collect(1)
        self.scheduler.at(self.scheduler.now + _LOOK_SECONDS, self._look)

    def _heal(self) -> None:
        self._note("all faults are over")
        self.network.heal()
        if self.service is None:
            self.start_service()
        assert self.service is not None
        self.service.withholds = 0.0

    def _drawn(self) -> list[tuple[float, str]]:
        if not self.kinds:
            return []
        number = self.random.choice((0, 1, 2, 4, 8)) if self.kinds == tuple(FAULTS) else _MANY
        moments = sorted(QUIET_SECONDS + FAULTS_SECONDS * self.random.random() for _ in range(number))
        return [(moment, self.random.choice(self.kinds)) for moment in moments]

    def _happen(self, kind: str) -> None:
        noted = FAULTS[kind](self)
        self._note(f"FAULT {kind}: {noted}")

    def _note(self, what: str) -> None:
        self.scheduler.note("world", what)

    def rank(self) -> int:
        """A rank, drawn."""
        return self.random.randrange(self.shapes.ranks)


# Faults, each drawn and noted


def _freeze(world: World) -> str:
    rank, seconds = world.rank(), world.random.choice((0.2, 1.0, 5.0, 15.0))
    world.engine.ranks[rank].freeze(seconds)
    return f"rank {rank} is stopped for {seconds} s"


def _hang(world: World) -> str:
    rank, seconds = world.rank(), world.random.choice((1.0, 8.0))
    thread = world.random.choice(("eplb-transfer", "eplb-peers", "eplb-stream", "eplb-reformation", "model"))
    world.engine.ranks[rank].freeze(seconds, thread)
    return f"{thread} of rank {rank} hangs for {seconds} s"


def _trouble(rate: str) -> Callable[[World], str]:
    def begin(world: World) -> str:
        seconds, part = world.random.choice((2.0, 30.0)), world.random.choice((0.1, 0.5, 1.0))
        setattr(world.network, rate, part)
        end = world.scheduler.now + seconds
        world.scheduler.at(end, lambda: setattr(world.network, rate, 0.0))
        return f"{part:.0%} for {seconds} s"

    return begin


def _flip(world: World) -> str:
    if not world.settings["verify_transfers"]:
        return "none, as nobody would look"
    return _trouble("flipped")(world)


def _exception(world: World) -> str:
    rank = world.rank()
    thread = world.random.choice(("model", "eplb-transfer", "eplb-peers", "eplb-stream", "eplb-reformation"))
    world.engine.ranks[rank].failing[thread] = world.random.randint(1, 20)
    # One that lies between a vote's outcome and an installed layer ends the engine, and has to.
    world.excused = True
    return f"a MemoryError in {thread} of rank {rank}"


def _cut(world: World) -> str:
    one, other = world.random.sample(range(world.shapes.ranks), 2)
    seconds = world.random.choice((0.5, 5.0, 20.0))
    world.network.cut(f"rank {one}", f"rank {other}", seconds)
    return f"between ranks {one} and {other} for {seconds} s"


def _cut_in_commit(world: World) -> str:
    one, other = world.random.sample(range(world.shapes.ranks), 2)
    seconds = world.random.choice((0.5, 5.0))
    world.network.aimed.append(lambda: world.network.cut(f"rank {one}", f"rank {other}", seconds))
    return f"between ranks {one} and {other} for {seconds} s, in the middle of a commit"


def _cut_off(world: World) -> str:
    rank, seconds = world.rank(), world.random.choice((0.5, 5.0, 20.0))
    world.network.cut(f"rank {rank}", NAME, seconds)
    return f"rank {rank} from the service for {seconds} s"


def _kill(world: World) -> str:
    rank = world.rank()
    world.excused = True
    world.engine.ranks[rank].kill()
    return f"rank {rank} is killed"


def _kill_service(world: World) -> str:
    seconds = world.random.choice((0.5, 10.0, 60.0))
    world.stop_service()
    world.scheduler.at(
        world.scheduler.now + seconds, lambda: None if world.service else world.start_service()
    )
    return f"the service is killed, and comes back after {seconds} s"


def _withhold(world: World) -> str:
    if world.service is not None:
        world.service.withholds = 0.3
    return "plans reach some ranks only"


def _miss(world: World) -> str:
    rank = world.rank()
    world.engine.misfits[rank].missed += (many := world.random.choice((1, 1, 3)))
    return f"the host of rank {rank} misses {many} calls"


def _double(world: World) -> str:
    rank = world.rank()
    world.engine.misfits[rank].doubled += (many := world.random.choice((1, 1, 3)))
    return f"the host of rank {rank} makes {many} calls twice"


FAULTS: dict[str, Callable[[World], str]] = {
    "stop": _freeze,
    "hang": _hang,
    "lost datagrams": _trouble("lost"),
    "late datagrams": _trouble("late"),
    "doubled datagrams": _trouble("doubled"),
    "rejected datagrams": _trouble("rejected"),
    "flipped bits": _flip,
    "exception": _exception,
    "cut": _cut,
    "cut in a commit": _cut_in_commit,
    "cut off": _cut_off,
    "kill": _kill,
    "kill service": _kill_service,
    "withhold": _withhold,
    "missed call": _miss,
    "doubled call": _double,
}
"""Faults by name."""
