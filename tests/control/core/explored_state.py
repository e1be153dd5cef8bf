"""One explored state as a value: real deployments, a crew of ranks, and the streams between them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eplb_core.heat.assembler import PlacementHistory
from eplb_core.placement import layer_digest
from eplb_core.wire.agent import Hello
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import RejectedError
from eplb_service.control.core.flow import Limits
from eplb_service.control.core.group import Group
from tests.control.core.explored_crew import (
    RANKS_BY_FORMING,
    Crew,
    OfferedPlan,
    Version,
    hello_at,
    stranger_at,
)
from tests.exploring import Event, must

PLAN_TIMEOUT = 10.0


class Faults(NamedTuple):
    """Number of faults of each kind that can still happen."""

    cuts: int = 0
    """A stream ends, and the service notices later."""
    losses: int = 0
    """A stream ends, and the status in transit is lost."""
    repeats: int = 0
    """A status arrives twice."""
    swaps: int = 0
    """A status arrives before an earlier one from the same rank."""
    hangs: int = 0
    """A stream stays open although the service has asked the rank to reconnect."""
    strays: int = 0
    """A rank reconnects to a service that is older than the newest one that it knows."""
    restarts: int = 0
    """A service restarts without any state, with a higher leader term."""
    reforms: int = 0
    """All ranks die, and the ranks of the next incarnation replace them."""
    orders: int = 0
    """An operator makes a service the leader although the ranks know a newer one."""
    call_offs: int = 0
    """A service calls off its current plan."""
    squats: int = 0
    """A client outside the group registers as rank 0 and stays connected until the service disconnects it."""


@dataclass(frozen=True)
class Scenario:
    """One scenario: the faults that may happen, the plans that are offered, and the deployment class under test."""

    name: str
    faults: Faults
    plans: tuple[tuple[int, ...], ...] = ((0,), (0,))
    """Layers of each plan."""
    services: int = 1
    joined: bool = True
    """True if all ranks are connected to the first service at the start, False if none is."""
    machine: type[Deployment] = Deployment
    forming: int = 0
    """First incarnation of the group: 0 has three ranks, and 1 has two.

    A second service multiplies the number of states, so scenarios with two services use the smaller group.
    """


NO_STREAM: dict[str, Any] = {
    "service": None,
    "plan_in_flight": None,
    "call_off_in_flight": None,
    "reported_version": None,
    "last_status": None,
}
"""Fields of a rank that has no stream."""


class State:
    """State of the services, the ranks and the streams between them. ``World`` adds the events."""

    ending: frozenset[int]
    """Ranks that the service has asked to reconnect."""
    dead_streams: frozenset[tuple[int, int, int]]
    """Service, rank and incarnation for each stream whose end the service has not noticed yet."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.faults = scenario.faults
        self.plans_left = len(scenario.plans)
        self.terms = list(range(1, scenario.services + 1))
        self.services = [self.new_service(term) for term in self.terms]
        self.squatted: frozenset[int] = frozenset()
        self.crew = Crew.formed(scenario.forming)
        self.past_versions: tuple[Version, ...] = ()
        self.ending = frozenset()
        self.dead_streams = frozenset()
        self.open_plans: list[OfferedPlan | None] = [None] * scenario.services

    def new_service(self, term: int) -> Deployment:
        """Return a newly started service with the given leader term."""
        return self.scenario.machine("decode", Limits(4, 4, PLAN_TIMEOUT), leader_term=term)

    def copy(self) -> Any:
        """Return an independent copy, to which different events can be applied."""
        duplicate = copy.copy(self)
        duplicate.services = [_copy_deployment(deployment) for deployment in self.services]
        duplicate.terms = self.terms.copy()
        duplicate.open_plans = self.open_plans.copy()
        return duplicate

    def version_of(self, group: Group) -> Version:
        """Return the version that the group's ranks serve or served last."""
        versions = (self.crew.version, *self.past_versions)
        return next(version for version in versions if group.group_id == f"forming {version.forming}")

    def key(self) -> Hashable:
        """Return a key that is equal for states with the same future, regardless of rank order."""
        rank_count = max(
            len(self.crew.ranks), *(len(d.group.members) if d.group else 0 for d in self.services)
        )
        ranks = sorted((self._rank_key(rank) for rank in range(rank_count)), key=hash)
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
        agent = self.crew.ranks[rank] if rank < len(self.crew.ranks) else None
        dead = tuple(
            sorted(
                (service, forming)
                for service, stream_rank, forming in self.dead_streams
                if stream_rank == rank
            )
        )
        return (
            agent,
            rank in self.ending,
            dead,
            *(_view_of(rank, deployment) for deployment in self.services),
        )

    # Stream events

    def stream_events(self) -> Iterator[Event]:
        """Yield the stream events that are possible in this state."""
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service is None:
                for service, term in enumerate(self.terms):
                    if term >= agent.term:
                        yield ("connect", rank, service)
                    elif self.faults.strays:
                        yield ("stray", rank, service)
            elif self.faults.cuts or self.ends_without_fault(rank):
                yield ("cut", rank)
            if self.faults.hangs and rank in self.ending:
                yield ("hang", rank)
        for service, rank, forming in self.dead_streams:
            yield ("notice", service, rank, forming)
        for service, deployment in enumerate(self.services):
            if self.faults.restarts:
                yield ("restart", service)
            if self.faults.squats:
                yield ("squat", service)
            if self.faults.orders and deployment.outdated is not None:
                yield ("lead", service)
            if service in self.squatted and not deployment.attendance.is_overdue:
                yield ("wait", service)
        if self.faults.reforms and self.crew.version.forming + 1 < len(RANKS_BY_FORMING):
            yield ("reform",)

    def ends_without_fault(self, rank: int) -> bool:
        """True if the rank's stream ends without a fault: the rank must reconnect, or its service is outdated."""
        service = self.crew.ranks[rank].service
        return rank in self.ending or (service is not None and self.terms[service] < max(self.terms))

    def _connect(self, rank: int, service: int) -> None:
        highest_term = self.crew.ranks[rank].term
        if not self._send_hello(
            replace(hello_at(self.crew.version, rank), highest_term=highest_term), service
        ):
            return
        term = max(self.crew.ranks[rank].term, self.terms[service])
        plan = self.services[service].plan
        call_off = self.open_plans[service] if plan is not None and plan.called_off else None
        self.crew = self.crew.with_rank(
            rank,
            service=service,
            term=term,
            reported_version=self.crew.version,
            last_status=None,
            call_off_in_flight=call_off,
        )

    def _send_hello(self, hello: Hello, service: int) -> bool:
        """Send a Hello and return True if it is accepted. A new incarnation ends the previous one's streams."""
        deployment = self.services[service]
        group = deployment.group
        has_stream = self._stream_of(service, hello)
        if has_stream and deployment.renews(hello):
            self._drop_stream(service, hello.rank)
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello)
        except RejectedError:
            return False
        finally:
            if deployment.heat is not None:
                # Pretend that heat has been assembled, because the explorer does not model counting.
                deployment.heat.assembled = 1
        if group is not None and deployment.group is not None and deployment.group.forming != group.forming:
            self._drop_streams(service)
        return True

    def _stream_of(self, service: int, hello: Hello) -> bool:
        """True if the service considers the rank connected."""
        return hello.rank in {member.rank for member in self.services[service].connected}

    def _drop_stream(self, service: int, rank: int) -> None:
        """End and forget the stream that the service considers to be the rank's."""
        self.dead_streams = frozenset(stream for stream in self.dead_streams if stream[:2] != (service, rank))
        if rank < len(self.crew.ranks) and self.crew.ranks[rank].service == service:
            self.ending -= {rank}
            self.crew = self.crew.with_rank(rank, **NO_STREAM)

    def _drop_streams(self, service: int) -> None:
        """End the streams of all ranks."""
        self.squatted -= {service}
        for rank in range(max(RANKS_BY_FORMING)):
            self._drop_stream(service, rank)

    def _squat(self, service: int) -> None:
        """Send a Hello as rank 0 from outside the group. It must not displace ranks that connected earlier."""
        self.faults = self.faults._replace(squats=self.faults.squats - 1)
        deployment = self.services[service]
        stranger = stranger_at(0)
        overdue = deployment.attendance.is_overdue
        connected_ranks = [rank for rank, agent in enumerate(self.crew.ranks) if agent.service == service]
        if self._send_hello(stranger, service):
            must(not connected_ranks or overdue, "a client outside the group displaced connected ranks")
            self.squatted |= {service}
        else:
            remaining_ranks = [rank for rank, agent in enumerate(self.crew.ranks) if agent.service == service]
            must(connected_ranks == remaining_ranks, "a client outside the group ended a rank's stream")

    def _wait(self, service: int) -> None:
        """Advance time far enough for an incomplete group to time out."""
        for seconds in (0.0, 1000.0):
            self.services[service].tick(seconds)

    def _lead(self, service: int) -> None:
        """Make an outdated service the leader.

        Its streams end, so that the ranks learn the new term when they reconnect.
        """
        self.faults = self.faults._replace(orders=self.faults.orders - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service].lead_with(self.terms[service])
        self.ending |= {rank for rank, agent in enumerate(self.crew.ranks) if agent.service == service}

    def _stray(self, rank: int, service: int) -> None:
        self.faults = self.faults._replace(strays=self.faults.strays - 1)
        self._connect(rank, service)

    def _cut(self, rank: int) -> None:
        if not self.ends_without_fault(rank):
            self.faults = self.faults._replace(cuts=self.faults.cuts - 1)
        self.end_stream(rank)

    def _hang(self, rank: int) -> None:
        self.faults = self.faults._replace(hangs=self.faults.hangs - 1)
        self.ending -= {rank}

    def end_stream(self, rank: int) -> None:
        """End the stream on the rank's side. The service notices later."""
        service = self.crew.ranks[rank].service
        assert service is not None
        self.dead_streams |= {(service, rank, self.crew.version.forming)}
        self.ending -= {rank}
        self.crew = self.crew.with_rank(rank, **NO_STREAM)

    def _notice(self, service: int, rank: int, forming: int) -> None:
        self.dead_streams -= {(service, rank, forming)}
        self.services[service].leave(rank)

    def _restart(self, service: int) -> None:
        self.faults = self.faults._replace(restarts=self.faults.restarts - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service] = self.new_service(self.terms[service])
        self.squatted -= {service}
        self.open_plans[service] = None
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service == service:
                self.end_stream(rank)
        # The service that would have noticed these disconnects is gone.
        self.dead_streams = frozenset(stream for stream in self.dead_streams if stream[0] != service)

    def _reform(self) -> None:
        self.faults = self.faults._replace(reforms=self.faults.reforms - 1)
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service is not None:
                self.end_stream(rank)
        self.past_versions = (*self.past_versions, self.crew.version)
        self.crew = Crew.formed(self.crew.version.forming + 1)


def _view_of(rank: int, deployment: Deployment) -> tuple[Any, ...]:
    """Return the service's view of one rank."""
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
    group = deployment.group
    live = deployment.live
    heat = deployment.heat
    plans = (deployment.plan, deployment.ended_plan)
    return (
        None if group is None else group.forming,
        None if live is None else (live.epoch, live.digest),
        deployment.attendance.is_overdue,
        tuple(None if plan is None else (plan.plan_id, plan.committed, plan.outcome) for plan in plans),
        None
        if heat is None
        else tuple(
            tuple((epoch, layer_digest(layer, placed[0])) for epoch, placed in sorted(placements.items()))
            for layer, placements in enumerate(heat.placements.by_layer)
        ),
    )


def _copy_deployment(deployment: Deployment) -> Deployment:
    """Return a copy that shares groups and plans, which are immutable, and heat, which is never counted."""
    heat = copy.copy(deployment.heat)
    if heat is not None:
        heat.placements = PlacementHistory(tuple(map(dict, heat.placements.by_layer)))
    planned_par = dict(deployment.planned_par)
    attendance = replace(deployment.attendance, rejections={})
    return replace(
        deployment, heat=heat, planned_par=planned_par, attendance=attendance, plan_problems=[], events=[]
    )
