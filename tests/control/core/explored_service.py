"""Everything that can happen to a service and three ranks, walked through: ``make explore`` prints what was seen.

The services' side is the real ``Deployment`` with its registration, plan tracker and heat; the ranks' is
``explored_crew.py``. Streams end unnoticed, statuses are lost, come twice or in another order, services start again or
beside one another, and the group of ranks dies and is formed again with another size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from eplb_core.wire.agent import Heartbeat, PlanState, PlanStatus
from eplb_service.control.core.deployment import Deployment, StreamsOutdated
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from tests.control.core.explored_crew import Given, Status, live_at, offer_of
from tests.control.core.explored_promises import check_called_off, check_done, check_offer, check_state
from tests.control.core.explored_state import PLAN_TIMEOUT, Faults, Scenario, State
from tests.exploring import Event, Walk, happen, must, report
from tests.exploring import walk as walk_world


class World(State):
    """One state; ``events`` lists what can happen next, ``after`` gives the state that follows."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        if scenario.joined:
            for rank in range(len(self.crew.ranks)):
                self._connect(rank, 0)

    # What can happen

    def events(self) -> Iterator[Event]:
        """Every event that this state admits."""
        yield from self.stream_events()
        yield from self._of_statuses()
        for service, deployment in enumerate(self.services):
            if deployment.plan is not None or self._is_stuck(deployment):
                yield ("tick", service)
            elif self.plans_left and deployment.obstacle() is None:
                yield ("offer", service)
            if self.faults.calls and deployment.plan is not None and not deployment.plan.called_off:
                yield ("call", service)
        if self.crew.may_commit:
            yield ("commit",)
        if any(rank.held is not None for rank in self.crew.ranks):
            yield ("drop",)
        if any(rank.stops for rank in self.crew.ranks):
            yield ("stop",)

    def after(self, event: Event) -> World:
        """The state that follows; raises ``Broken`` where a promise is."""
        world: World = self.copy()
        kind, *arguments = event
        happen(getattr(world, f"_{kind}"), *arguments)
        for service in range(len(world.services)):
            world._follow_up(service)
        check_state(world)
        return world

    @property
    def settled(self) -> bool:
        """All ranks are with one service, which knows what they serve; nothing is under way."""
        (first, *_), live = self.crew.ranks, live_at(self.crew.version)
        if first.service is None or self.ending:
            return False
        deployment = self.services[first.service]
        believed = deployment.live
        return (
            all(
                (rank.service, rank.held, rank.coming, rank.call, rank.statuses)
                == (first.service, None, None, None, ())
                for rank in self.crew.ranks
            )
            and not self.dead_streams
            and all(one.plan is None for one in self.services)
            and believed is not None
            and (believed.epoch, believed.digest) == (live.epoch, live.digest)
            and deployment.obstacle() is None
        )

    def needs_no_fault(self, event: Event) -> bool:
        """Whether this happens sooner or later if nothing goes wrong any more."""
        kind = event[0]
        certain = (
            "connect",
            "notice",
            "say",
            "beat",
            "tick",
            "wait",
            "deliver",
            "hears",
            "commit",
            "drop",
            "stop",
        )
        return kind in certain or (kind == "cut" and self.has_to_end(event[1]))

    def _is_stuck(self, deployment: Deployment) -> bool:
        """Whether only time can help; what was asked to end, and hears it, has ended by the next second."""
        group = deployment.group
        half_known = group is not None and group.live is None and not group.missing
        return half_known and not (self.ending or self.dead_streams)

    def _of_statuses(self) -> Iterator[Event]:
        for rank, one in enumerate(self.crew.ranks):
            if one.service is None:
                continue
            yield ("beat", rank)
            if one.coming is not None:
                yield ("deliver", rank)
                if one.call is not None:
                    yield ("withdraw", rank)
            elif one.call is not None:
                yield ("hears", rank)
            if one.statuses:
                yield ("say", rank)
                if self.faults.losses:
                    yield ("lose", rank)
            if len(one.statuses) > 1 and self.faults.swaps:
                yield ("swap", rank)
            if one.said is not None and self.faults.repeats:
                yield ("repeat", rank)

    # Statuses

    def _say(self, rank: int) -> None:
        first, *rest = self.crew.ranks[rank].statuses
        self.crew = self.crew.with_rank(rank, statuses=tuple(rest), said=first)
        self._hear(rank, first)

    def _swap(self, rank: int) -> None:
        self.faults = self.faults._replace(swaps=self.faults.swaps - 1)
        first, second, *rest = self.crew.ranks[rank].statuses
        self.crew = self.crew.with_rank(rank, statuses=(first, *rest), said=second)
        self._hear(rank, second)

    def _repeat(self, rank: int) -> None:
        self.faults = self.faults._replace(repeats=self.faults.repeats - 1)
        said = self.crew.ranks[rank].said
        assert said is not None
        self._hear(rank, said)

    def _lose(self, rank: int) -> None:
        self.faults = self.faults._replace(losses=self.faults.losses - 1)
        self.crew = self.crew.with_rank(rank, statuses=self.crew.ranks[rank].statuses[1:])
        self.end_stream(rank)

    def _hear(self, rank: int, reported: Status) -> None:
        one, live = self.crew.ranks[rank], live_at(reported.version)
        assert one.service is not None
        assert one.shown is not None
        if len(reported.version.path) > len(one.shown.path):
            self.crew = self.crew.with_rank(rank, shown=reported.version)
        status = PlanStatus(
            plan_id=offer_of(reported.given).plan_id,
            layer=reported.layer,
            state=reported.state,  # type: ignore[arg-type]
            epoch=live.epoch,
            digest=live.digest,
        )
        self.services[one.service].plan_status(rank, status, 0.0)

    def _beat(self, rank: int) -> None:
        one = self.crew.ranks[rank]
        assert one.service is not None
        assert one.shown is not None
        live = live_at(one.shown)
        beat = Heartbeat(epoch=live.epoch, digest=live.digest)
        self.services[one.service].heartbeat(rank, beat)

    def _deliver(self, rank: int) -> None:
        self.crew = self.crew.hears(rank)

    def _withdraw(self, rank: int) -> None:
        """Drop a plan that had not been sent to the rank when the service called it off."""
        self.crew = self.crew.with_rank(rank, coming=None)

    def _hears(self, rank: int) -> None:
        self.crew = self.crew.hears_call(rank)

    # Plans

    def _call(self, service: int) -> None:
        self.faults = self.faults._replace(calls=self.faults.calls - 1)
        self.services[service].call_off("heat changed", 0.0)
        for rank, one in enumerate(self.crew.ranks):
            if one.service == service:
                self.crew = self.crew.with_rank(rank, call=self.open_plans[service])

    def _stop(self) -> None:
        """The ranks vote down the called-off plan."""
        self.crew = self.crew.drops(PlanState.CALLED_OFF)

    def _offer(self, service: int) -> None:
        deployment = self.services[service]
        group, live = deployment.group, deployment.live
        assert group is not None
        assert live is not None
        version = self.truth_of(group)
        plan = len(self.scenario.plans) - self.plans_left
        given = Given(
            plan, self.scenario.plans[plan], self.terms[service], version.forming, version.path[: live.epoch]
        )
        check_offer(self, service, given)
        deployment.offer(offer_of(given), 0.0)
        self.plans_left -= 1
        self.open_plans[service] = given
        for rank, one in enumerate(self.crew.ranks):
            if one.service == service:
                self.crew = self.crew.with_rank(rank, coming=given)

    def _tick(self, service: int) -> None:
        """So much time passes, in which the ranks make steps, that a plan is given up."""
        deployment = self.services[service]
        if deployment.plan is not None:
            deployment.plan = replace(deployment.plan, stepped_at=2 * PLAN_TIMEOUT)
        deployment.tick(2 * PLAN_TIMEOUT)

    def _commit(self) -> None:
        self.crew = self.crew.commits()

    def _drop(self) -> None:
        self.crew = self.crew.drops()

    def _follow_up(self, service: int) -> None:
        for event in self.services[service].take_events():
            if isinstance(event, PlanTracker):
                given = self.open_plans[service]
                known = given is not None and event.decision is offer_of(given).decision
                must(known, "a plan ended twice, or one that was never open")
                if event.outcome is Outcome.DONE:
                    check_done(self, given)
                elif event.outcome is Outcome.CALLED_OFF:
                    check_called_off(self, given)
                self.open_plans[service] = None
            elif isinstance(event, StreamsOutdated):
                streams = (rank for rank, one in enumerate(self.crew.ranks) if one.service == service)
                self.ending |= frozenset(streams)


