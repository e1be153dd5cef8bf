"""Deployments with one thing broken, each in another way: the explorer has to catch every one."""

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


def answering(name: str, method: str, answer: object = None) -> type[Deployment]:
    """A deployment one of whose methods does nothing but answer this."""
    return type(name, (Deployment,), {method: lambda *_: answer})


class OffersWhileRanksAreAstray(Deployment):
    def obstacle(self) -> str | None:
        found = super().obstacle()
        return None if found is not None and "not at epoch" in found else found


class PlansBesideAPlan(Deployment):
    def tick(self, now: float) -> None:
        self.plan = None


class ReadsHeatUnderWhatItOffered(Deployment):
    def offer(self, offer: PlanTracker, now: float) -> None:
        super().offer(offer, now)
        assert self.heat is not None
        for update, (epoch, _) in zip(offer.decision.layers, offer.versions, strict=True):
            self.heat.placements.place(update.layer, epoch, update.phy2log_RS, update.log2phy_RE)


class ReadsHeatUnderTheOldLayer(Deployment):
    def _commit(self, group: Group, before: object, plan: PlanTracker, update: LayerPlan) -> None:
        assert self.live is not None
        old_RS = self.live.placement.phy2log_LRS[update.layer]
        super()._commit(group, self.live, plan, update)
        assert self.heat is not None
        self.heat.placements.place(update.layer, self.live.epoch, old_RS, update.log2phy_RE)


class BelievesWhatItOffered(Deployment):
    def offer(self, offer: PlanTracker, now: float) -> None:
        super().offer(offer, now)
        assert self.plan is not None
        self._advance(self.plan, replace(self.plan, committed=1))


class TakesAnyEndForSuccess(Deployment):
    def _close_plan(self) -> None:
        if self.plan is not None and self.plan.outcome is not None:
            self.plan = replace(self.plan, outcome=Outcome.DONE)
        super()._close_plan()


class EndsWithTheFirstAnswer(Deployment):
    """Ends a called-off plan once one rank reports that it does not hold it, although others may."""

    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        ends = after.called_off and after.objections and after.outcome is None
        super()._advance(before, replace(after, outcome=Outcome.CALLED_OFF) if ends else after)


class BelievesEachWordAgain(Deployment):
    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        known = before.committed if after.committed > before.committed else 0
        for update in after.decision.layers[known : after.committed]:
            if self.group is not None and self.live is not None:
                self._commit(self.group, self.live, after, update)
        super()._advance(before, after)


class ForgetsAPlanThatHasEnded(Deployment):
    """What comes late is of no use to it, and it never asks the ranks again."""

    def _close_plan(self) -> None:
        super()._close_plan()
        self.ended_plan = None

    def _trust_ranks(self, rank: int) -> None:
        pass


class TakesAnyGroupForItsOwn(Deployment):
    def hello(self, hello: Hello) -> None:
        if self.group is not None:
            hello = replace(hello, group_id=self.group.group_id)
        super().hello(hello)


class GivesWayToAnyGroup(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        if self.group is not None and hello.group_id != self.group.group_id:
            for member in self.group.connected:
                self.group = self.group.with_member(member.rank, connected=False)
        super()._replace_group(hello)


class KeepsTheHeatOfTheGroupBefore(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        heat = self.heat
        super()._replace_group(hello)
        self.heat = heat


class KeepsWhatARankSaidBeforeItLeft(Deployment):
    class Memory(Group):
        def without_stream(self, rank: int) -> Group:
            return self.with_member(rank, connected=False)

    def _replace_group(self, hello: Hello) -> None:
        super()._replace_group(hello)
        if type(self.group) is Group:
            self.group = self.Memory(self.group.group_id, self.group.shape)


class NeverAsksAGroupThatIsHalfThereAgain(Deployment):
    def _trust_ranks(self, rank: int) -> None:
        if self.live is not None:
            super()._trust_ranks(rank)


class WaitsForRanksThatAreThere(Deployment):
    def tick(self, now: float) -> None:
        events = list(self.events)
        super().tick(now)
        self.events = [*events, *(event for event in self.events if not isinstance(event, StreamsOutdated))]


class OffersThoughRanksFollowAnother(Deployment):
    @property
    def outdated(self) -> str | None:
        return None


class TakesAnyFormingToBeOverdue(Deployment):
    def _replace_group(self, hello: Hello) -> None:
        self.attendance = replace(self.attendance, forming_overdue=True)
        super()._replace_group(hello)


class WaitsForAFormingThatNeverCompletes(Deployment):
    def _look_at_clock(self, now: float) -> None:
        super()._look_at_clock(now)
        self.attendance = replace(self.attendance, forming_overdue=False)


_ONE = ((0,),)
_TRIALS = [
    Scenario(machine.__name__, faults, machine=machine, **other)
    for machine, faults, other in (
        (OffersWhileRanksAreAstray, Faults(), {}),
        (PlansBesideAPlan, Faults(), {}),
        (answering("NeverGivesAPlanUp", "tick"), Faults(losses=1), {"plans": _ONE}),
        (ReadsHeatUnderWhatItOffered, Faults(), {}),
        (ReadsHeatUnderTheOldLayer, Faults(), {}),
        (BelievesWhatItOffered, Faults(), {}),
        (TakesAnyEndForSuccess, Faults(), {"plans": _ONE}),
        (EndsWithTheFirstAnswer, Faults(calls=1), {"plans": _ONE}),
        (BelievesEachWordAgain, Faults(), {}),
        (ForgetsAPlanThatHasEnded, Faults(losses=1), {"plans": _ONE}),
        (answering("NeverAsksRanksAgain", "_trust_ranks"), Faults(restarts=1), {"plans": _ONE}),
        (answering("KeepsThePlanOfAGroupThatIsGone", "_interrupt_plan"), Faults(reforms=1), {"plans": _ONE}),
        (TakesAnyGroupForItsOwn, Faults(reforms=1), {"plans": _ONE}),
        (GivesWayToAnyGroup, Faults(squats=1), {"plans": _ONE}),
        (KeepsTheHeatOfTheGroupBefore, Faults(reforms=1), {"plans": _ONE}),
        (answering("NeverLetsARankGo", "leave"), Faults(cuts=1), {"plans": _ONE}),
        (KeepsWhatARankSaidBeforeItLeft, Faults(cuts=1, restarts=1), {"plans": _ONE}),
        (NeverAsksAGroupThatIsHalfThereAgain, Faults(restarts=1), {"plans": _ONE}),
        (WaitsForRanksThatAreThere, Faults(restarts=1, deaf=1), {"plans": _ONE}),
        (
            OffersThoughRanksFollowAnother,
            Faults(cuts=1, strays=1),
            {"plans": _ONE, "services": 2, "forming": 1},
        ),
        (answering("GivesAnybodyASeat", "renews", True), Faults(squats=1), {"plans": _ONE}),
        (TakesAnyFormingToBeOverdue, Faults(squats=1), {"plans": _ONE}),
        (WaitsForAFormingThatNeverCompletes, Faults(squats=1), {"plans": _ONE, "joined": False}),
    )
]
"""Each mutant with the scenario that gives it away soonest."""


def hunt() -> Iterator[tuple[str, Walk]]:
    """Each mutant's name and walk; one that broke no promise has got away."""
    for scenario in _TRIALS:
        yield scenario.name, walk(scenario)
