"""One state of an explored service as a value: real deployments and a crew of ranks, copied and compared."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.limits import Limits
from eplb_service.control.core.membership import Group
from eplb_service.placement import layer_digest
from tests.control.core.explored_crew import Crew
from tests.control.core.explored_truth import Given, Version

PLAN_TIMEOUT = 10.0


class Faults(NamedTuple):
    """How many more of each kind may happen."""

    cuts: int = 0
    """A stream ends; the service notices later."""
    losses: int = 0
    """The same, and the status that was on its way is lost."""
    repeats: int = 0
    """A status is received twice."""
    swaps: int = 0
    """A status is received before the one that was sent first."""
    deaf: int = 0
    """A stream that was asked to end goes on."""
    strays: int = 0
    """A rank goes back to a service that is not the newest it has heard of."""
    restarts: int = 0
    """A service starts again, with nothing but a higher term."""
    reforms: int = 0
    """All ranks die, and as many others as the next forming has come instead."""
    orders: int = 0
    """An operator has a service lead that the ranks take to be outdated."""
    squats: int = 0
    """A stranger says that it is rank 0 of a forming of its own, and stays for as long as it is let."""


@dataclass(frozen=True)
class Scenario:
    """What may go wrong, how many plans there are, and which machine the services run.

    ``joined``: all ranks are connected to the first service at the start; else none is. ``forming`` is the first one of
    the group, of three ranks or of two: two services multiply what each rank can be at.
    """

    name: str
    faults: Faults
    plans: tuple[tuple[int, ...], ...] = ((0,), (0,))
    """The layers of each."""
    services: int = 1
    joined: bool = True
    machine: type[Deployment] = Deployment
    forming: int = 0


class State:
    """What there is; ``World`` says what can happen to it."""

    ending: frozenset[int]
    """Ranks whose streams the service has asked to come again."""
    dead_streams: frozenset[tuple[int, int, int]]
    """Service, rank and forming of streams that are over, though the service has not noticed it yet."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.faults = scenario.faults
        self.plans_left = len(scenario.plans)
        self.terms = list(range(1, scenario.services + 1))
        self.services = [self.started(term) for term in self.terms]
        self.squatted: frozenset[int] = frozenset()
        self.crew = Crew.formed(scenario.forming)
        self.gone: tuple[Version, ...] = ()
        self.ending = frozenset()
        self.dead_streams = frozenset()
        self.open_plans: list[Given | None] = [None] * scenario.services

    def started(self, term: int) -> Deployment:
        """A service that knows nothing yet."""
        return self.scenario.machine("decode", Limits(4, 4, PLAN_TIMEOUT), leader_term=term)

    def copy(self) -> Any:
        """Another, in which other things may happen."""
        other = copy.copy(self)
        other.services = [_copy_deployment(deployment) for deployment in self.services]
        other.terms, other.open_plans = self.terms.copy(), self.open_plans.copy()
        return other

    def truth_of(self, group: Group) -> Version:
        """What the ranks of a group serve, or did until it was gone."""
        versions = (self.crew.version, *self.gone)
        return next(version for version in versions if group.group_id == f"forming {version.forming}")

    def key(self) -> Hashable:
        """Equal for states from which the same can happen, whatever the order of the ranks."""
        most = max(len(self.crew.ranks), *(len(d.group.members) if d.group else 0 for d in self.services))
        ranks = sorted((self._rank_key(rank) for rank in range(most)), key=hash)
        services = tuple(_service_key(deployment) for deployment in self.services)
        rest = (
            self.crew.version,
            tuple(self.terms),
            tuple(self.open_plans),
            self.plans_left,
            self.faults,
            self.squatted,
        )
        return (*ranks, services, rest)

    def _rank_key(self, rank: int) -> tuple[Any, ...]:
        one = self.crew.ranks[rank] if rank < len(self.crew.ranks) else None
        dead = tuple(sorted((at, forming) for at, who, forming in self.dead_streams if who == rank))
        return (one, rank in self.ending, dead, *(_seen_of(rank, deployment) for deployment in self.services))


def _seen_of(rank: int, deployment: Deployment) -> tuple[Any, ...]:
    """What a service believes of one rank."""
    group = deployment.group
    member = group.members.get(rank) if group else None
    hello = group.waiting.get(rank) if group else None
    return (
        None if member is None else (member.connected, member.version, member.highest_term),
        None if hello is None else hello.version,
        *(
            None
            if plan is None or rank >= len(plan.progress)
            else (plan.progress[rank], rank in plan.refusals, rank in plan.aborts)
            for plan in (deployment.plan, deployment.ended_plan)
        ),
    )


def _service_key(deployment: Deployment) -> tuple[Any, ...]:
    group, live, heat = deployment.group, deployment.live, deployment.heat
    plans = (deployment.plan, deployment.ended_plan)
    return (
        None if group is None else group.forming,
        None if live is None else (live.epoch, live.digest),
        deployment.attendance.forming_overdue,
        tuple(None if plan is None else (plan.offer.plan_id, plan.committed, plan.outcome) for plan in plans),
        None
        if heat is None
        else tuple(
            tuple(
                (epoch, layer_digest(layer, placed.phy2log_RS))
                for epoch, placed in sorted(placements.items())
            )
            for layer, placements in enumerate(heat.placements.by_layer)
        ),
    )


def _copy_deployment(deployment: Deployment) -> Deployment:
    """Another, whose ranks may do otherwise; group and plans are values, and counts of heat are never added here."""
    heat = copy.copy(deployment.heat)
    if heat is not None:
        heat.placements = heat.placements.copy()
    planned_par = dict(deployment.planned_par)
    attendance = replace(deployment.attendance, refused={})
    return replace(
        deployment, heat=heat, planned_par=planned_par, attendance=attendance, plan_problems=[], events=[]
    )
