"""Deployments with one bug each. The explorer must catch all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eplb_core.planner.plan import LayerPlan
from eplb_core.wire.agent import Hello
from eplb_service.control.core.deployment import Deployment, StreamsOutdated
from eplb_service.control.core.group import Group
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from tests.control.core.explored_service import walk
from tests.control.core.explored_state import Faults, Scenario
from tests.exploring import Walk


def with_stub(name: str, method: str, answer: object = None) -> type[Deployment]:
    """Return a ``Deployment`` subclass in which ``method`` does nothing and returns ``answer``."""
    return type(name, (Deployment,), {method: lambda *_: answer})


class OffersWhileRanksDisagree(Deployment):
    def obstacle(self) -> str | None:
        reason = super().obstacle()
        return None if reason is not None and "to reach epoch" in reason else reason


class OffersASecondPlan(Deployment):
    def tick(self, now: float) -> None:
        self.plan = None


class ReadsHeatUnderTheOfferedPlacement(Deployment):
    def offer(self, offer: PlanTracker, now: float) -> None:
        super().offer(offer, now)
        assert self.heat is not None
        for update, (epoch, _) in zip(offer.decision.layers, offer.versions, strict=True):
            self.heat.placements.place(update.layer, epoch, update.phy2log_RS, update.log2phy_RE)


class ReadsHeatUnderTheOldPlacement(Deployment):
    def _commit(self, group: Group, before: object, plan: PlanTracker, update: LayerPlan) -> None:
        assert self.live is not None
        old_RS = self.live.placement.phy2log_LRS[update.layer]
        super()._commit(group, self.live, plan, update)
        assert self.heat is not None
        self.heat.placements.place(update.layer, self.live.epoch, old_RS, update.log2phy_RE)


class CommitsALayerAtTheOffer(Deployment):
    def offer(self, offer: PlanTracker, now: float) -> None:
        super().offer(offer, now)
        assert self.plan is not None
        self._advance(self.plan, replace(self.plan, committed=1))


class RecordsEveryPlanAsDone(Deployment):
    def _close_plan(self) -> None:
        if self.plan is not None and self.plan.outcome is not None:
            self.plan = replace(self.plan, outcome=Outcome.DONE)
        super()._close_plan()


class EndsAtTheFirstCallOffReply(Deployment):
    """Ends a called-off plan once one rank reports that it does not hold the plan, although other ranks may hold it."""

    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        ends = after.called_off and after.objections and after.outcome is None
        super()._advance(before, replace(after, outcome=Outcome.CALLED_OFF) if ends else after)


class CommitsALayerTwice(Deployment):
    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        first_new = before.committed if after.committed > before.committed else 0
        for update in after.decision.layers[first_new : after.committed]:
            if self.group is not None and self.live is not None:
                self._commit(self.group, self.live, after, update)
        super()._advance(before, after)


class ForgetsEndedPlans(Deployment):
    """Ignores late statuses, and never asks the ranks for a new Hello."""

    def _close_plan(self) -> None:
        super()._close_plan()
        self.ended_plan = None

    def _trust_ranks(self, rank: int) -> None:
        pass


class AcceptsAnyGroupId(Deployment):
    def hello(self, hello: Hello) -> None:
        if self.group is not None:
            hello = replace(hello, group_id=self.group.group_id)
        super().hello(hello)


class YieldsToAnyGroup(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        if self.group is not None and hello.group_id != self.group.group_id:
            for member in self.group.connected:
                self.group = self.group.with_member(member.rank, connected=False)
        super()._replace_group(hello)


class KeepsTheHeatOfThePreviousGroup(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        heat = self.heat
        super()._replace_group(hello)
        self.heat = heat


class KeepsTheVersionOfADepartedRank(Deployment):
    class Memory(Group):
        def without_stream(self, rank: int) -> Group:
            return self.with_member(rank, connected=False)

    def _replace_group(self, hello: Hello) -> None:
        super()._replace_group(hello)
        if type(self.group) is Group:
            self.group = self.Memory(self.group.group_id, self.group.shape)


class NeverAsksAnIncompleteGroupForANewHello(Deployment):
    def _trust_ranks(self, rank: int) -> None:
        if self.live is not None:
            super()._trust_ranks(rank)


class NeverEndsOutdatedStreams(Deployment):
    def tick(self, now: float) -> None:
        events = list(self.events)
        super().tick(now)
        self.events = [*events, *(event for event in self.events if not isinstance(event, StreamsOutdated))]


class OffersWhileOutdated(Deployment):
    @property
    def outdated(self) -> str | None:
        return None


class TreatsEveryFormingAsOverdue(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        self.attendance = replace(self.attendance, is_overdue=True)
        super()._replace_group(hello)


class NeverTimesOutAForming(Deployment):
    def _look_at_clock(self, now: float) -> None:
        super()._look_at_clock(now)
        self.attendance = replace(self.attendance, is_overdue=False)


_ONE_PLAN = ((0,),)
_SCENARIOS = [
    Scenario(machine.__name__, faults, machine=machine, **options)
    for machine, faults, options in (
        (OffersWhileRanksDisagree, Faults(), {}),
        (OffersASecondPlan, Faults(), {}),
        (with_stub("NeverTimesOutAPlan", "tick"), Faults(losses=1), {"plans": _ONE_PLAN}),
        (ReadsHeatUnderTheOfferedPlacement, Faults(), {}),
        (ReadsHeatUnderTheOldPlacement, Faults(), {}),
        (CommitsALayerAtTheOffer, Faults(), {}),
        (RecordsEveryPlanAsDone, Faults(), {"plans": _ONE_PLAN}),
        (EndsAtTheFirstCallOffReply, Faults(call_offs=1), {"plans": _ONE_PLAN}),
        (CommitsALayerTwice, Faults(), {}),
        (ForgetsEndedPlans, Faults(losses=1), {"plans": _ONE_PLAN}),
        (with_stub("NeverAsksForANewHello", "_trust_ranks"), Faults(restarts=1), {"plans": _ONE_PLAN}),
        (
            with_stub("KeepsThePlanOfADepartedGroup", "_interrupt_plan"),
            Faults(reforms=1),
            {"plans": _ONE_PLAN},
        ),
        (AcceptsAnyGroupId, Faults(reforms=1), {"plans": _ONE_PLAN}),
        (YieldsToAnyGroup, Faults(squats=1), {"plans": _ONE_PLAN}),
        (KeepsTheHeatOfThePreviousGroup, Faults(reforms=1), {"plans": _ONE_PLAN}),
        (with_stub("NeverRemovesARank", "leave"), Faults(cuts=1), {"plans": _ONE_PLAN}),
        (KeepsTheVersionOfADepartedRank, Faults(cuts=1, restarts=1), {"plans": _ONE_PLAN}),
        (NeverAsksAnIncompleteGroupForANewHello, Faults(restarts=1), {"plans": _ONE_PLAN}),
        (NeverEndsOutdatedStreams, Faults(restarts=1, hangs=1), {"plans": _ONE_PLAN}),
        (
            OffersWhileOutdated,
            Faults(cuts=1, strays=1),
            {"plans": _ONE_PLAN, "services": 2, "forming": 1},
        ),
        (with_stub("LetsAnyClientRenewARank", "renews", True), Faults(squats=1), {"plans": _ONE_PLAN}),
        (TreatsEveryFormingAsOverdue, Faults(squats=1), {"plans": _ONE_PLAN}),
        (NeverTimesOutAForming, Faults(squats=1), {"plans": _ONE_PLAN, "joined": False}),
    )
]
"""Each mutant, with the scenario that catches it fastest."""


def hunt() -> Iterator[tuple[str, Walk]]:
    """Yield each mutant's name and walk. A mutant has survived if its walk violated no invariant."""
    for scenario in _SCENARIOS:
        yield scenario.name, walk(scenario)
