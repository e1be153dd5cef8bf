"""The explored world's state, as a value to copy and compare: three ranks' state machines and their environment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

from tests.swap.tags import FIRST, TagInstalled, TagPlan
from worker_agent.swap.commit_register import Settlement
from worker_agent.swap.machine import Ballot, SwitchState

RANKS = 3
OFFER_DEADLINE = 8


class Running(NamedTuple):
    """Transfer that a rank's transfer thread is running."""

    generation: int
    lane: int
    layers: tuple[int, ...]
    tags: tuple[int, ...]


class Vote(NamedTuple):
    """Vote in progress.

    Attributes
    ----------
    ballots
        Ballot of each rank; ``None`` if the rank no longer votes.
    truths
        Version digest of the layout that each rank serves.
    pending
        Ranks that have yet to process the outcome.
    settlements
        Settlement of each rank.
    settling
        Ranks that are asking their peers for the verdict.
    confirmed
        True if all ranks were at the same step boundary when they were about to commit; ``None`` before that.
    installed
        Ranks that have installed the part that this vote commits.
    """

    ballots: tuple[Ballot | None, ...]
    truths: tuple[int, ...]
    pending: frozenset[int]
    settlements: tuple[Settlement, ...]
    settling: frozenset[int] = frozenset()
    confirmed: bool | None = None
    installed: frozenset[int] = frozenset()


class Faults(NamedTuple):
    """Number of faults of each kind that may still happen."""

    transfers: int = 0
    errors: int = 0
    losses: int = 0
    skips: int = 0
    impatience: int = 0
    installs: int = 0
    refusals: int = 0
    drifts: int = 0
    calls: int = 0
    presumptions: int = 0

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for kind, count in self._asdict().items() if count]
        return ", ".join(counts) or "no fault"


@dataclass(frozen=True)
class Scenario:
    """Explored scenario: one or two plans, initial layouts, a state machine, and variants of the surrounding protocol.

    Each layer of a plan moves one expert to one rank. A rank's staging buffer holds ``rows`` experts.
    """

    name: str
    plans: tuple[TagPlan, ...]
    faults: Faults
    starts: tuple[TagInstalled, ...] = (FIRST,) * RANKS
    rows: int = 0
    machine: type[SwitchState] = SwitchState
    settlement: type[Settlement] = Settlement
    confirms: str = "its device's count"
    confirms_settled: bool = True
    reports_failures: bool = True
    refusal_is_death: bool = False
    waits_for_installs: bool = True
    settles_errors: bool = True

    @property
    def title(self) -> str:
        """Scenario name and faults, for reports."""
        return f"{self.name}; {self.faults}"


class State:
    """State of all ranks. ``World`` adds the events."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.machines = [scenario.machine(start, OFFER_DEADLINE, scenario.rows) for start in scenario.starts]
        self.transfers: list[Running | None] = [None] * RANKS
        self.staged: list[Running | None] = [None] * RANKS
        self.weights = [start.tags for start in scenario.starts]
        self.terms = [0] * RANKS
        self.lost: frozenset[int] = frozenset()
        self.fatal: frozenset[int] = frozenset()
        self.broken: frozenset[int] = frozenset()
        self.dirty_lanes: frozenset[tuple[int, int]] = frozenset()
        self.vote: Vote | None = None
        self.faults = scenario.faults
        self.forwards = self.ahead = self.collectives = (0,) * RANKS

    def copy(self) -> Any:
        """Return an independent copy."""
        duplicate = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(duplicate, name, value.copy() if isinstance(value, list) else value)
        return duplicate

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for equivalent states.

        States are equivalent if they differ only by a permutation of the ranks or by an offset of all generations and
        lanes.
        """
        runs = [run for run in (*self.transfers, *self.staged) if run is not None]
        generation = min([m.generation for m in self.machines] + [run.generation for run in runs])
        lane = min([m.lane for m in self.machines] + [run.lane for run in runs])
        ranks = [self._rank_key(rank, generation, lane) for rank in range(RANKS)]
        return (
            *self._in_canonical_order(ranks),
            frozenset(
                (dirty - lane, dirty_generation - generation)
                for dirty, dirty_generation in self.dirty_lanes
                if dirty >= lane
            ),
            None if self.vote is None else self.vote.confirmed,
            self.faults,
        )

    def _in_canonical_order(self, keys: list[tuple[Any, ...]]) -> list[Any]:
        """Return the ranks' keys in canonical order, each with the peers that the rank knows to be in doubt."""
        hashes = [hash(key) for key in keys]
        in_doubt = [frozenset[int]()] * RANKS
        if self.vote is not None:
            in_doubt = [settlement.in_doubt for settlement in self.vote.settlements]
        if not any(in_doubt):
            return sorted(keys, key=hash)
        orders = permutations(range(RANKS))
        order = min(
            orders,
            key=lambda order: [
                (hashes[rank], sorted(order.index(peer) for peer in in_doubt[rank])) for rank in order
            ],
        )
        return [(keys[rank], *sorted(order.index(peer) for peer in in_doubt[rank])) for rank in order]

    def _rank_key(self, rank: int, generation: int, lane: int) -> tuple[Any, ...]:
        m = self.machines[rank]
        vote = self.vote
        return (
            m.installed.version_digest,
            int(m.progress),
            m.generation - generation,
            m.lane - lane,
            m.halted is not None,
            m.votes_lost is not None,
            0 if m.plan is None else m.plan.plan_id,
            m.index,
            m.abort_wish is not None,
            m.called_off,
            m.highest_term,
            m.transfer_runs,
            _relative(self.transfers[rank], generation, lane),
            _relative(self.staged[rank], generation, lane),
            self.terms[rank],
            rank in self.lost,
            rank in self.fatal,
            rank in self.broken,
            (self.forwards[rank], self.ahead[rank], self.collectives[rank]),
            None if vote is None else (vote.ballots[rank], vote.truths[rank], rank in vote.pending),
            None if vote is None else (vote.settlements[rank].verdict, rank in vote.settling),
            vote is not None and rank in vote.installed,
        )


def _relative(run: Running | None, generation: int, lane: int) -> tuple[Any, ...] | None:
    return None if run is None else (run.generation - generation, run.lane - lane, run.layers, run.tags)