def scenarios() -> list[Scenario]:
    """What is walked through in full."""
    return [
        Scenario("ranks join in any order, and go again", Faults(cuts=2), plans=((0,),), joined=False),
        Scenario("a plan of two layers, and one after it", Faults(), plans=((0, 1), (0,))),
        Scenario("streams end, statuses are lost", Faults(cuts=1, losses=1), plans=((0, 1),)),
        Scenario("statuses come twice and out of order", Faults(repeats=1, swaps=1), plans=((0, 1),)),
        Scenario("two plans, statuses come twice and out of order", Faults(repeats=1, swaps=1)),
        Scenario("two plans, and a status is lost", Faults(losses=1)),
        Scenario("the service starts again", Faults(restarts=1)),
        Scenario(
            "the service starts again, and a stream does not end", Faults(restarts=1, deaf=1), plans=((0,),)
        ),
        Scenario("two services", Faults(cuts=1, strays=1), plans=((0,),), services=2, forming=1),
        Scenario(
            "two services, and the older one is to lead",
            Faults(cuts=1, strays=1, orders=1),
            plans=(),
            services=2,
            forming=1,
        ),
        Scenario("a stranger holds a seat", Faults(cuts=2, squats=2), plans=((0,),), joined=False),
        Scenario("a plan is called off", Faults(calls=1), plans=((0, 1),)),
        *(
            Scenario(f"a plan is called off, and {name}", faults._replace(calls=1), plans, forming=1)
            for name, faults, plans in (
                ("another made", Faults(), ((0,), (1,))),
                ("a stream ends", Faults(cuts=1), ((0, 1),)),
                ("a status is lost", Faults(losses=1), ((0, 1),)),
                ("statuses come twice and out of order", Faults(repeats=1, swaps=1), ((0,),)),
                ("the service starts again", Faults(restarts=1), ((0,),)),
            )
        ),
        Scenario("the group is formed again", Faults(cuts=1, reforms=1), plans=((0,),)),
        Scenario("the group is formed again, with two plans", Faults(reforms=1)),
    ]


def walk(scenario: Scenario) -> Walk:
    """Visit every state of the scenario."""
    return walk_world(scenario.name, World(scenario))


def main() -> None:
    """The full walk, then every mutant; exit code 1 where a promise is broken or a mutant survives."""
    from tests.control.core.explored_mutants import hunt

    sys.exit(not report((walk(scenario) for scenario in scenarios()), hunt()))


if __name__ == "__main__":
    main()
