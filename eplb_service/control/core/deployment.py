"""One deployment as a state machine: calls in, events out. It uses no clock, sockets or threads.

The ranks are authoritative for their layout, so this state is derived from their messages. Events accumulate until
``process_events`` is called, and none is lost if a call raises a rejection.

Only the methods of ``Deployment`` change its state. Other modules read its fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from eplb_core.heat.assembler import HeatAssembler, StepCounts
from eplb_core.placement import Float64
from eplb_core.planner.counterfactual import TimePrice
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import LayerPlan, Layout, Outlook
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.switch_log import SwitchLog
from eplb_core.planner.verdicts import MovePrice, Worth
from eplb_core.wire.agent import Heartbeat, Hello, PlanStatus
from eplb_core.wire.heat import HeatReport
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import ConflictError, RejectedError
from eplb_service.control.core.flow import LATE_SECONDS, LateRanks, Limits, Shedding, Stall
from eplb_service.control.core.group import AssembledLayout, Attendance, Group, Member, rank_list
from eplb_service.control.core.leader import clock_of
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker

_MAX_PROBLEMS = 8
"""Maximum number of plan problems that are kept."""
_STEPS_PER_COMPLETE_STEP = 8
"""While a rank's heat is late, a decision requires at least one in this many steps to be complete."""
_LATE_REPORTS = 2
"""Number of reports by which a rank may lag behind the rank furthest ahead before its heat counts as late."""
_MAX_TOTAL = 1 << 62
"""Upper bound on each total, so that stored and sent values fit into 64 bits regardless of the ranks' reports."""


@dataclass(frozen=True)
class Totals:
    """Totals over all groups of a deployment (immutable).

    Parameters
    ----------
    layers_switched
        Number of committed layers.
    experts_moved
        Number of moves in committed layers.
    bytes_moved
        Bytes transferred by these moves.
    steps_received
        Number of steps that all ranks have reported.
    steps_lost
        Number of steps that at least one rank did not report in time.
    """

    layers_switched: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    steps_received: int = 0
    steps_lost: int = 0

    def plus(self, **gains: int) -> Totals:
        """Return the totals after adding ``gains``, keyed by field name. Each total is capped at ``_MAX_TOTAL``."""
        return replace(
            self, **{name: min(getattr(self, name) + gain, _MAX_TOTAL) for name, gain in gains.items()}
        )


@dataclass(frozen=True)
class LayerCommitted:
    """Event: the ranks have committed one layer of a plan.

    Parameters
    ----------
    update
        The committed layer.
    live
        Layout of the deployment after the commit.
    bytes_moved
        Bytes transferred for the layer.
    """

    update: LayerPlan
    live: DeployedLayout
    bytes_moved: int


@dataclass(frozen=True)
class StreamsOutdated:
    """Event: the ranks' layout is unknown, so the service must end their streams to make each rank send a new Hello.

    Parameters
    ----------
    reason
        Reason to send to the ranks.
    """

    reason: str


Event: TypeAlias = DeployedLayout | LayerCommitted | PlanTracker | StreamsOutdated
"""Change that the service must act on. A ``DeployedLayout`` means that all ranks of a group have connected and agree on
this layout. A ``PlanTracker`` means that this plan has ended."""


