"""One state of an explored service as a value: real deployments, a crew of ranks, and the streams between them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eplb_core.heat.assembler import PlacementHistory
from eplb_core.placement import layer_digest
from eplb_core.wire.agent import Hello
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.core.flow import Limits
from eplb_service.control.core.group import Group
from tests.control.core.explored_crew import RANKS_BY_FORMING, Crew, Given, Version, hello_at, stranger_at
from tests.exploring import Event, must

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
    calls: int = 0
    """A service calls off the plan under way."""
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

    # What can happen to the streams: they begin, end, and are noticed to have ended

    def stream_events(self) -> Iterator[Event]:
        """Those that this state admits."""
        for rank, one in enumerate(self.crew.ranks):
            if one.service is None:
                for service, term in enumerate(self.terms):
                    if term >= one.term:
                        yield ("connect", rank, service)
                    elif self.faults.strays:
                        yield ("stray", rank, service)
            elif self.faults.cuts or self.has_to_end(rank):
                yield ("cut", rank)
            if self.faults.deaf and rank in self.ending:
                yield ("deaf", rank)
        for service, rank, forming in self.dead_streams:
            yield ("notice", service, rank, forming)
        for service, deployment in enumerate(self.services):
            if self.faults.restarts:
                yield ("restart", service)
            if self.faults.squats:
                yield ("squat", service)
            if self.faults.orders and deployment.outdated is not None:
                yield ("lead", service)
            if service in self.squatted and not deployment.attendance.forming_overdue:
                yield ("wait", service)
        if self.faults.reforms and self.crew.version.forming + 1 < len(RANKS_BY_FORMING):
            yield ("reform",)

    def has_to_end(self, rank: int) -> bool:
        """Whether the rank's stream ends without a fault: it was asked to come again, or its service is outdated."""
        service = self.crew.ranks[rank].service
        return rank in self.ending or (service is not None and self.terms[service] < max(self.terms))

    def _connect(self, rank: int, service: int) -> None:
        known = self.crew.ranks[rank].term
        if not self._introduce(replace(hello_at(self.crew.version, rank), highest_term=known), service):
            return
        term = max(self.crew.ranks[rank].term, self.terms[service])
        plan = self.services[service].plan
        call = self.open_plans[service] if plan is not None and plan.called_off else None
        self.crew = self.crew.with_rank(
            rank, service=service, term=term, shown=self.crew.version, said=None, call=call
        )

    def _introduce(self, hello: Hello, service: int) -> bool:
        """Whether the service takes it in; another forming's streams end as those of this one begin."""
        deployment = self.services[service]
        group, heard = deployment.group, self._stream_of(service, hello)
        if heard and deployment.renews(hello):
            self._drop_stream(service, hello.rank)
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello)
        except RefusedError:
            return False
        finally:
            if deployment.heat is not None:
                # Heat is always there: what is explored is not how it is counted.
                deployment.heat.assembled = 1
        if group is not None and deployment.group is not None and deployment.group.forming != group.forming:
            self._drop_streams(service)
        return True

    def _stream_of(self, service: int, hello: Hello) -> bool:
        """Whether the service takes the rank to have a stream."""
        return hello.rank in {member.rank for member in self.services[service].connected}

    def _drop_stream(self, service: int, rank: int) -> None:
        """The service ends what it takes for the rank's stream, and forgets it."""
        self.dead_streams = frozenset(one for one in self.dead_streams if one[:2] != (service, rank))
        if rank < len(self.crew.ranks) and self.crew.ranks[rank].service == service:
            self.ending -= {rank}
            self.crew = self.crew.with_rank(rank, service=None, coming=None, call=None, shown=None, said=None)

    def _drop_streams(self, service: int) -> None:
        """The same, with all of them."""
        self.squatted -= {service}
        for rank in range(max(RANKS_BY_FORMING)):
            self._drop_stream(service, rank)

    def _squat(self, service: int) -> None:
        """A stranger says Hello as rank 0; it must not push out ranks that are there, or have only just come."""
        self.faults = self.faults._replace(squats=self.faults.squats - 1)
        deployment = self.services[service]
        stranger, overdue = stranger_at(0), deployment.attendance.forming_overdue
        here = [rank for rank, one in enumerate(self.crew.ranks) if one.service == service]
        if self._introduce(stranger, service):
            must(not here or overdue, "a stranger took the place of ranks that are there")
            self.squatted |= {service}
        else:
            still = [rank for rank, one in enumerate(self.crew.ranks) if one.service == service]
            must(here == still, "a stranger ended a rank's stream")

    def _wait(self, service: int) -> None:
        """So much time passes that who waits for others of its forming waits in vain."""
        for seconds in (0.0, 1000.0):
            self.services[service].tick(seconds)

    def _lead(self, service: int) -> None:
        """An operator has a service lead that is outdated; its streams end, so that the ranks hear of its term."""
        self.faults = self.faults._replace(orders=self.faults.orders - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service].lead_with(self.terms[service])
        self.ending |= {rank for rank, one in enumerate(self.crew.ranks) if one.service == service}

    def _stray(self, rank: int, service: int) -> None:
        self.faults = self.faults._replace(strays=self.faults.strays - 1)
        self._connect(rank, service)

    def _cut(self, rank: int) -> None:
        if not self.has_to_end(rank):
            self.faults = self.faults._replace(cuts=self.faults.cuts - 1)
        self.end_stream(rank)

    def _deaf(self, rank: int) -> None:
        self.faults = self.faults._replace(deaf=self.faults.deaf - 1)
        self.ending -= {rank}

    def end_stream(self, rank: int) -> None:
        """It is over on the rank's side; the service has yet to notice."""
        service = self.crew.ranks[rank].service
        assert service is not None
        self.dead_streams |= {(service, rank, self.crew.version.forming)}
        self.ending -= {rank}
        self.crew = self.crew.with_rank(rank, service=None, coming=None, call=None, shown=None, said=None)

    def _notice(self, service: int, rank: int, forming: int) -> None:
        self.dead_streams -= {(service, rank, forming)}
        self.services[service].leave(rank)

    def _restart(self, service: int) -> None:
        self.faults = self.faults._replace(restarts=self.faults.restarts - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service] = self.started(self.terms[service])
        self.squatted -= {service}
        self.open_plans[service] = None
        for rank, one in enumerate(self.crew.ranks):
            if one.service == service:
                self.end_stream(rank)
        # The service that would have noticed is gone.
        self.dead_streams = frozenset(stream for stream in self.dead_streams if stream[0] != service)

    def _reform(self) -> None:
        self.faults = self.faults._replace(reforms=self.faults.reforms - 1)
        for rank, one in enumerate(self.crew.ranks):
            if one.service is not None:
                self.end_stream(rank)
        self.gone = (*self.gone, self.crew.version)
        self.crew = Crew.formed(self.crew.version.forming + 1)


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
            else (plan.progress[rank], rank in plan.objections and plan.objections[rank].state)
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
        tuple(None if plan is None else (plan.plan_id, plan.committed, plan.outcome) for plan in plans),
        None
        if heat is None
        else tuple(
            tuple((epoch, layer_digest(layer, placed[0])) for epoch, placed in sorted(placements.items()))
            for layer, placements in enumerate(heat.placements.by_layer)
        ),
    )


def _copy_deployment(deployment: Deployment) -> Deployment:
    """Another, whose ranks may do otherwise; group and plans are values, and counts of heat are never added here."""
    heat = copy.copy(deployment.heat)
    if heat is not None:
        heat.placements = PlacementHistory(tuple(map(dict, heat.placements.by_layer)))
    planned_par = dict(deployment.planned_par)
    attendance = replace(deployment.attendance, rejections={})
    return replace(
        deployment, heat=heat, planned_par=planned_par, attendance=attendance, plan_problems=[], events=[]
    )
