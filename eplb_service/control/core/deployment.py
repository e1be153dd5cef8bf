"""One deployment as a pure state machine: calls in, events out, no clock, sockets or threads.

The ranks hold the truth about what is installed; everything here follows from what they say. Events gather until
``take_events``, so that none is lost where a call ends in a refusal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eplb_service.control.core.assembly import Assembly
from eplb_service.control.core.decisions import Decisions
from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.core.events import Event, LayerCommitted, PlacementKnown, PlanEnded, StreamsOutdated
from eplb_service.control.core.first_layout import FirstLayout
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.membership import Group, Member
from eplb_service.control.core.offer import Offer
from eplb_service.control.core.patience import NOWHERE
from eplb_service.control.core.plan_tracker import ContradictionError, Outcome, PlanTracker
from eplb_service.control.core.watches import Watches
from eplb_service.heat.assembler import HeatAssembler, StepCounts
from eplb_service.planner.counterfactual import Counterfactual
from eplb_service.planner.move_price import MovePrice
from eplb_service.planner.outlook import Outlook
from eplb_service.planner.plan import LayerPlan
from eplb_service.planner.switch_log import SwitchLog
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.hello import Hello
from eplb_service.wire.status import Heartbeat, PlanStatus

_PROBLEMS_KEPT = 8


class Deployment(DeploymentState):
    """One served model instance: what ranks, operators and the clock do to what is known of it."""

    def __post_init__(self) -> None:
        if self.group is None:
            self.watches = Watches(report_size=self.limits.report_size)

    def take_events(self) -> list[Event]:
        """What has happened since the last time, in order."""
        events, self.events = self.events, []
        return events

    # Ranks come and go

    def hello(self, hello: Hello, assembly: Assembly | None = None) -> None:
        """A rank introduces itself; raises ``RefusedError`` where it cannot be taken in.

        An ``assembly`` is used where it is of the ranks that are here by now; otherwise it is made here.
        """
        self._make_way_for(hello)
        assert self.group is not None
        self._follow_plan(hello.rank, hello.version)
        before = self.group.live
        try:
            self.group = self.group.joined(hello, assembly)
        except RefusedError as error:
            self.attendance = self.attendance.turned_away(hello.rank, str(error))
            raise
        self.attendance = self.attendance.taken_in(hello.rank)
        if self.group.live is None:
            self._interrupt_plan("the ranks moved on while the service could not hear them")
        elif self.group.live is not before:
            self._expect_heat_of(self.group.live)
            if self.found is None:
                self.first_layout = FirstLayout(hello.group_id, self.group.live.serving)
            self.known = True
            self.events.append(PlacementKnown(self.group.live))

    def leave(self, rank: int) -> None:
        """The rank's stream has ended."""
        if self.group is not None:
            self.group = self.group.left(rank)

    def rest(self) -> None:
        """Nobody is connected: give back the memory; the ranks bring what they serve when they return."""
        assert not self.connected
        self._interrupt_plan("the ranks went away")
        self.group = self.heat = self.ended_plan = None
        self.decisions = replace(self.decisions, pacing=None)

    # What ranks report

    def heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """A rank is alive and serves what it reports."""
        version = heartbeat.epoch, heartbeat.digest
        reported = ("step", "error", "epoch", "digest", "staging_bytes", "ring_bytes")
        self._note(rank, **{name: getattr(heartbeat, name) for name in reported})
        self._follow_plan(rank, version)
        self._give_way_to_ranks(rank)

    def plan_status(self, rank: int, status: PlanStatus, now: float) -> None:
        """A rank reports on a plan; what it reports on one before the last is of no use any more."""
        member = self._member(rank)
        self._note(rank, step=max(member.step, status.step))
        if status.epoch > member.epoch:
            self._note(rank, epoch=status.epoch, digest=status.digest)
        for plan in (self.plan, self.ended_plan):
            if plan is not None and plan.offer.plan_id == status.plan_id:
                try:
                    self._advance(plan, plan.after_status(rank, status, now))
                except ContradictionError as error:
                    self._note_problem(str(error))
        self.switch_log.heard(rank, status, now)
        self._give_way_to_ranks(rank)

    def outrun_by(self, rank: int, report: HeatReport) -> int | None:
        """How far slower ranks are, where a rank's counts come so far ahead of them that steps would be lost.

        Before all ranks have come none has got anywhere. ``None`` where no step would be lost.
        """
        return NOWHERE if self.heat is None else self.heat.outrun_by(rank, report)

    def heat_report(self, rank: int, report: HeatReport) -> StepCounts:
        """A rank's counts; returns how many steps they completed, and how many are lost since.

        Steps that are whole enter the window by ``put_together``.
        """
        if self.heat is None:
            return StepCounts(0, 0)
        member = self._member(rank)
        step = max(member.step, report.first_step + report.steps)
        self._note(rank, step=step, dropped_steps=report.dropped_steps)
        self.watches = self.watches.after_report(report)
        gained = self.heat.take(rank, report)
        if any(gained):
            self.totals = self.totals.plus(steps_received=gained.received, steps_lost=gained.lost)
        return gained

    def put_together(self, most: int | None = None) -> bool:
        """Let at most so many whole steps enter the window, or all; whether more of them wait."""
        if self.heat is None or not self.heat.waiting:
            return False
        before = self.heat.assembled
        self.heat.put_together(most)
        if self.decisions.pacing is not None and self.live is not None:
            par_TL = self.heat.newest_par(before, self.live.layer_epochs)
            self.decisions = self.decisions.after_steps(par_TL)
        return self.heat.waiting > 0

    # Decisions

    def beginning(self, problem: str = "") -> None:
        """The first plan is being made by a prior, or cannot be for ``problem``; later ones are due all the same."""
        self.decisions = self.decisions.beginning()
        if problem:
            self._note_problem(problem)

    def deciding(self) -> None:
        """A decision is being made on the window as it is now."""
        self.plan_problems.clear()
        self.decisions = self.decisions.deciding(self.assembled)
        if self.heat is not None:
            self.switch_log.looked_at(*self.heat.timed_steps())

    def priced(self, price: MovePrice | None) -> None:
        """The decision's moves were priced; ``None`` where it solved nothing."""
        self.decisions = self.decisions.priced(price)

    def decided(self, outlook: Outlook, *, changed: bool) -> None:
        """The decision was made: it leaves all as it is, or a plan of it is about to be offered."""
        if self.live is not None:
            self.decisions = self.decisions.decided(outlook, self.live, changed=changed)

    def appraised(self, worth: Counterfactual) -> None:
        """What balancing is worth has been judged by the last decision's steps."""
        self.decisions = self.decisions.appraised(worth)

    def offer(self, offer: Offer, now: float) -> None:
        """A plan is about to be sent to all ranks."""
        assert self.group is not None
        self.plan = PlanTracker.of(offer, self.group.shape.ranks, now)
        self.switch_log.offered(offer.plan_id, offer.decision.layers, self.group.shape.ranks, now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.plan is not None:
            self.plan = self.plan.after_time(now, self.limits.plan_timeout)
            self._close_plan()
        self._look_at_clock(now)
        if self.group is not None and self.group.live is None and not self.group.missing:
            # Nobody is still to come, so nothing would ever change: a stream that was to end has not.
            reason = "all ranks are here, but not all have reported what they serve since; say Hello again"
            self.events.append(StreamsOutdated(reason))

    # Transitions

    def _make_way_for(self, hello: Hello) -> None:
        if self.group is not None and not self.group.yields_to(hello, self.attendance.forming_overdue):
            return
        self._interrupt_plan("the group of ranks was formed again")
        self.group, self.heat, self.ended_plan = Group(hello.group_id, hello.shape), None, None
        self.planned_par.clear()
        self.attendance = self.attendance.formed_again()
        self.plan_problems.clear()
        self.watches = Watches(report_size=self.limits.report_size)
        self.decisions, self.switch_log = Decisions(), SwitchLog()

    def _look_at_clock(self, now: float) -> None:
        """What only time shows: of heat and decisions, refusals that were not repeated, ranks that wait in vain."""
        ranks, counted = self.connected, self.heat.counted if self.heat is not None else None
        decided_at = self.decisions.decided_at
        self.watches = self.watches.after(now, ranks, counted, decided_at, self.live is not None)
        waiting = self.group is not None and self.group.live is None and bool(ranks)
        self.attendance = self.attendance.after(now, connected=bool(ranks), waiting=waiting)

    def _expect_heat_of(self, live: LivePlacement) -> None:
        assert self.group is not None
        shape = self.group.shape
        if self.heat is None:
            self.heat = HeatAssembler(
                shape.ranks,
                shape.layers,
                shape.experts,
                shape.slots,
                self.limits.window_steps,
                self.limits.pending_steps,
                self.group.topology.token_groups_R,
            )
            self.decisions = self.decisions.expecting_heat(self.limits)
        for layer, (epoch, placed) in enumerate(zip(live.layer_epochs, live.placed_L, strict=True)):
            self.heat.placements.put(layer, epoch, placed)

    def _follow_plan(self, rank: int, version: tuple[int, int]) -> None:
        for plan in (self.plan, self.ended_plan):
            after = plan.after_version(rank, version) if plan is not None else None
            if plan is not None and after is not None:
                self._advance(plan, after)
                return

    def _give_way_to_ranks(self, rank: int) -> None:
        """``rank`` has reported; where the ranks agree on something else than is known, they are right."""
        if self.group is None or self.plan is not None:
            return
        live = self.live
        if live is not None and self._member(rank).version == (live.epoch, live.digest):
            # One that serves what is known: the ranks have not all moved on.
            return
        versions = {member.version for member in self.group.connected}
        if live is None:
            if self.group.moved_on is not None:
                reason = f"rank {self.group.moved_on} has switched since its Hello; say Hello again"
                self.events.append(StreamsOutdated(reason))
        elif len(versions) == 1 and versions != {(live.epoch, live.digest)}:
            ((epoch, _),) = versions
            self.group = self.group.without_live()
            reason = f"the ranks serve epoch {epoch}, the service knew epoch {live.epoch}; say Hello again"
            self.events.append(StreamsOutdated(reason))

    def _advance(self, before: PlanTracker, after: PlanTracker) -> None:
        """The plan under way, or the one before it, is further than it was."""
        if self.plan is before:
            self.plan = after
        elif self.ended_plan is before:
            self.ended_plan = after
        for milestone in after.offer.milestones[before.committed : after.committed]:
            if self.group is not None and self.live is not None and self.live.epoch + 1 == milestone.epoch:
                self._commit(self.group, self.live, after, milestone.update)
        self._close_plan()

    def _commit(self, group: Group, before: LivePlacement, plan: PlanTracker, update: LayerPlan) -> None:
        live = before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)
        moves = len(update.moves_M5)
        bytes_moved = moves * group.shape.bytes_per_expert
        self.group = replace(group, live=live)
        if self.heat is not None:
            # Not before a rank has reported it: until then another plan may be the one that gets to this epoch. What is
            # counted from here on a rank reports after the switch.
            self.heat.placements.place(update.layer, live.epoch, update.phy2log_RS, update.log2phy_RE)
        self.planned_par[update.layer] = plan.offer.decision.verdicts[update.layer].par_planned
        self.totals = self.totals.plus(layers_switched=1, experts_moved=moves, bytes_moved=bytes_moved)
        self.events.append(LayerCommitted(plan.offer.plan_id, update, live, bytes_moved))

    def _interrupt_plan(self, reason: str) -> None:
        if self.plan is not None:
            self.plan = self.plan.interrupted(reason)
            self._close_plan()

    def _close_plan(self) -> None:
        if self.plan is not None and self.plan.outcome is not None:
            self.ended_plan, self.plan = self.plan, None
            done = self.ended_plan.outcome is Outcome.DONE
            self.decisions = self.decisions.plan_ended(done)
            self.events.append(PlanEnded(self.ended_plan))
            if not done:
                self._note_problem(self.ended_plan.summary)

    def _note_problem(self, problem: str) -> None:
        if problem not in self.plan_problems:
            self.plan_problems = [*self.plan_problems, problem][-_PROBLEMS_KEPT:]

    def _member(self, rank: int) -> Member:
        assert self.group is not None
        return self.group.members[rank]

    def _note(self, rank: int, **changes: Any) -> None:
        """What a rank has reported of itself."""
        assert self.group is not None
        self.group = self.group.with_member(rank, **changes)
