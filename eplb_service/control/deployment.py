"""One deployment as a pure state machine: calls in, events out, no clock, sockets or threads.

The ranks hold the truth about what is installed; everything here follows from what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_service.control.events import Event, LayerCommitted, PlacementKnown, PlanEnded, StreamsOutdated
from eplb_service.control.hello import LONGEST_TEXT, RankHello
from eplb_service.control.live import LivePlacement
from eplb_service.control.plan_life import ContradictionError, Milestone, Offer, PlanLife
from eplb_service.control.rank_list import rank_list
from eplb_service.control.refusal import RefusedError
from eplb_service.control.registration import Group, Member
from eplb_service.heat.batch import HeatBatch
from eplb_service.heat.gather import HeatGatherer
from eplb_service.wire.generated import agent_pb2

_REFUSALS_KEPT = 16


@dataclass(frozen=True)
class Limits:
    """Bounds of a deployment.

    Parameters
    ----------
    window_steps
        Steps that a decision looks at.
    pending_steps
        Steps that the fastest rank's reports may be ahead of the slowest's; also the most steps of one report.
    episode_steps
        Steps summed before a measured peak-to-average ratio is taken, as the planner sums them.
    plan_timeout
        Seconds of silence that end a plan.
    """

    window_steps: int
    pending_steps: int
    episode_steps: int
    plan_timeout: float


@dataclass
class Totals:
    """What a deployment has been through, over all its groups."""

    layers_switched: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    steps_received: int = 0
    steps_lost: int = 0


@dataclass
class Deployment:
    """One served model instance.

    Parameters
    ----------
    name
        As its agents say it.
    limits
        Its bounds.

    The other fields are its state, for reading: ``plan`` is the one under way, ``ended_plan`` the one before;
    ``planned_par`` holds what each switched layer's plan promised; ``refused`` the last words to ranks turned away.
    """

    name: str
    limits: Limits
    paused: bool = False
    last_decision: str = ""
    contradiction: str = ""
    totals: Totals = field(default_factory=Totals)
    group: Group | None = None
    heat: HeatGatherer | None = None
    plan: PlanLife | None = None
    ended_plan: PlanLife | None = None
    planned_par: dict[int, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _decided_at: int = 0

    @property
    def live(self) -> LivePlacement | None:
        """What is served, once all ranks have told."""
        return self.group.live if self.group else None

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is alive."""
        return self.group.connected if self.group else []

    # Ranks come and go

    def hello(self, hello: RankHello) -> list[Event]:
        """A rank introduces itself; raises ``RefusedError`` where it cannot be taken in."""
        events = self._make_way_for(hello)
        assert self.group is not None
        events += self._follow_plan(hello.rank, hello.version)
        try:
            changed = self.group.join(hello)
        except RefusedError as error:
            self.refused[hello.rank] = error.message
            for rank in list(self.refused)[:-_REFUSALS_KEPT]:
                del self.refused[rank]
            raise
        self.refused.pop(hello.rank, None)
        if self.group.live is None:
            return events + self._interrupt_plan("the ranks moved on while the service could not hear them")
        if changed:
            self._expect_heat_of(self.group.live)
            events.append(PlacementKnown(self.group.live))
        return events

    def leave(self, rank: int) -> None:
        """The rank's stream has ended."""
        if self.group is not None:
            self.group.leave(rank)

    # What ranks tell

    def heartbeat(self, rank: int, message: agent_pb2.Heartbeat) -> list[Event]:
        """A rank is alive and serves what it says."""
        member = self._member(rank)
        member.step, member.error = message.step, message.error[:LONGEST_TEXT]
        member.epoch, member.digest = message.epoch, message.digest
        return self._follow_plan(rank, member.version) + self._give_way_to_ranks()

    def plan_status(self, rank: int, status: agent_pb2.PlanStatus, now: float) -> list[Event]:
        """A rank's word about a plan; one about a plan before the last is of no use any more."""
        member = self._member(rank)
        member.step = max(member.step, status.step)
        if status.epoch > member.epoch:
            member.epoch, member.digest = status.epoch, status.digest
        for life in (self.plan, self.ended_plan):
            if life is not None and life.offer.plan_id == status.plan_id:
                try:
                    return self._advance(life, life.hear(rank, status, now))
                except ContradictionError as error:
                    self.contradiction = str(error)
        return []

    def heat_batch(self, rank: int, batch: HeatBatch) -> int:
        """A rank's counts; returns how many steps they completed."""
        if self.heat is None:
            return 0
        member = self._member(rank)
        member.step = max(member.step, batch.first_step + batch.steps)
        received, lost = self.heat.received, self.heat.lost
        completed = self.heat.add(rank, batch)
        self.totals.steps_received += self.heat.received - received
        self.totals.steps_lost += self.heat.lost - lost
        return completed

    # Decisions

    def obstacle(self) -> str | None:
        """Why no decision can be made now, in words, or ``None``."""
        if self.group is None or self.live is None or self.heat is None:
            return "not all ranks have said what they serve"
        if self.paused:
            return "planning is paused"
        if self.plan is not None:
            return f"plan {self.plan.offer.plan_id} is under way"
        if self.group.missing:
            return f"{rank_list(self.group.missing)} not connected"
        halted = [member.rank for member in self.connected if member.error]
        if halted:
            return f"{rank_list(halted)} no longer takes part"
        if self.group.out_of_step:
            return f"{rank_list(self.group.out_of_step)} not at epoch {self.live.epoch}"
        return None if self.heat.steps else "no heat has been gathered yet"

    def is_due(self, interval: int) -> bool:
        """Whether ``interval`` steps have been gathered since the last decision, and one can be made."""
        gathered = self.heat.assembled - self._decided_at if self.heat else 0
        return gathered >= interval and self.obstacle() is None

    def deciding(self) -> None:
        """A decision is being made on the window as it is now."""
        self._decided_at = self.heat.assembled if self.heat else 0

    def offer(self, offer: Offer, now: float) -> None:
        """A plan is about to be sent to all ranks."""
        assert self.group is not None
        assert self.heat is not None
        for milestone in offer.milestones:
            self.heat.place(milestone.update.layer, milestone.epoch, milestone.update.phy2log_RS)
        self.contradiction = ""
        self.plan = PlanLife(offer, self.group.shape.ranks, now)

    def tick(self, now: float) -> list[Event]:
        """Time has passed."""
        if self.plan is None:
            return []
        self.plan.tick(now, self.limits.plan_timeout)
        return self._close_plan()

    # Transitions

    def _make_way_for(self, hello: RankHello) -> list[Event]:
        if self.group is not None and not self.group.yields_to(hello):
            return []
        events = self._interrupt_plan("the group of ranks was formed anew")
        self.group, self.heat, self.ended_plan = Group(hello), None, None
        self.planned_par.clear()
        self.refused.clear()
        self.contradiction, self._decided_at = "", 0
        return events

    def _expect_heat_of(self, live: LivePlacement) -> None:
        assert self.group is not None
        shape = self.group.shape
        if self.heat is None:
            self.heat = HeatGatherer(
                shape.ranks, shape.layers, shape.experts, self.limits.window_steps, self.limits.pending_steps
            )
        for layer, epoch in enumerate(live.layer_epochs):
            self.heat.place(layer, epoch, live.placement.phy2log_LRS[layer])

    def _follow_plan(self, rank: int, version: tuple[int, int]) -> list[Event]:
        if self.live is None:
            return []
        for life in (self.plan, self.ended_plan):
            reached = life.sees(rank, *version) if life is not None else None
            if life is not None and reached is not None:
                return self._advance(life, reached)
        return []

    def _give_way_to_ranks(self) -> list[Event]:
        live = self.live
        if live is None or self.group is None or self.plan is not None:
            return []
        versions = {member.version for member in self.group.connected}
        if len(versions) != 1 or versions == {(live.epoch, live.digest)}:
            return []
        self.group.forget_live()
        ((epoch, _),) = versions
        return [
            StreamsOutdated(
                f"the ranks serve epoch {epoch}, the service knew epoch {live.epoch}; say Hello again"
            )
        ]

    def _advance(self, life: PlanLife, reached: list[Milestone]) -> list[Event]:
        events: list[Event] = []
        for milestone in reached:
            if self.group is None or self.group.live is None or self.group.live.epoch + 1 != milestone.epoch:
                continue
            update = milestone.update
            live = self.group.live.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)
            self.group.live = live
            self.planned_par[update.layer] = life.offer.decision.verdicts[update.layer].par_planned
            bytes_moved = len(update.moves_M5) * self.group.shape.bytes_per_expert
            self.totals.layers_switched += 1
            self.totals.experts_moved += len(update.moves_M5)
            self.totals.bytes_moved += bytes_moved
            events.append(LayerCommitted(life.offer.plan_id, update, live, bytes_moved))
        return events + self._close_plan()

    def _interrupt_plan(self, reason: str) -> list[Event]:
        if self.plan is None:
            return []
        self.plan.interrupt(reason)
        return self._close_plan()

    def _close_plan(self) -> list[Event]:
        if self.plan is None or self.plan.outcome is None:
            return []
        self.ended_plan, self.plan = self.plan, None
        return [PlanEnded(self.ended_plan)]

    def _member(self, rank: int) -> Member:
        assert self.group is not None
        return self.group.members[rank]
