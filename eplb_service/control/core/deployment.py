"""One deployment as a pure state machine: calls in, events out, no clock, sockets or threads.

The ranks hold the truth about what is installed; everything here follows from what they say. Events gather until
``take_events``, so that none is lost where a call ends in a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from eplb_core.heat.assembler import HeatAssembler, StepCounts
from eplb_core.placement import Float64
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import LayerPlan, Layout, Outlook
from eplb_core.planner.switch_log import SwitchLog
from eplb_core.wire.agent import Heartbeat, Hello, PlanStatus
from eplb_core.wire.heat import HeatReport
from eplb_service.control.core.decisions import Decisions
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import ConflictError, RefusedError
from eplb_service.control.core.flow import LATE_SECONDS, Late, Limits, Shedding, Stall
from eplb_service.control.core.group import Assembled, Attendance, Group, Member, rank_list
from eplb_service.control.core.leader import clock_of
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker

_PROBLEMS_KEPT = 8
_PART_WHOLE = 8
"""One of so many steps since the last decision must be whole at least where a rank's heat is late."""
_MAX_TOTAL = 1 << 62
"""Bound on a total: what is stored and sent stays within 64 bits, whatever the ranks report."""


@dataclass(frozen=True)
class Totals:
    """Totals over all groups of a deployment; no sum grows past ``_MAX_TOTAL``."""

    layers_switched: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    steps_received: int = 0
    steps_lost: int = 0

    def plus(self, **gains: int) -> Totals:
        """Return these and ``gains``, by field."""
        return replace(
            self, **{name: min(getattr(self, name) + gain, _MAX_TOTAL) for name, gain in gains.items()}
        )


@dataclass(frozen=True)
class LayerCommitted:
    """One layer of a plan has switched; ``live`` is what is served since."""

    update: LayerPlan
    live: DeployedLayout
    bytes_moved: int


@dataclass(frozen=True)
class StreamsOutdated:
    """The ranks serve what the service cannot follow: end their streams, so that they introduce themselves again."""

    reason: str


Event: TypeAlias = DeployedLayout | LayerCommitted | PlanTracker | StreamsOutdated
"""A change that others must hear of; a placement on which all ranks agree now, and a plan that has ended, as such."""


