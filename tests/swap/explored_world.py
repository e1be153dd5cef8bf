"""A world small enough to walk through all that can happen to it: three ranks, two plans, every fault.

The machines are the real ones. Placements are shrunk to a tag per layer, so that a state is a few dozen integers. What
an agent does around its machine (votes, register, transfers, staging, commit) is modelled here as ``swap/driver.py``
does it, with every promise of ARCHITECTURE.md checked after each event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from worker_agent.swap.ballot import Ballot, Decision, Outcome, Progress
from worker_agent.swap.machine import Accepted, Action, Commit, DropStaging, StartTransfer, SwitchMachine

RANKS = 3
LAYERS = 2
OFFER_DEADLINE = 8
Event: TypeAlias = tuple[Any, ...]


class Broken(AssertionError):
    """A promise was broken."""


class TagLayer(NamedTuple):
    """One layer of a plan: which one, and the tag of the weights and tables that it is to hold."""

    layer: int
    phy2log_RS: int
    log2phy_E: int
    moves_M5: tuple[()] = ()


class TagPlan(NamedTuple):
    """A plan whose placements are tags."""

    plan_id: int
    leader_term: int
    base_epoch: int
    base_digest: int
    layers: tuple[TagLayer, ...]

    @property
    def digest(self) -> int:
        return self.plan_id


@dataclass(frozen=True)
class TagInstalled:
    """What a rank serves: a tag per layer."""

    epoch: int
    tags: tuple[int, ...]

    @cached_property
    def digest(self) -> int:
        return 1000 + self.tags[0] * 10 + self.tags[1]

    @cached_property
    def version_digest(self) -> int:
        return self.digest + 100_000 * self.epoch

    @property
    def layer_epochs(self) -> tuple[int, ...]:
        return (self.epoch,)

    def with_layer(self, layer: int, tag: int, _: int) -> TagInstalled:
        tags = (*self.tags[:layer], tag, *self.tags[layer + 1 :])
        return TagInstalled(self.epoch + 1, tags)


FIRST = TagInstalled(0, (0, 0))


def plan_from(base: TagInstalled, plan_id: int, term: int, *layers: int) -> TagPlan:
    """A plan that gives each of ``layers`` a tag of its own."""
    tagged = tuple(TagLayer(layer, plan_id, plan_id) for layer in layers)
    return TagPlan(plan_id, term, base.epoch, base.digest, tagged)


class Running(NamedTuple):
    """A transfer that a rank's thread is at."""

    generation: int
    lane: int
    layer: int
    tag: int


class Vote(NamedTuple):
    """A vote under way: the ballots that left (``None``: that rank votes no more), who has to count, the register."""

    ballots: tuple[Ballot | None, ...]
    truths: tuple[int, ...]
    pending: frozenset[int]
    register: str | None


class Faults(NamedTuple):
    """How many more of each kind may happen."""

    transfers: int
    halts: int
    losses: int


@dataclass(frozen=True)
class Scenario:
    """Two plans, what the ranks start from, and which machine they run."""

    name: str
    plans: tuple[TagPlan, ...]
    faults: Faults
    starts: tuple[TagInstalled, ...] = (FIRST,) * RANKS
    machine: type[SwitchMachine] = SwitchMachine
    asks_register: bool = True


