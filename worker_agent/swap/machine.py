"""The layer switch as a pure state machine: state and event in, state and actions out; no clock, sockets or tensors.

::

    IDLE --offer--> OFFERED --all hold it--> TRANSFERRING --all bytes here--> READY --all ready--> commit, next part
                       |                          |                            |
                       +------ any rank votes abort, or a deadline passes -----+--> IDLE, old placement stays
                       +------ the service has called off the plan, and no rank transfers --> IDLE

Ranks switch a plan in parts: consecutive layers, as many as fit in staging, that they transfer together and commit with
one vote.

Two rules keep the ranks together. A rank moves from OFFERED to TRANSFERRING, moves on to the next part, commits or
aborts only on the outcome of a vote, never on its own. A wish to abort waits for the next ballot, so that a rank that
has voted READY stays committed to it until it knows the outcome of that vote.

A vote is one integer all-reduce with MIN. Every field also travels negated, so that one reduction gives minimum and
maximum: two equal bounds mean that all ranks voted the same. The decision is a function of the outcome alone, and the
outcome is the same on all ranks; that is what makes ranks act together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from eplb_core.placement import part_end
from eplb_core.wire.agent import PlanState, PlanStatus
from eplb_core.wire.plan import RankLayer, RankPlan
from worker_agent.swap.rank_layout import RankLayout

BALLOT_WIDTH = 10
"""Integers in one ballot on the wire."""


class Progress(enum.IntEnum):
    """Progress of a rank with the current part of its plan."""

    IDLE = 0
    OFFERED = 1
    TRANSFERRING = 2
    READY = 3


class VoteResult(enum.Enum):
    """Decision of a vote, which all ranks carry out at this step boundary."""

    NOTHING = "nothing"
    START = "start the transfer of the plan's next part"
    COMMIT = "commit the part"
    ABORT = "drop the plan"
    CALL_OFF = "drop the plan at the service's request"
    REALIGN = "drop the plan and vote again at a common forward pass: the ranks count different ones"
    DIVERGED = "serve no more: the ranks serve different placements"


@dataclass(frozen=True)
class Ballot:
    """One rank's vote.

    ``plan`` is the digest of the plan that it holds, 0 for none; ``installed`` fingerprints what it serves; ``forward``
    is the forward pass after which, by this rank's count, the vote was due. ``called_off`` is True if the service
    has called off that plan.
    """

    progress: Progress
    plan: int
    installed: int
    abort: bool
    forward: int = 0
    called_off: bool = False

    @property
    def commits(self) -> bool:
        """True if this rank must commit the part if all ranks vote the same."""
        return self.progress == Progress.READY and not (self.abort or self.called_off)

    def encode(self) -> list[int]:
        """Return ``BALLOT_WIDTH`` signed 64-bit integers for a MIN all-reduce."""
        bounds = [self.progress, self.plan, self.installed, self.forward]
        against = [-int(self.abort), -int(self.called_off)]
        return [*(int(value) for value in bounds), *(-int(value) for value in bounds), *against]


@dataclass(frozen=True)
class VoteOutcome:
    """The ballots of all ranks, reduced."""

    slowest: Progress
    plan_low: int
    plan_high: int
    installed_agree: bool
    abort: bool
    forward_low: int = 0
    forward_high: int = 0
    confirmed: bool = True
    called_off: bool = False

    @classmethod
    def decode(cls, reduced: Sequence[int]) -> VoteOutcome:
        """Decode the reduced integers; raises ``ValueError`` where they are not a ballot's."""
        if len(reduced) != BALLOT_WIDTH:
            raise ValueError(f"a ballot has {BALLOT_WIDTH} integers, got {len(reduced)}")
        progress, plan_low, installed_low, forward_low = reduced[:4]
        _, plan_high, installed_high, forward_high, abort, called_off = reduced[4:]
        return cls(
            slowest=Progress(progress),
            plan_low=plan_low,
            plan_high=-plan_high,
            installed_agree=installed_low == -installed_high,
            abort=abort < 0,
            forward_low=forward_low,
            forward_high=-forward_high,
            called_off=called_off < 0,
        )

    @classmethod
    def unanimous(cls, plan: int) -> VoteOutcome:
        """Return the outcome of a vote in which all ranks are ready to commit a part of this plan."""
        return cls(Progress.READY, plan, plan, installed_agree=True, abort=False)

    @classmethod
    def nobody(cls) -> VoteOutcome:
        """VoteOutcome as if no rank had held a plan: nothing follows from it."""
        return cls(Progress.IDLE, 0, 0, installed_agree=True, abort=False)

    def with_abort(self) -> VoteOutcome:
        """VoteOutcome had one rank more voted to abort."""
        return replace(self, abort=True)

    def unconfirmed(self) -> VoteOutcome:
        """VoteOutcome where not all ranks are at the boundary at which it is counted."""
        return replace(self, confirmed=False)

    @property
    def plans(self) -> frozenset[int]:
        """Digests of plans known to be held by some rank."""
        return frozenset({self.plan_low, self.plan_high} - {0})

    @property
    def idle(self) -> bool:
        """True if all ranks, at one forward pass, hold no plan."""
        return self.result is VoteResult.NOTHING and not self.plans

    @cached_property
    def result(self) -> VoteResult:
        """Decision of the vote; see the table in ARCHITECTURE.md."""
        if not self.installed_agree:
            return VoteResult.DIVERGED
        if self.forward_low != self.forward_high or not self.confirmed:
            return VoteResult.REALIGN
        if not self.plans:
            return VoteResult.NOTHING
        if self.abort or self.plan_low not in (0, self.plan_high):
            return VoteResult.ABORT
        if self.called_off and self.slowest != Progress.TRANSFERRING:
            # No rank has bytes in flight, so the next plan can use the same lane at once.
            return VoteResult.CALL_OFF
        if self.plan_low == 0:
            return VoteResult.NOTHING
        return {
            Progress.OFFERED: VoteResult.START,
            Progress.READY: VoteResult.COMMIT,
        }.get(self.slowest, VoteResult.NOTHING)


