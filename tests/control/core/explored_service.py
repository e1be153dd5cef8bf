"""Exhaustive exploration of a service and its ranks. ``make explore`` runs all scenarios and prints the state counts.

The services run the real ``Deployment`` with its registration, plan tracker and heat. ``explored_crew.py`` models the
ranks. Streams end unnoticed. Statuses are lost, repeated or reordered. Services restart or run side by side, and the
group re-forms with a different size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from eplb_core.wire.agent import Heartbeat, PlanState, PlanStatus
from eplb_service.control.core.deployment import Deployment, StreamsOutdated
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from tests.control.core.explored_crew import OfferedPlan, Status, live_at, offer_of
from tests.control.core.explored_promises import check_called_off, check_done, check_offer, check_state
from tests.control.core.explored_state import PLAN_TIMEOUT, Faults, Scenario, State
from tests.exploring import Event, Walk, happen, must, report
from tests.exploring import walk as walk_world


class World(State):
    """A state with its transitions: ``events`` lists the possible events, and ``after`` applies one."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        if scenario.joined:
            for rank in range(len(self.crew.ranks)):
                self._connect(rank, 0)

    # Events

    def events(self) -> Iterator[Event]:
        """Yield every event that is possible in this state."""
        yield from self.stream_events()
        yield from self._rank_events()
        for service, deployment in enumerate(self.services):
            if deployment.plan is not None or self._is_stuck(deployment):
                yield ("tick", service)
            elif self.plans_left and deployment.obstacle() is None:
                yield ("offer", service)
            if self.faults.call_offs and deployment.plan is not None and not deployment.plan.called_off:
                yield ("call_off", service)
        if self.crew.may_commit:
            yield ("commit",)
        if any(rank.held_plan is not None for rank in self.crew.ranks):
            yield ("drop",)
        if any(rank.is_called_off for rank in self.crew.ranks):
            yield ("vote_down",)

    def after(self, event: Event) -> World:
        """Return the state after an event. Raises ``Broken`` if an invariant is violated."""
        world: World = self.copy()
        kind, *arguments = event
        happen(getattr(world, f"_{kind}"), *arguments)
        for service in range(len(world.services)):
            world._follow_up(service)
        check_state(world)
        return world

    @property
    def settled(self) -> bool:
        """True if all ranks are connected to one service that knows their layout, and nothing is pending."""
        (first, *_) = self.crew.ranks
        live = live_at(self.crew.version)
        if first.service is None or self.ending:
            return False
        deployment = self.services[first.service]
        recorded = deployment.live
        return (
            all(
                (rank.service, rank.held_plan, rank.plan_in_flight, rank.call_off_in_flight, rank.statuses)
                == (first.service, None, None, None, ())
                for rank in self.crew.ranks
            )
            and not self.dead_streams
            and all(service.plan is None for service in self.services)
            and recorded is not None
            and (recorded.epoch, recorded.digest) == (live.epoch, live.digest)
            and deployment.obstacle() is None
        )

    def needs_no_fault(self, event: Event) -> bool:
        """True if the event will eventually happen without further faults."""
        kind = event[0]
        certain = (
            "connect",
            "notice",
            "deliver_status",
            "heartbeat",
            "tick",
            "wait",
            "deliver_plan",
            "deliver_call_off",
            "commit",
            "drop",
            "vote_down",
        )
        return kind in certain or (kind == "cut" and self.ends_without_fault(event[1]))

    def _is_stuck(self, deployment: Deployment) -> bool:
        """True if all requested reconnects are complete and only the passage of time can change the state."""
        group = deployment.group
        half_known = group is not None and group.live is None and not group.missing
        return half_known and not (self.ending or self.dead_streams)

    def _rank_events(self) -> Iterator[Event]:
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service is None:
                continue
            yield ("heartbeat", rank)
            if agent.plan_in_flight is not None:
                yield ("deliver_plan", rank)
                if agent.call_off_in_flight is not None:
                    yield ("withdraw", rank)
            elif agent.call_off_in_flight is not None:
                yield ("deliver_call_off", rank)
            if agent.statuses:
                yield ("deliver_status", rank)
                if self.faults.losses:
                    yield ("lose", rank)
            if len(agent.statuses) > 1 and self.faults.swaps:
                yield ("swap", rank)
            if agent.last_status is not None and self.faults.repeats:
                yield ("repeat", rank)

    # Statuses

    def _deliver_status(self, rank: int) -> None:
        first, *rest = self.crew.ranks[rank].statuses
        self.crew = self.crew.with_rank(rank, statuses=tuple(rest), last_status=first)
        self._receive_status(rank, first)

    def _swap(self, rank: int) -> None:
        self.faults = self.faults._replace(swaps=self.faults.swaps - 1)
        first, second, *rest = self.crew.ranks[rank].statuses
        self.crew = self.crew.with_rank(rank, statuses=(first, *rest), last_status=second)
        self._receive_status(rank, second)

    def _repeat(self, rank: int) -> None:
        self.faults = self.faults._replace(repeats=self.faults.repeats - 1)
        status = self.crew.ranks[rank].last_status
        assert status is not None
        self._receive_status(rank, status)

    def _lose(self, rank: int) -> None:
        self.faults = self.faults._replace(losses=self.faults.losses - 1)
        self.crew = self.crew.with_rank(rank, statuses=self.crew.ranks[rank].statuses[1:])
        self.end_stream(rank)

    def _receive_status(self, rank: int, reported: Status) -> None:
        agent = self.crew.ranks[rank]
        live = live_at(reported.version)
        assert agent.service is not None
        assert agent.reported_version is not None
        if len(reported.version.path) > len(agent.reported_version.path):
            self.crew = self.crew.with_rank(rank, reported_version=reported.version)
        status = PlanStatus(
            plan_id=offer_of(reported.offered).plan_id,
            layer=reported.layer,
            state=reported.state,  # type: ignore[arg-type]
            epoch=live.epoch,
            digest=live.digest,
        )
        self.services[agent.service].plan_status(rank, status, 0.0)

    def _heartbeat(self, rank: int) -> None:
        agent = self.crew.ranks[rank]
        assert agent.service is not None
        assert agent.reported_version is not None
        live = live_at(agent.reported_version)
        heartbeat = Heartbeat(epoch=live.epoch, digest=live.digest)
        self.services[agent.service].heartbeat(rank, heartbeat)

    def _deliver_plan(self, rank: int) -> None:
        self.crew = self.crew.receive_plan(rank)

    def _withdraw(self, rank: int) -> None:
        """Withdraw a plan that had not been sent to the rank when the service called it off."""
        self.crew = self.crew.with_rank(rank, plan_in_flight=None)

    def _deliver_call_off(self, rank: int) -> None:
        self.crew = self.crew.receive_call_off(rank)

    # Plans

    def _call_off(self, service: int) -> None:
        self.faults = self.faults._replace(call_offs=self.faults.call_offs - 1)
        self.services[service].call_off("heat changed", 0.0)
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service == service:
                self.crew = self.crew.with_rank(rank, call_off_in_flight=self.open_plans[service])

    def _vote_down(self) -> None:
        """Have the ranks vote against the called-off plan."""
        self.crew = self.crew.drop(PlanState.CALLED_OFF)

    def _offer(self, service: int) -> None:
        deployment = self.services[service]
        group = deployment.group
        live = deployment.live
        assert group is not None
        assert live is not None
        version = self.version_of(group)
        plan = len(self.scenario.plans) - self.plans_left
        offered = OfferedPlan(
            plan, self.scenario.plans[plan], self.terms[service], version.forming, version.path[: live.epoch]
        )
        check_offer(self, service, offered)
        deployment.offer(offer_of(offered), 0.0)
        self.plans_left -= 1
        self.open_plans[service] = offered
        for rank, agent in enumerate(self.crew.ranks):
            if agent.service == service:
                self.crew = self.crew.with_rank(rank, plan_in_flight=offered)

    def _tick(self, service: int) -> None:
        """Advance time and steps far enough for the current plan to time out."""
        deployment = self.services[service]
        if deployment.plan is not None:
            deployment.plan = replace(deployment.plan, stepped_at=2 * PLAN_TIMEOUT)
        deployment.tick(2 * PLAN_TIMEOUT)

    def _commit(self) -> None:
        self.crew = self.crew.commit()

    def _drop(self) -> None:
        self.crew = self.crew.drop()

    def _follow_up(self, service: int) -> None:
        for event in self.services[service].process_events():
            if isinstance(event, PlanTracker):
                offered = self.open_plans[service]
                is_open = offered is not None and event.decision is offer_of(offered).decision
                must(is_open, "a plan ended twice or was never open")
                if event.outcome is Outcome.DONE:
                    check_done(self, offered)
                elif event.outcome is Outcome.CALLED_OFF:
                    check_called_off(self, offered)
                self.open_plans[service] = None
            elif isinstance(event, StreamsOutdated):
                streams = (rank for rank, agent in enumerate(self.crew.ranks) if agent.service == service)
                self.ending |= frozenset(streams)