class World:
    """One state; ``events`` lists what can happen next, ``after`` gives the state that follows."""

    __slots__ = (
        "dirty_lanes",
        "faults",
        "lost",
        "machines",
        "scenario",
        "staged",
        "terms",
        "transfers",
        "vote",
        "weights",
    )

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.machines = [scenario.machine(start, OFFER_DEADLINE) for start in scenario.starts]  # type: ignore[arg-type]
        self.transfers: list[Running | None] = [None] * RANKS
        self.staged: list[Running | None] = [None] * RANKS
        self.weights = [start.tags for start in scenario.starts]
        self.terms = [0] * RANKS
        self.lost: frozenset[int] = frozenset()
        self.dirty_lanes: frozenset[tuple[int, int]] = frozenset()
        self.vote: Vote | None = None
        self.faults = scenario.faults

    # What can happen

    def events(self) -> Iterator[Event]:
        """Every event that this state admits."""
        for rank, machine in enumerate(self.machines):
            for number, plan in enumerate(self.scenario.plans):
                yield ("deliver", rank, number, machine.installed.digest)
                if plan.base_digest == machine.installed.digest != FIRST.digest:
                    yield ("deliver", rank, number, FIRST.digest)
            if machine.progress == Progress.OFFERED and machine._abort_wish is None:
                yield ("deadline", rank)
            if self.transfers[rank] is not None:
                possible = self._can_complete(rank)
                if possible:
                    yield ("staged", rank)
                if self.faults.transfers or not possible:
                    yield ("failed", rank)
            if self.faults.halts and machine.halted is None:
                yield ("halt", rank)
            if self.vote is not None and rank in self.vote.pending:
                if None not in self.vote.ballots:
                    yield ("heard", rank)
                if self.faults.losses or None in self.vote.ballots:
                    yield ("unheard", rank)
        if self.vote is None and len(self.lost) < RANKS:
            yield ("launch",)

    def after(self, event: Event) -> World:
        """The state that follows; raises ``Broken`` where a promise is."""
        world = self._copy()
        kind, *arguments = event
        try:
            getattr(world, f"_{kind}")(*arguments)
        except Broken:
            raise
        except (AssertionError, AttributeError, TypeError, IndexError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        world._check()
        return world

    @property
    def settled(self) -> bool:
        """Nothing is under way, and nothing waits for anything."""
        idle = all(m.progress == Progress.IDLE for m in self.machines) or len(self.lost) == RANKS
        return idle and self.vote is None and not any(self.transfers)

    @staticmethod
    def needs_no_fault(event: Event) -> bool:
        """Whether this happens sooner or later if nothing goes wrong any more."""
        return event[0] in ("deadline", "staged", "failed", "heard", "unheard", "launch")

    # Events

    def _deliver(self, rank: int, number: int, checked_for: int) -> None:
        plan, machine = self.scenario.plans[number], self.machines[rank]
        for action in machine.offer(plan, 0, checked_for):  # type: ignore[arg-type]
            if isinstance(action, Accepted):
                self._must(
                    checked_for == machine.installed.digest, "accepted moves that were never checked for this"
                )
                self._must(
                    (plan.base_epoch, plan.base_digest)
                    == (machine.installed.epoch, machine.installed.digest),
                    "accepted a plan for another placement",
                )
                self._must(plan.leader_term >= self.terms[rank], "accepted a plan of an older term")
                self._must(machine.halted is None, "accepted a plan though halted")
                self.terms[rank] = plan.leader_term

    def _deadline(self, rank: int) -> None:
        self._act(rank, self.machines[rank].tick(OFFER_DEADLINE + 1))

    def _staged(self, rank: int) -> None:
        running = self.transfers[rank]
        self.transfers[rank] = None
        machine = self.machines[rank]
        self._act(rank, machine.transfer_ended(running.generation))
        # As the driver does: a result that is not the present transfer's is thrown away.
        if running.generation == machine.generation and machine.progress == Progress.READY:
            self.staged[rank] = running

    def _failed(self, rank: int) -> None:
        running = self.transfers[rank]
        if self._can_complete(rank):
            self.faults = self.faults._replace(transfers=self.faults.transfers - 1)
        self.transfers[rank] = None
        self.dirty_lanes |= {(running.lane, running.generation)}
        self._act(rank, self.machines[rank].transfer_ended(running.generation, "failed"))

    def _halt(self, rank: int) -> None:
        self.faults = self.faults._replace(halts=self.faults.halts - 1)
        self._act(rank, self.machines[rank].halt("broken"))

    def _launch(self) -> None:
        ballots = tuple(None if r in self.lost else m.ballot() for r, m in enumerate(self.machines))
        truths = tuple(machine.installed.version_digest for machine in self.machines)
        self.vote = Vote(ballots, truths, frozenset(range(RANKS)) - self.lost, None)

    def _heard(self, rank: int) -> None:
        vote = self.vote
        reduced = [min(column) for column in zip(*(b.encode() for b in vote.ballots), strict=True)]
        outcome = Outcome.decode(reduced)
        if outcome.decision is Decision.COMMIT and self._ask_register("commit") != "commit":
            outcome = outcome.with_abort()
        self._act(rank, self.machines[rank].decide(outcome))
        if len(set(vote.truths)) > 1:
            self._must(
                self.machines[rank].halted is not None, "went on beside ranks that serve another placement"
            )
        self._counted(rank)

    def _unheard(self, rank: int) -> None:
        if None not in self.vote.ballots:
            self.faults = self.faults._replace(losses=self.faults.losses - 1)
        cast = self.vote.ballots[rank]
        if cast.progress == Progress.READY and not cast.abort:
            outcome = Outcome(Progress.READY, cast.plan, cast.plan, installed_agree=True, abort=False)
            if not self.scenario.asks_register or self._ask_register("abort") != "commit":
                outcome = outcome.with_abort()
            self._act(rank, self.machines[rank].decide(outcome))
        self._act(rank, self.machines[rank].halt("votes lost"))
        self.lost |= {rank}
        self._counted(rank)

    def _ask_register(self, wish: str) -> str:
        stands = self.vote.register or wish
        self.vote = self.vote._replace(register=stands)
        return stands

    def _counted(self, rank: int) -> None:
        self.vote = self.vote._replace(pending=self.vote.pending - {rank})
        if not self.vote.pending:
            self.vote = None

    # What machines ask for

    def _act(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartTransfer):
                self._start(rank, action)
            elif isinstance(action, Commit):
                self._commit(rank, action)
            elif isinstance(action, DropStaging):
                self.staged[rank] = None

    def _start(self, rank: int, action: StartTransfer) -> None:
        layer = action.layer
        started = Running(action.generation, action.lane, layer.layer, layer.phy2log_RS)  # type: ignore[arg-type]
        self._must(self.transfers[rank] is None, "began a transfer while another ran")
        self._must(self.staged[rank] is None, "staging was re-used before its commit")
        for lane, generation in self.dirty_lanes:
            late = lane == action.lane and generation < action.generation
            self._must(not late, "began a transfer on a lane that still carries late bytes")
        for other in (*self.transfers, *self.staged):
            alike = other is None or other.generation != action.generation or other == started
            self._must(alike, "ranks began different transfers under one number")
        self.transfers[rank] = started

    def _commit(self, rank: int, action: Commit) -> None:
        layer, staged, vote = action.layer, self.staged[rank], self.vote
        self._must(vote is not None, "committed without a vote")
        for ballot in vote.ballots:
            ready = ballot is not None and ballot.progress == Progress.READY and not ballot.abort
            self._must(ready, "committed though not all had voted READY")
        self._must(staged is not None, "committed what was never staged")
        self._must(
            (staged.generation, staged.layer, staged.tag)
            == (action.generation, layer.layer, layer.phy2log_RS),
            "committed the staging of another transfer",
        )
        self._must(len(set(vote.truths)) == 1, "committed beside ranks that serve another placement")
        for running in self.transfers:
            reads = running is not None and running.layer == layer.layer
            self._must(not reads, "overwrote sources that a rank was still sending")
        plan = next(plan for plan in self.scenario.plans if plan.plan_id == action.plan_id)
        index = [update.layer for update in plan.layers].index(layer.layer)
        self._must(action.before.epoch == plan.base_epoch + index, "committed a layer out of turn")
        tags = self.weights[rank]
        self.weights[rank] = (*tags[: layer.layer], staged.tag, *tags[layer.layer + 1 :])
        self.staged[rank] = None

    # What must hold

    def _check(self) -> None:
        for rank, machine in enumerate(self.machines):
            self._must(
                self.weights[rank] == machine.installed.tags, "slots hold other weights than the map names"
            )
            held = machine._plan is not None
            self._must(held == (machine.progress != Progress.IDLE), "its progress is that of no plan")
            self._must(held or machine._abort_wish is None, "wishes to abort a plan that it no longer holds")
            if machine.progress == Progress.READY:
                self._must(self.staged[rank] is not None, "READY with nothing staged")
            vote = self.vote
            cast = vote.ballots[rank] if vote is not None and rank in vote.pending else None
            if cast is not None and cast.progress == Progress.READY and not cast.abort:
                kept = machine.progress == Progress.READY and machine._plan.digest == cast.plan
                self._must(kept, "took back a READY before the vote was counted")
        if self.vote is None and len(set(self.scenario.starts)) == 1:
            served = {(machine.installed.epoch, machine.installed.tags) for machine in self.machines}
            self._must(len(served) == 1, f"ranks serve different placements: {sorted(served)}")

    @staticmethod
    def _must(holds: bool, otherwise: str) -> None:
        if not holds:
            raise Broken(otherwise)

    def _can_complete(self, rank: int) -> bool:
        """Whether all peers have begun the transfer too: otherwise only the deadline ends it."""
        generation = self.transfers[rank].generation
        return all(machine.generation >= generation for machine in self.machines)

    # States as values

    def _copy(self) -> World:
        world = World.__new__(World)
        world.scenario = self.scenario
        world.machines = [_copy_machine(machine) for machine in self.machines]
        world.transfers, world.staged = self.transfers.copy(), self.staged.copy()
        world.weights, world.terms = self.weights.copy(), self.terms.copy()
        world.lost, world.dirty_lanes = self.lost, self.dirty_lanes
        world.vote, world.faults = self.vote, self.faults
        return world

    def key(self) -> tuple[Any, ...]:
        """Equal for states from which the same can happen: ranks in any order, generations and lanes by distance."""
        runs = [run for run in (*self.transfers, *self.staged) if run is not None]
        generation = min([m.generation for m in self.machines] + [run.generation for run in runs])
        lane = min([m.lane for m in self.machines] + [run.lane for run in runs])
        ranks = sorted((self._rank_key(rank, generation, lane) for rank in range(RANKS)), key=hash)
        return (
            *ranks,
            frozenset((dirty - lane, at - generation) for dirty, at in self.dirty_lanes if dirty >= lane),
            None if self.vote is None else self.vote.register,
            self.faults,
        )

    def _rank_key(self, rank: int, generation: int, lane: int) -> tuple[Any, ...]:
        m, vote = self.machines[rank], self.vote
        return (
            m.installed.version_digest,
            int(m.progress),
            m.generation - generation,
            m.lane - lane,
            m.halted is not None,
            0 if m._plan is None else m._plan.plan_id,
            m._index,
            m._abort_wish is not None,
            m._highest_term,
            m._transfer_runs,
            _relative(self.transfers[rank], generation, lane),
            _relative(self.staged[rank], generation, lane),
            self.terms[rank],
            rank in self.lost,
            None if vote is None else (vote.ballots[rank], vote.truths[rank], rank in vote.pending),
        )


def _copy_machine(machine: SwitchMachine) -> SwitchMachine:
    copied = object.__new__(type(machine))
    copied.__dict__.update(machine.__dict__)
    return copied


def _relative(run: Running | None, generation: int, lane: int) -> tuple[int, ...] | None:
    return None if run is None else (run.generation - generation, run.lane - lane, run.layer, run.tag)