@dataclass(frozen=True)
class StartTransfer:
    """Action: stage this rank's incoming experts for all ``layers``; answer with ``with_transfer_ended``.

    ``lane`` grows, on all ranks at once, whenever a transfer was aborted: bytes of an abandoned transfer must never
    meet those of a later one.
    """

    layers: tuple[RankLayer, ...]
    generation: int
    lane: int


@dataclass(frozen=True)
class Commit:
    """Action: copy what the transfer of ``generation`` has staged, and the new tables, into place, now.

    All ``layers`` switch between the same two forward passes. ``before`` is the placement served so far. ``installed``
    has the placement that results from each layer in turn; the last one is served from now on.
    """

    plan_id: int
    generation: int
    layers: tuple[RankLayer, ...]
    before: RankLayout
    installed: tuple[RankLayout, ...]


@dataclass(frozen=True)
class Halted:
    """Action: serve no further token, as the ranks have diverged."""

    reason: str


Action: TypeAlias = StartTransfer | Commit | PlanStatus | Halted
"""Request of the machine. They run in order. The driver reports each ``PlanStatus``; staging ends with its plan."""

Transition: TypeAlias = "tuple[SwitchState, tuple[Action, ...]]"
"""State after an event, and what is to be done about it, in order."""


@dataclass(frozen=True)
class SwitchState:
    """Switch of one rank, a value: each event gives another, with what is to be done about it.

    ``progress`` is the rank's progress with the part that begins at layer ``index`` of ``plan``, which it accepted at
    step ``offered_at``. It is IDLE exactly if there is no plan. In a part of several layers, no rank receives or sends
    more than ``staging_rows`` experts; the number is the same on all ranks. A plan may stay OFFERED for at most
    ``offer_deadline_steps``, because some rank may never get it. With an ``abort_wish`` the next ballot votes
    to abort. If the service has ``called_off`` the plan, each ballot says so, and the plan ends once no rank transfers
    a part. ``generation`` numbers the transfers and ``lane`` the lanes that they use. Both grow equally on all ranks,
    ``lane`` only if a transfer was aborted. The rank rejects plans of terms below ``highest_term``. It rejects all
    plans while it is ``paused`` (until resumed), ``unheard`` (until the ranks vote again) or ``halted`` (for good,
    because the ranks have diverged).
    """

    installed: RankLayout
    offer_deadline_steps: int
    staging_rows: int = 0
    progress: Progress = Progress.IDLE
    plan: RankPlan | None = None
    index: int = 0
    offered_at: int = 0
    abort_wish: str | None = None
    called_off: bool = False
    generation: int = 0
    lane: int = 0
    transfer_runs: bool = False
    highest_term: int = 0
    paused: str | None = None
    unheard: str | None = None
    halted: str | None = None

    @property
    def part(self) -> tuple[RankLayer, ...]:
        """Layers of the plan's current part; empty without a plan."""
        if self.plan is None:
            return ()
        return self.plan.layers[self.index : part_end(self.plan.moved_LC, self.index, self.staging_rows)]

    @property
    def ballot(self) -> Ballot:
        """This rank's vote."""
        return Ballot(
            progress=self.progress,
            plan=self.plan.digest if self.plan is not None else 0,
            installed=self.installed.version_digest,
            abort=self.abort_wish is not None,
            called_off=self.called_off,
        )

    # Events that only change the state

    def with_term(self, term: int) -> SwitchState:
        """Note that a service of this leader term is there: plans of older ones are refused from here on."""
        return self if term <= self.highest_term else replace(self, highest_term=term)

    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        """Note that the transfer of ``generation`` has staged everything, or failed with ``error``."""
        ended = replace(self, transfer_runs=False)
        if self.progress != Progress.TRANSFERRING:
            # Numbers may have gone on meanwhile, where the ranks have formed the votes again: one runs at a time.
            return ended
        if generation != self.generation:
            return self
        return replace(ended, progress=Progress.READY) if error is None else replace(ended, abort_wish=error)

    def at_step(self, step: int) -> SwitchState:
        """Turn a deadline passed at this step boundary into a wish to abort."""
        overdue = self.progress == Progress.OFFERED and step - self.offered_at > self.offer_deadline_steps
        if not overdue:
            return self
        return self._wishing(f"not all ranks held the plan within {self.offer_deadline_steps} steps")

    def with_pause(self, reason: str) -> SwitchState:
        """Take no plans until ``resumed``, and vote down the one under way."""
        return replace(self._wishing(reason), paused=reason)

    def resumed(self) -> SwitchState:
        """Take plans again."""
        return replace(self, paused=None)

    def reformed(self, generation: int, lane: int) -> SwitchState:
        """Vote again; ``generation`` and ``lane`` are the highest that any rank knew."""
        return replace(self, unheard=None, generation=generation, lane=lane + 1)

    # Events that ask for something

    def offer(self, plan: RankPlan, step: int, checked_for: int) -> Transition:
        """Take a plan whose moves were checked to start from the placement with the digest ``checked_for``."""
        if self.plan is not None and plan.digest == self.plan.digest:
            return self, ()
        reason = self._refusal(plan, checked_for)
        if reason is None:
            accepted = replace(
                self,
                highest_term=plan.leader_term,
                plan=plan,
                index=0,
                offered_at=step,
                progress=Progress.OFFERED,
                abort_wish=None,
            )
            return accepted, (PlanStatus(plan.plan_id, PlanState.ACCEPTED, plan.layers[0].layer),)
        refused = self
        if (self.halted is self.paused is self.unheard is None) and plan.leader_term >= self.highest_term:
            # The service is the one to decide, also that its earlier plan is worth nothing any more.
            refused = self._wishing(f"the service has moved on to plan {plan.plan_id}")
        return refused, (PlanStatus(plan.plan_id, PlanState.REFUSED, reason=reason),)

    def call_off(self, plan_id: int) -> Transition:
        """Vote to drop the plan at the service's request; report CALLED_OFF at once if this rank does not hold it."""
        if self.plan is not None and self.plan.plan_id == plan_id:
            return replace(self, called_off=True), ()
        reason = "called off by the service; this rank does not hold it"
        return self, (PlanStatus(plan_id, PlanState.CALLED_OFF, reason=reason),)

    def lose_votes(self, reason: str) -> Transition:
        """Drop the plan, and take no other until the ranks vote again."""
        dropped, actions = self._drop(reason)
        return replace(dropped, unheard=reason), actions

    def decide(self, outcome: VoteOutcome) -> Transition:
        """Act on the outcome of a vote, as every other rank does at this same step."""
        result = outcome.result
        if result is VoteResult.DIVERGED:
            reason = "the ranks serve different placements"
            dropped, _ = self._drop(reason)
            return replace(dropped, halted=self.halted or reason), (Halted(reason),)
        if result is VoteResult.REALIGN:
            return self._drop(
                "the ranks are not at one forward pass: one has missed a step, made one twice, or is seconds late"
            )
        if self.plan is None or self.plan.digest not in outcome.plans:
            return self, ()
        if result is VoteResult.START:
            return self._start()
        if result is VoteResult.COMMIT:
            return self._commit()
        if result is VoteResult.ABORT:
            return self._drop(self.abort_wish or "another rank voted to abort")
        if result is VoteResult.CALL_OFF:
            return self._called_off()
        return self, ()

    # Transitions

    def _wishing(self, reason: str) -> SwitchState:
        """Wish to abort the plan, if there is one; the first reason is kept."""
        return self if self.plan is None or self.abort_wish is not None else replace(self, abort_wish=reason)

    def _refusal(self, plan: RankPlan, checked_for: int) -> str | None:
        if self.halted is not None:
            return f"this rank serves no more: {self.halted}"
        if self.paused is not None:
            return f"balancing is paused on this rank: {self.paused}"
        if self.unheard is not None:
            return f"the ranks do not vote at present: {self.unheard}"
        if plan.leader_term < self.highest_term:
            return (
                f"leader term {plan.leader_term} is older than {self.highest_term}, which this rank has seen"
            )
        if self.plan is not None:
            return f"plan {self.plan.plan_id} is still under way; it is being given up"
        if self.transfer_runs:
            return "the transfer of an aborted plan is still running out"
        if (plan.base_epoch, plan.base_digest) != (self.installed.epoch, self.installed.digest):
            return (
                f"the plan starts from epoch {plan.base_epoch}, this rank serves epoch {self.installed.epoch}"
            )
        if checked_for != self.installed.digest:
            return "a layer was switched between this plan's check and its offer"
        return None

    def _start(self) -> Transition:
        assert self.plan is not None
        started = replace(
            self, progress=Progress.TRANSFERRING, generation=self.generation + 1, transfer_runs=True
        )
        return started, (StartTransfer(self.part, started.generation, self.lane),)

    def _commit(self) -> Transition:
        assert self.plan is not None
        plan = self.plan
        part = self.part
        after = self.installed
        installed = []
        for layer in part:
            after = after.with_layer(layer.layer, layer.phy2log_RS, layer.log2phy_E)
            installed.append(after)
        commit = Commit(plan.plan_id, self.generation, part, self.installed, tuple(installed))
        end = self.index + len(part)
        if end < len(plan.layers):
            started, actions = replace(self, installed=after, index=end)._start()
            return started, (commit, *actions)
        return replace(self._idle(), installed=after), (commit,)

    def _drop(self, reason: str) -> Transition:
        if self.plan is None:
            return self, ()
        aborted = PlanStatus(self.plan.plan_id, PlanState.ABORTED, self.plan.layers[self.index].layer, reason)
        begun = self.progress in (Progress.TRANSFERRING, Progress.READY)
        return replace(self._idle(), lane=self.lane + begun), (aborted,)

    def _called_off(self) -> Transition:
        assert self.plan is not None
        layer = self.plan.layers[self.index].layer
        ended = PlanStatus(self.plan.plan_id, PlanState.CALLED_OFF, layer, "called off by the service")
        return self._idle(), (ended,)

    def _idle(self) -> SwitchState:
        return replace(
            self,
            plan=None,
            index=0,
            offered_at=0,
            progress=Progress.IDLE,
            abort_wish=None,
            called_off=False,
        )
