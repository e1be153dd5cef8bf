"""Deployments with one thing broken, each in another way: the explorer has to catch every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.events import StreamsOutdated
from eplb_service.control.core.membership import Group
from eplb_service.control.core.offer import Offer
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.planner.plan import LayerPlan
from eplb_service.wire.hello import Hello
from tests.control.core.explored_service import walk
from tests.control.core.explored_state import Faults, Scenario
from tests.exploring import Walk


class OffersWhileRanksAreAstray(Deployment):
    def obstacle(self) -> str | None:
        found = super().obstacle()
        return None if found is not None and "not at epoch" in found else found


class PlansBesideAPlan(Deployment):
    def tick(self, now: float) -> None:
        self.plan = None


class NeverGivesAPlanUp(Deployment):
    def tick(self, now: float) -> None:
        pass


class ReadsHeatUnderWhatItOffered(Deployment):
    def offer(self, offer: Offer, now: float) -> None:
        super().offer(offer, now)
        assert self.heat is not None
        for milestone in offer.milestones:
            update = milestone.update
            self.heat.placements.place(update.layer, milestone.epoch, update.phy2log_RS, update.log2phy_RE)


class ReadsHeatUnderTheOldLayer(Deployment):
    def _commit(self, group: Group, before: object, plan: PlanTracker, update: LayerPlan) -> None:
        assert self.live is not None
        old_RS = self.live.placement.phy2log_LRS[update.layer]
        super()._commit(group, self.live, plan, update)
        assert self.heat is not None
        self.heat.placements.place(update.layer, self.live.epoch, old_RS, update.log2phy_RE)


class BelievesWhatItOffered(Deployment):
    def offer(self, offer: Offer, now: float) -> None:
        super().offer(offer, now)
        assert self.plan is not None
        self._advance(self.plan, replace(self.plan, committed=1))


class BelievesEachWordAgain(Deployment):
    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        known = before.committed if after.committed > before.committed else 0
        for milestone in after.offer.milestones[known : after.committed]:
            if self.group is not None and self.live is not None:
                self._commit(self.group, self.live, after, milestone.update)
        super()._advance(before, after)


class ForgetsAPlanThatHasEnded(Deployment):
    """What comes late is of no use to it, and it never asks the ranks again."""

    def _close_plan(self) -> None:
        super()._close_plan()
        self.ended_plan = None

    def _give_way_to_ranks(self, rank: int) -> None:
        pass


class NeverAsksRanksAgain(Deployment):
    def _give_way_to_ranks(self, rank: int) -> None:
        pass


class KeepsThePlanOfAGroupThatIsGone(Deployment):
    def _interrupt_plan(self, reason: str) -> None:
        pass


class TakesAnyGroupForItsOwn(Deployment):
    def hello(self, hello: Hello) -> None:
        if self.group is not None:
            hello = replace(hello, group_id=self.group.group_id)
        super().hello(hello)


class GivesWayToAnyGroup(Deployment):
    def _make_way_for(self, hello: Hello) -> None:
        if self.group is not None and hello.group_id != self.group.group_id:
            for member in self.group.connected:
                self.group = self.group.with_member(member.rank, connected=False)
        super()._make_way_for(hello)


class KeepsTheHeatOfTheGroupBefore(Deployment):
    def _make_way_for(self, hello: Hello) -> None:
        heat = self.heat
        super()._make_way_for(hello)
        self.heat = heat


class NeverLetsARankGo(Deployment):
    def leave(self, rank: int) -> None:
        pass


class KeepsWhatARankSaidBeforeItLeft(Deployment):
    class Memory(Group):
        def left(self, rank: int) -> Group:
            return self.with_member(rank, connected=False)

    def _make_way_for(self, hello: Hello) -> None:
        super()._make_way_for(hello)
        if type(self.group) is Group:
            self.group = self.Memory(self.group.group_id, self.group.shape)


class NeverAsksAGroupThatIsHalfThereAgain(Deployment):
    def _give_way_to_ranks(self, rank: int) -> None:
        if self.live is not None:
            super()._give_way_to_ranks(rank)


class WaitsForRanksThatAreThere(Deployment):
    def tick(self, now: float) -> None:
        events = list(self.events)
        super().tick(now)
        self.events = [*events, *(event for event in self.events if not isinstance(event, StreamsOutdated))]


class OffersThoughRanksFollowAnother(Deployment):
    @property
    def outdated(self) -> str | None:
        return None


class GivesAnybodyASeat(Deployment):
    def renews(self, hello: Hello) -> bool:
        return True


class TakesAnyFormingToBeOverdue(Deployment):
    def _make_way_for(self, hello: Hello) -> None:
        self.attendance = replace(self.attendance, forming_overdue=True)
        super()._make_way_for(hello)


class WaitsForAFormingThatNeverCompletes(Deployment):
    def _look_at_clock(self, now: float) -> None:
        super()._look_at_clock(now)
        self.attendance = replace(self.attendance, forming_overdue=False)


@dataclass(frozen=True)
class _Trial:
    """The scenario that gives a mutant away soonest."""

    faults: Faults
    plans: tuple[tuple[int, ...], ...] = ((0,), (0,))
    joined: bool = True
    services: int = 1
    forming: int = 0


MUTANTS: dict[type[Deployment], _Trial] = {
    OffersWhileRanksAreAstray: _Trial(Faults()),
    PlansBesideAPlan: _Trial(Faults()),
    NeverGivesAPlanUp: _Trial(Faults(losses=1), plans=((0,),)),
    ReadsHeatUnderWhatItOffered: _Trial(Faults()),
    ReadsHeatUnderTheOldLayer: _Trial(Faults()),
    BelievesWhatItOffered: _Trial(Faults()),
    BelievesEachWordAgain: _Trial(Faults()),
    ForgetsAPlanThatHasEnded: _Trial(Faults(losses=1), plans=((0,),)),
    NeverAsksRanksAgain: _Trial(Faults(restarts=1), plans=((0,),)),
    KeepsThePlanOfAGroupThatIsGone: _Trial(Faults(reforms=1), plans=((0,),)),
    TakesAnyGroupForItsOwn: _Trial(Faults(reforms=1), plans=((0,),)),
    GivesWayToAnyGroup: _Trial(Faults(squats=1), plans=((0,),)),
    KeepsTheHeatOfTheGroupBefore: _Trial(Faults(reforms=1), plans=((0,),)),
    NeverLetsARankGo: _Trial(Faults(cuts=1), plans=((0,),)),
    KeepsWhatARankSaidBeforeItLeft: _Trial(Faults(cuts=1, restarts=1), plans=((0,),)),
    NeverAsksAGroupThatIsHalfThereAgain: _Trial(Faults(restarts=1), plans=((0,),)),
    WaitsForRanksThatAreThere: _Trial(Faults(restarts=1, deaf=1), plans=((0,),)),
    OffersThoughRanksFollowAnother: _Trial(Faults(cuts=1, strays=1), plans=((0,),), services=2, forming=1),
    GivesAnybodyASeat: _Trial(Faults(squats=1), plans=((0,),)),
    TakesAnyFormingToBeOverdue: _Trial(Faults(squats=1), plans=((0,),)),
    WaitsForAFormingThatNeverCompletes: _Trial(Faults(squats=1), plans=((0,),), joined=False),
}


def hunt() -> Iterator[tuple[str, Walk]]:
    """Each mutant's name and walk; one that broke no promise has got away."""
    for machine, trial in MUTANTS.items():
        scenario = Scenario(
            machine.__name__,
            trial.faults,
            trial.plans,
            trial.services,
            trial.joined,
            machine,
            trial.forming,
        )
        yield machine.__name__, walk(scenario)
