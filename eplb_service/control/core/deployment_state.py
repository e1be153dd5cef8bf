"""What is known of one deployment, and what follows from it: read by everybody, changed by ``Deployment`` alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_service.control.core.attendance import Attendance
from eplb_service.control.core.decisions import Decisions
from eplb_service.control.core.events import Event
from eplb_service.control.core.first_layout import FirstLayout
from eplb_service.control.core.leader_term import clock_of
from eplb_service.control.core.limits import Limits
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.membership import Group, Member, rank_list
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.control.core.totals import Totals
from eplb_service.control.core.watches import Watches
from eplb_service.heat.assembler import HeatAssembler
from eplb_service.planner.outlook import Serving
from eplb_service.planner.switch_log import SwitchLog
from eplb_service.wire.hello import Hello


@dataclass
class DeploymentState:
    """One served model instance.

    Parameters
    ----------
    name
        As its agents give it.
    limits
        Its bounds.
    paused
        Whether an operator has stopped planning.
    leader_term
        Of this service; ranks refuse the plans of lower ones than the highest of which they have heard.
    last_decision
        The last decision, for operators.
    totals
        Over all groups.
    group
        The ranks, and what they serve; a value.
    heat
        Counts of the ranks' steps, once the placement is known.
    plan, ended_plan
        The plan under way, and the one before it; values.
    planned_par
        What each switched layer's plan promised, by layer.
    attendance
        Who was refused, who is waited for, and since when nobody is connected; a value.
    known
        Whether all ranks of some forming have ever come together.
    plan_problems
        What went wrong with plans since the last decision.
    watches
        What is seen of heat and decisions as time passes; a value.
    service_problems
        What is wrong with the service itself.
    decisions
        What was decided for this group, and when the next decision is due; a value.
    first_layout
        What a forming's ranks came with, this group's or an earlier one's; a restarted service may know it.
    switch_log
        What this group's ranks have measured of their switches.
    events
        What has happened since ``take_events``.
    """

    name: str
    limits: Limits
    paused: bool = False
    leader_term: int = 0
    last_decision: str = ""
    totals: Totals = field(default_factory=Totals)
    group: Group | None = None
    heat: HeatAssembler | None = None
    plan: PlanTracker | None = None
    ended_plan: PlanTracker | None = None
    planned_par: dict[int, float] = field(default_factory=dict)
    attendance: Attendance = field(default_factory=Attendance)
    known: bool = False
    plan_problems: list[str] = field(default_factory=list)
    watches: Watches = field(default_factory=Watches)
    service_problems: tuple[str, ...] = ()
    decisions: Decisions = field(default_factory=Decisions)
    first_layout: FirstLayout | None = None
    switch_log: SwitchLog = field(default_factory=SwitchLog)
    events: list[Event] = field(default_factory=list)

    @property
    def live(self) -> LivePlacement | None:
        """What is served, once all ranks have reported it."""
        return self.group.live if self.group else None

    @property
    def found(self) -> Serving | None:
        """What served when the ranks of this group first came together; what is won is measured against it."""
        first = self.first_layout
        return first.layout if first is not None and first.is_of(self.group) else None

    @property
    def assembled(self) -> int:
        """Steps of heat that have entered the window so far."""
        return self.heat.assembled if self.heat is not None else 0

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is alive."""
        return self.group.connected if self.group else []

    def renews(self, hello: Hello) -> bool:
        """Whether this is a rank of the forming that is here, so that its new stream takes the place of its old one.

        Only ranks of a forming know its id, and none is there twice: the old stream is dead, or not the rank's.
        """
        return self.group is not None and self.group.forming == (hello.group_id, hello.shape)

    @property
    def outdated(self) -> str | None:
        """Why the ranks would refuse every plan: they have followed a service of a higher term; or ``None``."""
        seen = self.group.highest_term if self.group is not None else 0
        if seen <= self.leader_term:
            return None
        return (
            f"leader term {self.leader_term} is older than {seen}, which ranks have followed: that service started at "
            f"{clock_of(seen)}, this one at {clock_of(self.leader_term)}, by their clocks"
        )

    def obstacle(self, *, needs_heat: bool = True) -> str | None:
        """Why no decision can be made now, or ``None``; one by a prior needs no heat of the ranks' own."""
        if self.group is None or self.live is None or self.heat is None:
            return "not all ranks have reported what they serve"
        if self.paused:
            return "planning is paused"
        if self.plan is not None:
            return f"plan {self.plan.offer.plan_id} is under way"
        if self.outdated is not None:
            return self.outdated
        if self.group.missing:
            return f"{rank_list(self.group.missing)} not connected"
        halted = [member.rank for member in self.connected if member.error]
        if halted:
            return f"{rank_list(halted)} no longer takes part"
        if self.group.out_of_step:
            return f"{rank_list(self.group.out_of_step)} not at epoch {self.live.epoch}"
        return None if self.heat.steps or not needs_heat else "no heat has been gathered yet"

    @property
    def may_begin(self) -> bool:
        """Whether a first plan can be made by a prior: the ranks serve what they loaded, and nothing was decided."""
        loaded = self.live is not None and self.live.epoch == 0
        return loaded and not self.decisions.begun and self.obstacle(needs_heat=False) is None

    def is_due(self, interval: int) -> bool:
        """Whether a decision is due, and can be made; those by the clock are ``interval`` steps apart."""
        return self.decisions.is_due(self.assembled, interval) and self.obstacle() is None