def scenarios() -> list[Scenario]:
    """Return the scenarios of the full exploration."""
    return [
        Scenario("ranks join in any order and leave again", Faults(cuts=2), plans=((0,),), joined=False),
        Scenario("a plan of two layers and a second plan", Faults(), plans=((0, 1), (0,))),
        Scenario("streams end and statuses are lost", Faults(cuts=1, losses=1), plans=((0, 1),)),
        Scenario("statuses are repeated and reordered", Faults(repeats=1, swaps=1), plans=((0, 1),)),
        Scenario("two plans, statuses are repeated and reordered", Faults(repeats=1, swaps=1)),
        Scenario("two plans and a lost status", Faults(losses=1)),
        Scenario("the service restarts", Faults(restarts=1)),
        Scenario(
            "the service restarts and a stream does not end", Faults(restarts=1, hangs=1), plans=((0,),)
        ),
        Scenario("two services", Faults(cuts=1, strays=1), plans=((0,),), services=2, forming=1),
        Scenario(
            "two services, and an operator makes the older one lead",
            Faults(cuts=1, strays=1, orders=1),
            plans=(),
            services=2,
            forming=1,
        ),
        Scenario("an outsider registers as a rank", Faults(cuts=2, squats=2), plans=((0,),), joined=False),
        Scenario("a plan is called off", Faults(call_offs=1), plans=((0, 1),)),
        *(
            Scenario(f"a plan is called off and {name}", faults._replace(call_offs=1), plans, forming=1)
            for name, faults, plans in (
                ("another one is offered", Faults(), ((0,), (1,))),
                ("a stream ends", Faults(cuts=1), ((0, 1),)),
                ("a status is lost", Faults(losses=1), ((0, 1),)),
                ("statuses are repeated and reordered", Faults(repeats=1, swaps=1), ((0,),)),
                ("the service restarts", Faults(restarts=1), ((0,),)),
            )
        ),
        Scenario("the group is formed again", Faults(cuts=1, reforms=1), plans=((0,),)),
        Scenario("the group is formed again, with two plans", Faults(reforms=1)),
    ]


def walk(scenario: Scenario) -> Walk:
    """Visit every state of the scenario."""
    return walk_world(scenario.name, World(scenario))


def main() -> None:
    """Explore all scenarios, then try to kill every mutant. Exit with 1 if an invariant breaks or a mutant survives."""
    from tests.control.core.explored_mutants import hunt

    sys.exit(not report((walk(scenario) for scenario in scenarios()), hunt()))


if __name__ == "__main__":
    main()