@dataclass
class Deployment:
    """State of one served model instance, updated by ranks, operators and the clock.

    Parameters
    ----------
    name
        Name of the deployment, as its agents report it.
    limits
        Limits of the deployment.
    paused
        True if an operator has paused planning.
    leader_term
        Leader term of this service for the deployment.
    last_decision
        Result of the last decision in one line, for operators.
    totals
        Totals over all groups.
    group
        Current group; ``None`` before a rank connects and after ``rest``.
    heat
        Heat of the group's recent steps; ``None`` until the layout is known.
    plan
        Plan in progress; ``None`` if there is none.
    ended_plan
        Most recent plan that has ended.
    planned_par
        PAR promised for each switched layer by the plan that switched it, keyed by layer.
    attendance
        Rejected ranks, and how long ranks have been waiting or disconnected.
    known
        True once all ranks of some group have connected and agreed on a layout.
    plan_problems
        Latest problems with plans since the last decision began.
    heat_stall
        Time elapsed and steps run since a step was last completed.
    decision_stall
        Time elapsed and steps run since the last decision.
    shedding
        Fraction of its heat that each rank reports.
    late
        Connected ranks whose heat is late.
    service_problems
        Service-wide problems, which affect all deployments.
    session
        State of the decisions for the current group.
    stored_initial_layout
        Group id and initial layout of the current group or an earlier one; ``None`` before the first group. It is
        restored when the service restarts.
    switch_log
        Durations of switches, as measured by the ranks of the current group.
    events
        Events since the last call to ``process_events``.
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
    heat_stall: Stall = field(default_factory=Stall)
    decision_stall: Stall = field(default_factory=Stall)
    shedding: Shedding = field(default_factory=Shedding)
    late: LateRanks = field(default_factory=LateRanks)
    service_problems: tuple[str, ...] = ()
    session: DecisionSession = field(default_factory=DecisionSession)
    stored_initial_layout: tuple[str, Layout] | None = None
    switch_log: SwitchLog = field(default_factory=SwitchLog)
    events: list[Event] = field(default_factory=list)

    def process_events(self) -> list[Event]:
        """Return the events since the last call, in order, and clear them."""
        events = self.events
        self.events = []
        return events

    # Derived state

    @property
    def _current_group(self) -> Group:
        """Current group. At least one rank must have connected."""
        assert self.group is not None
        return self.group

    @property
    def live(self) -> DeployedLayout | None:
        """Current layout; ``None`` until all ranks have reported it."""
        return self.group.live if self.group else None

    @property
    def initial_layout(self) -> Layout | None:
        """Initial layout of the current group, which is the baseline of all gains; ``None`` if it is unknown."""
        if self.group is None or self.stored_initial_layout is None:
            return None
        group_id, layout = self.stored_initial_layout
        return layout if self.group.group_id == group_id else None

    @property
    def has_planned(self) -> bool:
        """True once a plan has been offered to the ranks. The deployment is then never evicted for a new one."""
        return bool(self.totals.layers_switched) or self.plan is not None or self.ended_plan is not None

    @property
    def assembled(self) -> int:
        """Number of steps that have entered the window so far."""
        return self.heat.assembled if self.heat is not None else 0

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is open."""
        return self.group.connected if self.group else []

    @property
    def observed(self) -> bool:
        """True if the agents only observe, so that no decision is made for the deployment."""
        return self.group is not None and self.group.shape.observed

    @property
    def _furthest_step(self) -> int:
        """Highest step of any connected rank."""
        return max((member.step for member in self.connected), default=0)

    def renews(self, hello: Hello) -> bool:
        """Return True if ``hello`` comes from a rank of the current group, so that its new stream replaces the old one.

        Only ranks of the group know its id, and each rank has one agent. An older stream for the same rank is therefore
        dead, or did not come from the rank.
        """
        return self.group is not None and self.group.forming == (hello.group_id, hello.shape)

    @property
    def outdated(self) -> str | None:
        """Reason why the ranks would reject every plan; ``None`` if they would not.

        They reject plans whose leader term is lower than the highest one that they have followed.
        """
        highest_term = self.group.highest_term if self.group is not None else 0
        if highest_term <= self.leader_term:
            return None
        return (
            f"leader term {self.leader_term} is lower than {highest_term}, which ranks have followed: according to "
            f"the services' own clocks, the service with term {highest_term} started at {clock_of(highest_term)} and "
            f"this one at {clock_of(self.leader_term)}"
        )

    def obstacle(self, *, needs_heat: bool = True) -> str | None:
        """Return the reason why no decision can be made now, or ``None`` if one can.

        Parameters
        ----------
        needs_heat
            False for a decision from a prior, which uses recorded heat instead of the group's own.
        """
        if self.group is None or self.live is None or self.heat is None:
            return "not all ranks have reported their layout"
        if self.observed:
            return "its agents do not accept plans (EPLB_AGENT_MODE is observe or policy)"
        if self.paused:
            return "planning is paused"
        if self.plan is not None:
            state = "being called off" if self.plan.called_off else "under way"
            return f"plan {self.plan.plan_id} is {state}"
        if self.outdated is not None:
            return self.outdated
        if self.group.missing:
            return f"waiting for {rank_list(self.group.missing)} to connect"
        halted_ranks = [member.rank for member in self.connected if member.error]
        if halted_ranks:
            return f"balancing is halted on {rank_list(halted_ranks)}"
        if self.group.out_of_step:
            return f"waiting for {rank_list(self.group.out_of_step)} to reach epoch {self.live.epoch}"
        return None if self.heat.steps or not needs_heat else "no heat has been gathered yet"

    @property
    def may_begin(self) -> bool:
        """True if a first plan can be made from a prior: no layer has switched and no decision has begun."""
        is_initial = self.live is not None and self.live.epoch == 0
        return is_initial and not self.session.has_begun and self.obstacle(needs_heat=False) is None

    def is_due(self, interval: int) -> bool:
        """Return True if a decision is due and can be made.

        A decision does not wait for a late rank once the ranks have run ``interval`` steps since the last one. It then
        uses the steps that are complete.

        Parameters
        ----------
        interval
            Number of steps between decisions at fixed intervals; also the maximum number of steps to wait for a late
            rank.
        """
        due = self.session.is_due(self.assembled, interval)
        late_ranks, _ = self.late.for_seconds(LATE_SECONDS)
        if not due and late_ranks:
            complete_steps = self.assembled - self.session.decided_at
            enough_complete = interval <= _STEPS_PER_COMPLETE_STEP * complete_steps
            due = self.decision_stall.steps >= interval and enough_complete
        return due and self.obstacle() is None

    # Commands from the service and its operators

    def restore(self, *, leader_term: int, paused: bool, last_decision: str, totals: Totals) -> None:
        """Restore the state that an earlier run of the service stored.

        Parameters
        ----------
        leader_term
            Leader term of this service for the deployment.
        paused
            True if an operator had paused planning.
        last_decision
            Result of the last decision.
        totals
            Totals over all groups.
        """
        self.leader_term = leader_term
        self.paused = paused
        self.last_decision = last_decision
        self.totals = totals
        self.known = True

    def restore_initial_layout(self, initial_layout: tuple[str, Layout] | None) -> None:
        """Restore the group id and initial layout of the last stored group; ``None`` if no group was stored."""
        self.stored_initial_layout = initial_layout

    def set_paused(self, paused: bool) -> None:
        """Pause or resume planning."""
        self.paused = paused

    def lead_with(self, leader_term: int) -> None:
        """Change this service's leader term, so that the ranks follow this service instead of a different one."""
        self.leader_term = leader_term

    def report_service_problems(self, problems: Iterable[str]) -> None:
        """Replace the list of service-wide problems, which affect all deployments."""
        self.service_problems = tuple(problems)

    # Connections

    def hello(self, hello: Hello, assembled: AssembledLayout | None = None) -> None:
        """Connect a rank.

        Raises ``RejectedError`` if the rank does not fit the group.

        Parameters
        ----------
        hello
            Hello of the rank.
        assembled
            Layout that was assembled in advance as if this Hello were the last one needed; see ``Group.with_hello``.
        """
        try:
            self._replace_group(hello)
            layout_before = self.live
            self._follow_plan(hello.rank, hello.version)
            self.group = self._current_group.with_hello(hello, assembled)
        except RejectedError as error:
            self.attendance = self.attendance.with_rejection(hello.rank, str(error))
            raise
        self.attendance = self.attendance.without_rejection(hello.rank)
        self.shedding = self.shedding.joined(hello.rank)
        layout = self.group.live
        if layout is None:
            self._interrupt_plan("the ranks changed their layout while they were disconnected")
        elif layout is not layout_before:
            self._expect_heat_of(layout)
            if self.initial_layout is None:
                self.stored_initial_layout = hello.group_id, layout.serving
            self.known = True
            self.events.append(layout)

    def leave(self, rank: int) -> None:
        """Record that a rank has disconnected."""
        if self.group is not None:
            self.group = self.group.without_stream(rank)

    def rest(self) -> None:
        """Free memory while no rank is connected. The ranks report their layout again when they reconnect."""
        assert not self.connected
        self._interrupt_plan("all ranks disconnected")
        self.group = None
        self.heat = None
        self.ended_plan = None
        self.session = self.session.without_expectations()

    # Reports from the ranks

    def heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Record the state that a rank reports."""
        names = ("step", "error", "epoch", "digest", "staging_bytes", "ring_bytes")
        self._update_member(rank, **{name: getattr(heartbeat, name) for name in names})
        self._follow_plan(rank, (heartbeat.epoch, heartbeat.digest))
        self._trust_ranks(rank)

    def plan_status(self, rank: int, status: PlanStatus, now: float) -> None:
        """Record a rank's report on the plan in progress or on the most recent one that has ended.

        Reports on older plans only update the rank's step and version.

        Parameters
        ----------
        rank
            Rank that sent the report.
        status
            Outcome of the plan, or of one of its layers, on the rank.
        now
            Current time, in seconds.
        """
        member = self._current_group.members[rank]
        self._update_member(rank, step=max(member.step, status.step))
        if status.epoch > member.epoch:
            self._update_member(rank, epoch=status.epoch, digest=status.digest)
        for plan in (self.plan, self.ended_plan):
            if plan is not None and plan.plan_id == status.plan_id:
                try:
                    self._advance(plan, plan.after_status(rank, status, now))
                except ConflictError as error:
                    self._record_problem(str(error))
        self.switch_log.heard(rank, status, now)
        self._trust_ranks(rank)

    def is_ahead(self, rank: int, report: HeatReport) -> bool:
        """Return True if a rank's report is so far ahead of slower ranks that accepting it would drop steps.

        This includes a report under a layout that other ranks have not yet confirmed with a Hello.
        """
        if self.heat is None or (self.live is None and not self.heat.placements.knows(report.layer_epochs)):
            return True
        return self.heat.pending.is_ahead(rank, report)

    def heat_report(self, rank: int, report: HeatReport) -> StepCounts:
        """Process a rank's heat report.

        Returns the number of steps that the report completed and the number of steps that are lost because of it. The
        completed steps remain pending until ``assemble_steps`` is called.
        """
        if self.heat is None:
            return StepCounts(0, 0)
        step = max(self._current_group.members[rank].step, report.first_step + report.steps)
        self._update_member(rank, step=step, dropped_steps=report.dropped_steps)
        # Assemble all complete steps here, where they are tested for a change. Otherwise, ``heat.take`` would move them
        # into the window without the test.
        while self.assemble_steps():
            pass
        gained = self.heat.take(rank, report)
        if any(gained):
            self.totals = self.totals.plus(steps_received=gained.received, steps_lost=gained.lost)
        return gained

    def assemble_steps(self, max_steps: int | None = None) -> bool:
        """Move complete steps into the window one by one. Return True if more are pending.

        This stops early once a decision is due, so that the decision uses the same steps no matter how many arrive
        together.

        Parameters
        ----------
        max_steps
            Maximum number of steps to move; ``None`` for all.
        """
        if self.heat is None or not self.heat.waiting:
            return False
        for _ in range(self.heat.waiting if max_steps is None else max_steps):
            assembled_before = self.heat.assembled
            self.heat.assemble_steps(1)
            if self.session.pace is not None and self.live is not None:
                par_TL = self._tested_par(self.heat, self.live, assembled_before)
                while len(par_TL):
                    self.session, processed = self.session.after_steps(par_TL)
                    par_TL = par_TL[processed:]
            pace = self.session.pace
            decides = pace is not None and pace.due and self.obstacle() is None
            if not self.heat.waiting or decides or self.may_call_off:
                break
        return self.heat.waiting > 0

    def _tested_par(self, heat: HeatAssembler, live: DeployedLayout, since: int) -> Float64:
        """Return the PAR of the steps after the first ``since`` ones, to be tested for a change in heat.

        While a plan is in progress, PAR is predicted for the placement that the plan leads to, because the measured PAR
        also changes with each layer that switches.
        """
        planned = self.session.planned_split
        if self.plan is None or planned is None:
            return heat.newest_par(since, live.layer_epochs)
        return planned.par_of_steps(heat.newest_heat(since), since)

    # Decisions

    @property
    def may_call_off(self) -> bool:
        """True if the service should check whether the plan in progress is stale."""
        if self.plan is None or self.plan.called_off or self.paused:
            return False
        return self.session.check_is_due(self.plan.committed)

    def begin_check(self) -> None:
        """Begin checking the plan in progress against the current heat."""
        self.session = self.session.begin_check()

    def record_check(self, outlook: Outlook, plan_id: int, now: float) -> bool:
        """Record the result of the check. If the plan is stale and still in progress, call it off and return True.

        Parameters
        ----------
        outlook
            Result of the check.
        plan_id
            Id of the plan that was checked.
        now
            Current time, in seconds.
        """
        self.session, is_stale = self.session.after_check(outlook)
        if not is_stale or self.plan is None or self.plan.plan_id != plan_id or self.plan.called_off:
            return False
        self.call_off("heat changed while the plan was under way", now)
        return True

    def call_off(self, reason: str, now: float) -> None:
        """Call off the plan in progress. The caller is responsible for sending the call-off to the ranks."""
        assert self.plan is not None
        self.plan = self.plan.with_call_off(reason, now)

    def begin_first_plan(self, problem: str = "") -> None:
        """Begin the first plan from a prior, or record the ``problem`` that prevents it.

        In either case, later decisions use the group's own heat.
        """
        self.session = replace(self.session, has_begun=True)
        if problem:
            self._record_problem(problem)

    def begin_decision(self) -> None:
        """Begin a decision on the current window."""
        self.plan_problems.clear()
        self.session = self.session.begin_decision(self.assembled)
        if self.heat is not None:
            self.switch_log.looked_at(self.heat.served_steps())

    def record_decision(self, outlook: Outlook, cost: float, *, changed: bool) -> None:
        """Record a decision.

        Parameters
        ----------
        outlook
            Promise, forecasts and other results of the decision.
        cost
            CPU time of the decision, expressed as the number of steps whose CPU budget pays for it.
        changed
            True if the decision's plan is about to be offered.
        """
        if self.live is not None:
            self.session = self.session.after_decision(outlook, cost, changed=changed)

    def record_last_decision(self, message: str) -> None:
        """Record the result of the last decision in one line, for operators."""
        self.last_decision = message

    def record_move_price(self, price: MovePrice) -> None:
        """Record the move price of the last decision."""
        self.session = replace(self.session, move_price=price)

    def record_time_price(self, price: TimePrice, cost: float) -> None:
        """Record the time price; ``cost`` is the number of steps whose CPU budget pays for the estimate."""
        self.session = self.session.with_time_price(price, cost)

    def record_worth(self, worth: Worth | None) -> None:
        """Record the gain from balancing over the newest steps; ``None`` if it is unknown."""
        self.session = replace(self.session, worth=worth)

    def offer(self, plan: PlanTracker, now: float) -> None:
        """Track a plan that is about to be sent to all ranks."""
        self.plan = replace(plan, heard_at=now, step=self._furthest_step, stepped_at=now)
        self.switch_log.offered(plan.plan_id, plan.decision.layers, self._current_group.shape.ranks, now)

    def tick(self, now: float) -> None:
        """Update all state that depends on the current time ``now``, in seconds."""
        if self.plan is not None:
            step = None if self._current_group.missing else self._furthest_step
            self.plan = self.plan.after_time(now, self.limits.plan_timeout, step)
            self._close_plan()
        self._look_at_clock(now)
        if self.group is not None and self.group.live is None and not self.group.missing:
            # All ranks are connected, but a stream that should have ended is still open. Nothing else would end it.
            reason = (
                "all ranks are connected, but not all have reported their layout again; send another Hello"
            )
            self.events.append(StreamsOutdated(reason))

    # Transitions

    def _replace_group(self, hello: Hello) -> None:
        """Start a new group if there is none, or if the rank's group replaces the current one."""
        if self.group is not None and not self.group.is_replaced_by(hello, self.attendance.is_overdue):
            return
        self._interrupt_plan("the ranks have formed a new group")
        self.group = Group(hello.group_id, hello.shape)
        self.heat = None
        self.ended_plan = None
        self.planned_par.clear()
        self.plan_problems.clear()
        self.attendance = Attendance(empty_since=self.attendance.empty_since)
        self.heat_stall = Stall()
        self.decision_stall = Stall()
        self.shedding = Shedding()
        self.late = LateRanks()
        self.session = DecisionSession()
        self.switch_log = SwitchLog()

    def _look_at_clock(self, now: float) -> None:
        """Update stalls, shedding, late ranks and attendance."""
        members = self.connected
        step = self._furthest_step
        completed = self.heat.pending.completed if self.heat is not None and members else None
        decided_at = self.session.decided_at if self.live is not None else None
        self.heat_stall = self.heat_stall.after(now, step, completed)
        self.decision_stall = self.decision_stall.after(now, step, decided_at)
        self.shedding = self.shedding.after(now, {member.rank: member.dropped_steps for member in members})
        self._update_late_ranks(now, step)
        waiting = self.group is not None and self.group.live is None and bool(members)
        self.attendance = self.attendance.after(now, connected=bool(members), waiting=waiting)

    def _update_late_ranks(self, now: float, step: int) -> None:
        """Record the connected ranks whose heat is late, given that all ranks run each step at about the same time."""
        behind: list[int] = []
        steps = 0
        if self.heat is not None and self.group is not None:
            report_steps = self.shedding.one_in * self.limits.steps_per_report(self.group.shape.ranks)
            behind, steps = self.heat.pending.behind(_LATE_REPORTS * report_steps)
        connected_ranks = {member.rank for member in self.connected}
        late_ranks = [rank for rank in behind if rank in connected_ranks]
        self.late = self.late.after(now, step, late_ranks, steps)

    def _expect_heat_of(self, live: DeployedLayout) -> None:
        """Prepare to assemble heat counted under the layout ``live``."""
        limits = self.limits
        if self.heat is None:
            self.heat = HeatAssembler(
                self._current_group.shape,
                limits.window_steps,
                limits.pending_steps,
                self._current_group.topology.token_groups_R,
                limits.heat_phase,
            )
            if limits.interval is not None and not limits.by_clock:
                pace = Pace(limits.interval, limits.window_steps, limits.interval)
                self.session = replace(self.session, pace=pace)
        for layer, (epoch, table_RE) in enumerate(zip(live.layer_epochs, live.tables_L, strict=True)):
            self.heat.placements.place(layer, epoch, live.placement.phy2log_LRS[layer], table_RE)

    def _follow_plan(self, rank: int, version: tuple[int, int]) -> None:
        """Advance a plan if a rank uses one of the plan's versions."""
        for plan in (self.plan, self.ended_plan):
            after = plan.after_version(rank, version) if plan is not None else None
            if plan is not None and after is not None:
                self._advance(plan, after)
                return

    def _trust_ranks(self, rank: int) -> None:
        """Drop the current layout if all ranks agree on a different version; ``rank`` has just reported."""
        if self.group is None or self.plan is not None:
            return
        live = self.live
        if live is not None and self.group.members[rank].version == live.version:
            # This rank still uses the current layout, so the ranks do not all agree on a different one.
            return
        versions = {member.version for member in self.group.connected}
        if live is None:
            switched_rank = self.group.switched_rank
            if switched_rank is not None:
                reason = f"rank {switched_rank} has switched since its Hello; send another Hello"
                self.events.append(StreamsOutdated(reason))
        elif len(versions) == 1 and versions != {live.version}:
            ((epoch, _),) = versions
            self.group = self.group.without_live()
            reason = f"the ranks are at epoch {epoch}, but the service expected epoch {live.epoch}; send another Hello"
            self.events.append(StreamsOutdated(reason))

    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        """Replace a plan's state ``before`` with ``after`` and record the layers that have switched in between."""
        if self.plan is before:
            self.plan = after
        elif self.ended_plan is before:
            self.ended_plan = after
            if after.committed:
                self.session = replace(self.session, was_called_off_unswitched=False)
        for index in range(before.committed, after.committed):
            epoch, _ = after.versions[index]
            if self.group is not None and self.live is not None and self.live.epoch + 1 == epoch:
                self._commit(self.group, self.live, after, after.decision.layers[index])
        self._close_plan()

    def _commit(self, group: Group, before: DeployedLayout, plan: PlanTracker, update: LayerPlan) -> None:
        """Update the current layout after the commit of one layer.

        Parameters
        ----------
        group
            Current group.
        before
            Current layout.
        plan
            Plan that contains the layer.
        update
            Placement, tables and moves of the layer.
        """
        layout = before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)
        moves = len(update.moves_M5)
        bytes_moved = moves * group.shape.bytes_per_expert
        self.group = replace(group, live=layout)
        if self.heat is not None:
            # Only a rank's report proves which plan led to this epoch, so this cannot be done when the plan is offered.
            self.heat.placements.place(update.layer, layout.epoch, update.phy2log_RS, update.log2phy_RE)
        self.planned_par[update.layer] = plan.decision.verdicts[update.layer].par_planned
        self.totals = self.totals.plus(layers_switched=1, experts_moved=moves, bytes_moved=bytes_moved)
        self.events.append(LayerCommitted(update, layout, bytes_moved))

    def _interrupt_plan(self, reason: str) -> None:
        """End the plan in progress for a reason unrelated to the plan itself."""
        if self.plan is not None:
            self.plan = self.plan.interrupted(reason)
            self._close_plan()

    def _close_plan(self) -> None:
        """Record the outcome of the plan in progress if it has ended."""
        plan = self.plan
        if plan is None or plan.outcome is None:
            return
        self.ended_plan = plan
        self.plan = None
        done = plan.outcome is Outcome.DONE
        self.session = self.session.after_plan(
            done=done, called_off_unswitched=plan.was_called_off and not plan.committed
        )
        self.events.append(plan)
        if not (done or plan.was_called_off):
            self._record_problem(plan.summary)

    def _record_problem(self, problem: str) -> None:
        """Record a problem with a plan. Only the latest distinct problems are kept."""
        if problem not in self.plan_problems:
            self.plan_problems = [*self.plan_problems, problem][-_MAX_PROBLEMS:]

    def _update_member(self, rank: int, **changes: Any) -> None:
        """Change fields of a member according to its own report."""
        self.group = self._current_group.with_member(rank, **changes)