@dataclass
class Deployment:
    """One served model instance, and what ranks, operators and the clock do to it.

    Parameters
    ----------
    name, limits
        As its agents give it; its bounds.
    paused, last_decision
        Whether an operator has stopped planning; the last decision, for operators.
    leader_term
        Of this service; ranks refuse the plans of lower ones than the highest of which they have heard.
    totals, known
        Over all groups; whether all ranks of some forming have ever come together.
    group, attendance
        The ranks, and what they serve; ranks refused, waited for and gone.
    heat
        Counts of the ranks' steps, once the placement is known.
    plan, ended_plan
        The plan under way, and the one before it.
    planned_par
        Ratio that each switched layer's plan promised, by layer.
    plan_problems, service_problems
        Problems of plans since the last decision, and of the service itself.
    without_heat, without_decision, shedding, late
        Time since a step was completed, and since a decision; the share of their heat that the ranks are asked for;
        the connected ranks whose heat is late.
    decisions, switch_log
        Decisions made for this group, and durations of switches that its ranks have measured.
    first_layout
        Id of a forming and what its ranks came with, this group's or an earlier one's; a restarted service may know it.
    events
        Changes since ``take_events``.
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
    without_heat: Stall = field(default_factory=Stall)
    without_decision: Stall = field(default_factory=Stall)
    shedding: Shedding = field(default_factory=Shedding)
    late: Late = field(default_factory=Late)
    service_problems: tuple[str, ...] = ()
    decisions: Decisions = field(default_factory=Decisions)
    first_layout: tuple[str, Layout] | None = None
    switch_log: SwitchLog = field(default_factory=SwitchLog)
    events: list[Event] = field(default_factory=list)

    def take_events(self) -> list[Event]:
        """Return what has happened since the last time, in order."""
        events, self.events = self.events, []
        return events

    # What follows from what is known

    @property
    def _here(self) -> Group:
        assert self.group is not None
        return self.group

    @property
    def live(self) -> DeployedLayout | None:
        """Placement that is served, once all ranks have reported it."""
        return self.group.live if self.group else None

    @property
    def found(self) -> Layout | None:
        """The layout that the ranks of this group first came together with: the baseline 'left alone'."""
        if self.group is None or self.first_layout is None:
            return None
        group_id, layout = self.first_layout
        return layout if self.group.group_id == group_id else None

    @property
    def has_planned(self) -> bool:
        """True once its ranks have been offered a plan: what is known of it is worth keeping."""
        return bool(self.totals.layers_switched) or self.plan is not None or self.ended_plan is not None

    @property
    def assembled(self) -> int:
        """Steps of heat that have entered the window so far."""
        return self.heat.assembled if self.heat is not None else 0

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is alive."""
        return self.group.connected if self.group else []

    @property
    def _furthest_step(self) -> int:
        return max((member.step for member in self.connected), default=0)

    def renews(self, hello: Hello) -> bool:
        """Return whether this is a rank of the forming that is here: its new stream takes the place of its old one.

        Only ranks of a forming know its id, and none is there twice: the old stream is dead, or not the rank's.
        """
        return self.group is not None and self.group.forming == (hello.group_id, hello.shape)

    @property
    def outdated(self) -> str | None:
        """Reason why the ranks would refuse every plan: they have followed a service of a higher term; or ``None``."""
        seen = self.group.highest_term if self.group is not None else 0
        if seen <= self.leader_term:
            return None
        return (
            f"leader term {self.leader_term} is older than {seen}, which ranks have followed: that service started at "
            f"{clock_of(seen)}, this one at {clock_of(self.leader_term)}, by their clocks"
        )

    def obstacle(self, *, needs_heat: bool = True) -> str | None:
        """Return why no decision can be made now, or ``None``; one by a prior needs no heat of the ranks' own."""
        if self.group is None or self.live is None or self.heat is None:
            return "not all ranks have reported what they serve"
        if self.paused:
            return "planning is paused"
        if self.plan is not None:
            return (
                f"plan {self.plan.plan_id} is {'being called off' if self.plan.called_off else 'under way'}"
            )
        if self.outdated is not None:
            return self.outdated
        if self.group.missing:
            return f"{rank_list(self.group.missing)} not connected"
        halted = [member.rank for member in self.connected if member.error]
        if halted:
            return f"{rank_list(halted)} takes no part at present"
        if self.group.out_of_step:
            return f"{rank_list(self.group.out_of_step)} not at epoch {self.live.epoch}"
        return None if self.heat.steps or not needs_heat else "no heat has been gathered yet"

    @property
    def may_begin(self) -> bool:
        """True where a first plan can be made by a prior: the ranks serve what they loaded, nothing was decided."""
        loaded = self.live is not None and self.live.epoch == 0
        return loaded and not self.decisions.begun and self.obstacle(needs_heat=False) is None

    def is_due(self, interval: int) -> bool:
        """Return whether a decision is due, and can be made; those by the clock are ``interval`` steps apart.

        None waits for a late rank once the ranks have made so many steps: it is made on those that are whole.
        """
        due = self.decisions.is_due(self.assembled, interval)
        if not due and self.late.for_seconds(LATE_SECONDS)[0]:
            whole = self.assembled - self.decisions.decided_at
            due = self.without_decision.steps >= interval <= _PART_WHOLE * whole
        return due and self.obstacle() is None

    # Ranks come and go

    def hello(self, hello: Hello, assembled: Assembled | None = None) -> None:
        """Take a rank in that introduces itself; raises ``RefusedError`` where it cannot be.

        What all serve together is taken from ``assembled`` if that is of the ranks that are here by now.
        """
        try:
            self._replace_group(hello)
            before = self.live
            self._follow_plan(hello.rank, hello.version)
            self.group = self._here.joined(hello, assembled)
        except RefusedError as error:
            self.attendance = self.attendance.turned_away(hello.rank, str(error))
            raise
        self.attendance = self.attendance.taken_in(hello.rank)
        self.shedding = self.shedding.joined(hello.rank)
        if self.group.live is None:
            self._interrupt_plan("the ranks moved on while the service could not hear them")
        elif self.group.live is not before:
            self._expect_heat_of(self.group.live)
            if self.found is None:
                self.first_layout = hello.group_id, self.group.live.serving
            self.known = True
            self.events.append(self.group.live)

    def leave(self, rank: int) -> None:
        """End the rank's stream."""
        if self.group is not None:
            self.group = self.group.left(rank)

    def rest(self) -> None:
        """Give back the memory while nobody is connected; the ranks bring what they serve when they return."""
        assert not self.connected
        self._interrupt_plan("the ranks went away")
        self.group = self.heat = self.ended_plan = None
        self.decisions = self.decisions.resting()

    # What ranks report

    def heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Note that a rank is alive and serves what it reports."""
        reported = ("step", "error", "epoch", "digest", "staging_bytes", "ring_bytes")
        self._note(rank, **{name: getattr(heartbeat, name) for name in reported})
        self._follow_plan(rank, (heartbeat.epoch, heartbeat.digest))
        self._trust_ranks(rank)

    def plan_status(self, rank: int, status: PlanStatus, now: float) -> None:
        """Note a rank's report on the plan under way or the one before it; on others it is of no use any more."""
        member = self._here.members[rank]
        self._note(rank, step=max(member.step, status.step))
        if status.epoch > member.epoch:
            self._note(rank, epoch=status.epoch, digest=status.digest)
        for plan in (self.plan, self.ended_plan):
            if plan is not None and plan.plan_id == status.plan_id:
                try:
                    self._advance(plan, plan.after_status(rank, status, now))
                except ConflictError as error:
                    self._note_problem(str(error))
        self.switch_log.heard(rank, status, now)
        self._trust_ranks(rank)

    def is_ahead(self, rank: int, report: HeatReport) -> bool:
        """Return whether a rank's counts are so far ahead of slower ranks' that steps would be lost."""
        return self.heat is None or self.heat.pending.is_ahead(rank, report)

    def heat_report(self, rank: int, report: HeatReport) -> StepCounts:
        """Take a rank's counts; returns steps completed, for ``put_together``, and steps lost."""
        if self.heat is None:
            return StepCounts(0, 0)
        step = max(self._here.members[rank].step, report.first_step + report.steps)
        self._note(rank, step=step, dropped_steps=report.dropped_steps)
        while self.put_together():
            # Steps that still wait would enter the window without being tested for a change.
            pass
        gained = self.heat.take(rank, report)
        if any(gained):
            self.totals = self.totals.plus(steps_received=gained.received, steps_lost=gained.lost)
        return gained

    def put_together(self, most: int | None = None) -> bool:
        """Let complete steps enter the window one by one; return True if more of them wait.

        It stops after ``most`` steps, or once a decision is due: the decision then uses the same steps, however many
        arrive together.
        """
        if self.heat is None or not self.heat.waiting:
            return False
        for _ in range(self.heat.waiting if most is None else most):
            before = self.heat.assembled
            self.heat.put_together(1)
            if self.decisions.pace is not None and self.live is not None:
                self.decisions = self.decisions.after_steps(self._tested_par(self.heat, self.live, before))
            pace = self.decisions.pace
            decides = pace is not None and pace.due and self.obstacle() is None
            if not self.heat.waiting or decides or self.may_call_off:
                break
        return self.heat.waiting > 0

    def _tested_par(self, heat: HeatAssembler, live: DeployedLayout, since: int) -> Float64:
        """Return the ratios to test for a change of heat, from the steps after the first ``since``.

        While a plan is under way, the ratios are predicted for the placement that it leads to, because measured ratios
        also change with each layer that switches.
        """
        planned = self.decisions.planned
        if self.plan is None or planned is None:
            return heat.newest_par(since, live.layer_epochs)
        return planned.par_of_steps(heat.newest_heat(since), since)

    # Decisions

    @property
    def may_call_off(self) -> bool:
        """True if the service should check if the plan under way is outdated.

        A plan is not called off if its predecessor was and neither has switched a layer. Otherwise no layer might ever
        switch under heat that changes often.
        """
        if self.plan is None or self.plan.called_off or self.paused:
            return False
        before = self.ended_plan
        if before is not None and before.was_called_off and not before.committed + self.plan.committed:
            return False
        return self.decisions.may_be_outdated

    def weighing(self) -> None:
        """Begin to check the plan under way against the current heat."""
        self.decisions = self.decisions.weighing()

    def weighed(self, outlook: Outlook, plan_id: int, now: float) -> bool:
        """Record the result of the check. Call the plan off and return True if it is outdated and still under way."""
        self.decisions, outdated = self.decisions.weighed(outlook)
        if not outdated or self.plan is None or self.plan.plan_id != plan_id or self.plan.called_off:
            return False
        self.call_off("heat changed while it was under way", now)
        return True

    def call_off(self, reason: str, now: float) -> None:
        """Call the plan under way off. The caller sends the request to the ranks."""
        assert self.plan is not None
        self.plan = self.plan.calling_off(reason, now)

    def beginning(self, problem: str = "") -> None:
        """Begin the first plan by a prior, or note why there is none; later ones are due all the same."""
        self.decisions = replace(self.decisions, begun=True)
        if problem:
            self._note_problem(problem)

    def deciding(self) -> None:
        """Begin a decision on the window as it is now."""
        self.plan_problems.clear()
        self.decisions = self.decisions.deciding(self.assembled)
        if self.heat is not None:
            self.switch_log.looked_at(self.heat.served_steps())

    def decided(self, outlook: Outlook, *, changed: bool) -> None:
        """Note the decision: it leaves all as it is, or a plan of it is about to be offered."""
        if self.live is not None:
            self.decisions = self.decisions.decided(outlook, self.live, changed=changed)

    def offer(self, plan: PlanTracker, now: float) -> None:
        """Follow a plan that is about to be sent to all ranks."""
        self.plan = replace(plan, heard_at=now, step=self._furthest_step, stepped_at=now)
        self.switch_log.offered(plan.plan_id, plan.decision.layers, self._here.shape.ranks, now)

    def tick(self, now: float) -> None:
        """Look at the clock, in seconds."""
        if self.plan is not None:
            step = None if self._here.missing else self._furthest_step
            self.plan = self.plan.after_time(now, self.limits.plan_timeout, step)
            self._close_plan()
        self._look_at_clock(now)
        if self.group is not None and self.group.live is None and not self.group.missing:
            # All ranks are connected, but a stream that should have ended is open: nothing would ever change.
            reason = "all ranks are here, but not all have reported what they serve since; say Hello again"
            self.events.append(StreamsOutdated(reason))

    # Transitions

    def _replace_group(self, hello: Hello) -> None:
        """Begin another group where ``hello`` opens one."""
        if self.group is not None and not self.group.yields_to(hello, self.attendance.forming_overdue):
            return
        self._interrupt_plan("the group of ranks was formed again")
        self.group, self.heat, self.ended_plan = Group(hello.group_id, hello.shape), None, None
        self.planned_par.clear()
        self.plan_problems.clear()
        self.attendance = Attendance(departed_since=self.attendance.departed_since)
        self.without_heat, self.without_decision, self.shedding, self.late = (
            Stall(),
            Stall(),
            Shedding(),
            Late(),
        )
        self.decisions, self.switch_log = Decisions(), SwitchLog()

    def _look_at_clock(self, now: float) -> None:
        ranks = self.connected
        step = self._furthest_step
        completed = self.heat.pending.completed if self.heat is not None and ranks else None
        decided_at = self.decisions.decided_at if self.live is not None else None
        self.without_heat = self.without_heat.after(now, step, completed)
        self.without_decision = self.without_decision.after(now, step, decided_at)
        self.shedding = self.shedding.after(now, {member.rank: member.dropped_steps for member in ranks})
        self._look_for_late_ranks(now, step)
        waiting = self.group is not None and self.group.live is None and bool(ranks)
        self.attendance = self.attendance.after(now, connected=bool(ranks), waiting=waiting)

    def _look_for_late_ranks(self, now: float, step: int) -> None:
        """Note whose heat is two reports or more behind the furthest rank's: ranks make their steps together."""
        late, steps = list[int](), 0
        if self.heat is not None and self.group is not None:
            report = self.shedding.one_in * self.limits.steps_per_report(self.group.shape.ranks)
            late, steps = self.heat.pending.behind(2 * report)
        here = {member.rank for member in self.connected}
        self.late = self.late.after(now, step, [rank for rank in late if rank in here], steps)

    def _expect_heat_of(self, live: DeployedLayout) -> None:
        shape, limits = self._here.shape, self.limits
        if self.heat is None:
            groups_R = self._here.topology.token_groups_R
            steps = limits.window_steps, limits.pending_steps
            self.heat = HeatAssembler(shape, *steps, groups_R, limits.heat_phase)
            if limits.interval is not None and not limits.by_clock:
                pace = Pace(limits.interval, limits.window_steps, limits.interval)
                self.decisions = replace(self.decisions, pace=pace)
        for layer, (epoch, table_RE) in enumerate(zip(live.layer_epochs, live.tables_L, strict=True)):
            self.heat.placements.place(layer, epoch, live.placement.phy2log_LRS[layer], table_RE)

    def _follow_plan(self, rank: int, version: tuple[int, int]) -> None:
        for plan in (self.plan, self.ended_plan):
            after = plan.after_version(rank, version) if plan is not None else None
            if plan is not None and after is not None:
                self._advance(plan, after)
                return

    def _trust_ranks(self, rank: int) -> None:
        """Believe the ranks, of which ``rank`` has reported, where they agree on something else than is known."""
        if self.group is None or self.plan is not None:
            return
        live = self.live
        if live is not None and self.group.members[rank].version == live.version:
            # One that serves what is known: the ranks have not all moved on.
            return
        versions = {member.version for member in self.group.connected}
        if live is None:
            if self.group.moved_on is not None:
                reason = f"rank {self.group.moved_on} has switched since its Hello; say Hello again"
                self.events.append(StreamsOutdated(reason))
        elif len(versions) == 1 and versions != {live.version}:
            ((epoch, _),) = versions
            self.group = self.group.without_live()
            reason = f"the ranks serve epoch {epoch}, the service knew epoch {live.epoch}; say Hello again"
            self.events.append(StreamsOutdated(reason))

    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        """Take ``after`` for ``before``, which is under way or the last plan, and commit what it has switched."""
        if self.plan is before:
            self.plan = after
        elif self.ended_plan is before:
            self.ended_plan = after
        for index in range(before.committed, after.committed):
            epoch, _ = after.versions[index]
            if self.group is not None and self.live is not None and self.live.epoch + 1 == epoch:
                self._commit(self.group, self.live, after, after.decision.layers[index])
        self._close_plan()

    def _commit(self, group: Group, before: DeployedLayout, plan: PlanTracker, update: LayerPlan) -> None:
        live = before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)
        moves = len(update.moves_M5)
        bytes_moved = moves * group.shape.bytes_per_expert
        self.group = replace(group, live=live)
        if self.heat is not None:
            # Not before a rank has reported it: until then another plan may be the one that gets to this epoch.
            self.heat.placements.place(update.layer, live.epoch, update.phy2log_RS, update.log2phy_RE)
        self.planned_par[update.layer] = plan.decision.verdicts[update.layer].par_planned
        self.totals = self.totals.plus(layers_switched=1, experts_moved=moves, bytes_moved=bytes_moved)
        self.events.append(LayerCommitted(update, live, bytes_moved))

    def _interrupt_plan(self, reason: str) -> None:
        if self.plan is not None:
            self.plan = self.plan.interrupted(reason)
            self._close_plan()

    def _close_plan(self) -> None:
        if self.plan is not None and self.plan.outcome is not None:
            self.ended_plan, self.plan = self.plan, None
            done = self.ended_plan.outcome is Outcome.DONE
            self.decisions = self.decisions.plan_ended(done)
            self.events.append(self.ended_plan)
            if not (done or self.ended_plan.was_called_off):
                self._note_problem(self.ended_plan.summary)

    def _note_problem(self, problem: str) -> None:
        if problem not in self.plan_problems:
            self.plan_problems = [*self.plan_problems, problem][-_PROBLEMS_KEPT:]

    def _note(self, rank: int, **changes: Any) -> None:
        """Change fields of a member by its own report."""
        self.group = self._here.with_member(rank, **changes)
