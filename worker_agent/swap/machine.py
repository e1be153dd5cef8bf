"""State machine of the layer switch. It maps a state and an event to a new state and actions.

It is pure: it uses no clock, sockets, threads or tensors.

::

    IDLE --offer--> OFFERED --all hold the plan--> TRANSFERRING --staged--> READY --all ready--> commit, next part
                       |                                |                     |
                       +--- any rank votes to abort, or a deadline passes ----+--> IDLE, current layout stays
                       +------ called off, and no rank is transferring -------+--> IDLE, current layout stays

Ranks switch a plan in parts. A part is a sequence of consecutive layers that fit in staging together. Ranks transfer
these layers together and commit them with one vote.

Two rules keep the ranks consistent:

- A rank moves from OFFERED to TRANSFERRING, begins the next part, commits or aborts only on the outcome of a vote,
  never on its own.
- A rank that wants to abort waits for its next ballot. Once it has voted READY, it is bound by that vote until it knows
  the outcome.

A vote is one integer all-reduce with MIN. Each field is also sent negated, so one reduction yields both its minimum and
its maximum. If the two are equal, all ranks voted the same. All ranks receive the same outcome and decide only from
it, so they act in unison.
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
"""Number of integers in an encoded ballot."""


class Progress(enum.IntEnum):
    """A rank's progress on the current part of its plan."""

    IDLE = 0
    OFFERED = 1
    TRANSFERRING = 2
    READY = 3


class VoteResult(enum.Enum):
    """Decision taken by a vote. All ranks carry it out at the same step boundary."""

    NOTHING = "change nothing"
    START = "start the transfer of the plan's next part"
    COMMIT = "commit the part"
    ABORT = "drop the plan"
    CALL_OFF = "drop the plan because the service called it off"
    REALIGN = "drop the plan and vote again at a common forward pass, because the ranks are at different ones"
    DIVERGED = "stop serving, because the ranks serve different placements"


@dataclass(frozen=True)
class Ballot:
    """One rank's vote.

    Parameters
    ----------
    progress
        The rank's progress on the current part of its plan.
    plan
        Digest of the plan that the rank holds; 0 if it holds none.
    installed
        ``version_digest`` of the rank's current layout.
    abort
        True if the rank wants to drop the plan.
    forward
        Number of the last forward pass before the vote, as counted by this rank.
    called_off
        True if the service has called off the plan.
    """

    progress: Progress
    plan: int
    installed: int
    abort: bool
    forward: int = 0
    called_off: bool = False

    @property
    def commits(self) -> bool:
        """True if this rank votes to commit its part."""
        return self.progress == Progress.READY and not (self.abort or self.called_off)

    def encode(self) -> list[int]:
        """Return the ballot as ``BALLOT_WIDTH`` signed 64-bit integers for a MIN all-reduce."""
        bounds = [self.progress, self.plan, self.installed, self.forward]
        flags = [-int(self.abort), -int(self.called_off)]
        return [*(int(value) for value in bounds), *(-int(value) for value in bounds), *flags]


@dataclass(frozen=True)
class VoteOutcome:
    """Outcome of a vote: the reduced ballots of all ranks.

    Parameters
    ----------
    slowest
        Progress of the slowest rank.
    plan_low
        Lowest plan digest on any ballot; 0 if a rank holds no plan.
    plan_high
        Highest plan digest on any ballot; 0 if no rank holds a plan.
    installed_agree
        True if all ranks have the same layout and the same epochs.
    abort
        True if any rank votes to abort.
    forward_low
        Lowest forward pass number on any ballot.
    forward_high
        Highest forward pass number on any ballot.
    confirmed
        False if the ranks did not confirm that they are all at the same step boundary.
    called_off
        True if any rank knows that the service has called off its plan.

    Examples
    --------
    One rank is still transferring, so nothing happens yet:

    >>> ready = Ballot(Progress.READY, plan=7, installed=3, abort=False)
    >>> late = Ballot(Progress.TRANSFERRING, plan=7, installed=3, abort=False)
    >>> def reduced(*ballots):
    ...     return [min(column) for column in zip(*(ballot.encode() for ballot in ballots))]
    >>> VoteOutcome.decode(reduced(ready, late)).result.name
    'NOTHING'

    The part is committed once all ranks are ready:

    >>> VoteOutcome.decode(reduced(ready, ready)).result.name
    'COMMIT'
    """

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
        """Decode reduced integers. Raises ``ValueError`` if they do not encode a reduced ballot."""
        if len(reduced) != BALLOT_WIDTH:
            raise ValueError(f"expected a ballot of {BALLOT_WIDTH} integers, got {len(reduced)}")
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
        """Return the outcome of a unanimous vote to commit a part of the plan with digest ``plan``."""
        return cls(Progress.READY, plan, plan, installed_agree=True, abort=False)

    @classmethod
    def without_plans(cls) -> VoteOutcome:
        """Return the outcome of a vote in which no rank holds a plan and nothing changes."""
        return cls(Progress.IDLE, 0, 0, installed_agree=True, abort=False)

    def with_abort(self) -> VoteOutcome:
        """Return this outcome as if a rank had also voted to abort."""
        return replace(self, abort=True)

    def unconfirmed(self) -> VoteOutcome:
        """Return this outcome, marked as not confirmed by all ranks."""
        return replace(self, confirmed=False)

    @property
    def plans(self) -> frozenset[int]:
        """Lowest and highest plan digests on the ballots, excluding 0."""
        return frozenset({self.plan_low, self.plan_high} - {0})

    @property
    def idle(self) -> bool:
        """True if all ranks are at the same forward pass and hold no plan."""
        return self.result is VoteResult.NOTHING and not self.plans

    @cached_property
    def result(self) -> VoteResult:
        """Decision of the vote. See the table in ARCHITECTURE.md."""
        if not self.installed_agree:
            return VoteResult.DIVERGED
        if self.forward_low != self.forward_high or not self.confirmed:
            return VoteResult.REALIGN
        if not self.plans:
            return VoteResult.NOTHING
        if self.abort or self.plan_low not in (0, self.plan_high):
            return VoteResult.ABORT
        if self.called_off and self.slowest != Progress.TRANSFERRING:
            # No rank has bytes in flight, so the next plan can use the same lane immediately.
            return VoteResult.CALL_OFF
        if self.plan_low == 0:
            return VoteResult.NOTHING
        return {
            Progress.OFFERED: VoteResult.START,
            Progress.READY: VoteResult.COMMIT,
        }.get(self.slowest, VoteResult.NOTHING)


@dataclass(frozen=True)
class StartTransfer:
    """Action: stage the experts that this rank receives, then report back with ``with_transfer_ended``.

    Parameters
    ----------
    layers
        Layers of the part.
    generation
        Transfer number.
    lane
        Number of the lane to use. All ranks increment it together after an aborted transfer, so that its late bytes
        never mix with the bytes of a newer transfer.
    """

    layers: tuple[RankLayer, ...]
    generation: int
    lane: int


@dataclass(frozen=True)
class Commit:
    """Action: install a staged part now, with all its layers between the same two forward passes.

    Parameters
    ----------
    plan_id
        Plan number.
    generation
        Number of the transfer that staged the part.
    layers
        Layers to install, in order.
    before
        Layout before the commit.
    installed
        Layout after each successive layer. The last one becomes the current layout.
    """

    plan_id: int
    generation: int
    layers: tuple[RankLayer, ...]
    before: RankLayout
    installed: tuple[RankLayout, ...]


@dataclass(frozen=True)
class Halted:
    """Action: stop serving tokens, because the ranks have diverged."""

    reason: str


Action: TypeAlias = StartTransfer | Commit | PlanStatus | Halted
"""Action requested by the machine. The driver reports each ``PlanStatus``, and discards a dropped plan's staging."""

Transition: TypeAlias = "tuple[SwitchState, tuple[Action, ...]]"
"""State after an event, and the actions to carry out in order."""


@dataclass(frozen=True)
class SwitchState:
    """State of the switch on one rank. It is immutable: each event returns a new state.

    Parameters
    ----------
    installed
        Current layout of this rank.
    offer_deadline_steps
        Maximum number of steps that a plan may stay OFFERED, in case some rank never receives it.
    staging_rows
        Number of experts that fit in staging, the same on all ranks. In a part with several layers, no rank receives or
        sends more experts than this.
    progress
        Progress on the current part; IDLE if and only if there is no plan.
    plan
        Plan that this rank has accepted, or ``None``.
    index
        Index of the current part's first layer within the plan.
    offered_at
        Step at which this rank accepted the plan.
    abort_wish
        Reason to vote to abort in the next ballot, or ``None``.
    called_off
        True if the service has called off the plan. Each ballot reports it, and the plan ends once no rank is
        transferring.
    generation
        Number of the last transfer. All ranks increment it together.
    lane
        Number of the lane for transfers. All ranks increment it together, after an abort or when voting resumes.
    transfer_runs
        True until the last transfer has ended, even if its plan has been dropped.
    highest_term
        Highest leader term received so far. Plans with lower terms are rejected.
    paused
        Reason to reject all plans until ``resumed``, or ``None``.
    votes_lost
        Reason why the ranks are not voting, or ``None``. All plans are rejected until voting resumes.
    halted
        Reason to reject all plans permanently, because the ranks have diverged; otherwise ``None``.
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
    votes_lost: str | None = None
    halted: str | None = None

    @property
    def part(self) -> tuple[RankLayer, ...]:
        """Layers of the plan's current part; empty if there is no plan."""
        if self.plan is None:
            return ()
        return self.plan.layers[self.index : part_end(self.plan.moved_LC, self.index, self.staging_rows)]

    @property
    def ballot(self) -> Ballot:
        """This rank's ballot, without its forward pass."""
        return Ballot(
            progress=self.progress,
            plan=self.plan.digest if self.plan is not None else 0,
            installed=self.installed.version_digest,
            abort=self.abort_wish is not None,
            called_off=self.called_off,
        )

    # Events without actions

    def with_term(self, term: int) -> SwitchState:
        """Record the leader term of the connected service. Plans with lower terms are rejected from now on."""
        return self if term <= self.highest_term else replace(self, highest_term=term)

    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        """Record the end of a transfer.

        Parameters
        ----------
        generation
            Transfer number.
        error
            Reason why it failed; ``None`` if all experts are staged.
        """
        ended = replace(self, transfer_runs=False)
        if self.progress != Progress.TRANSFERRING:
            # The generation may have changed when voting resumed. Only one transfer runs at a time, so none is running
            # now.
            return ended
        if generation != self.generation:
            return self
        return replace(ended, progress=Progress.READY) if error is None else replace(ended, abort_wish=error)

    def at_step(self, step: int) -> SwitchState:
        """Request an abort if the plan's offer deadline has passed at this step boundary."""
        overdue = self.progress == Progress.OFFERED and step - self.offered_at > self.offer_deadline_steps
        if not overdue:
            return self
        return self._with_abort_wish(
            f"not all ranks received the plan within {self.offer_deadline_steps} steps"
        )

    def with_pause(self, reason: str) -> SwitchState:
        """Reject plans until ``resumed`` is called, and request an abort of the current one."""
        return replace(self._with_abort_wish(reason), paused=reason)

    def resumed(self) -> SwitchState:
        """Resume accepting plans after a pause."""
        return replace(self, paused=None)

    def reformed(self, generation: int, lane: int) -> SwitchState:
        """Resume voting.

        Parameters
        ----------
        generation
            Highest transfer number on any rank.
        lane
            Highest lane number on any rank.
        """
        return replace(self, votes_lost=None, generation=generation, lane=lane + 1)

    # Events with actions

    def offer(self, plan: RankPlan, step: int, checked_for: int) -> Transition:
        """Accept or reject a plan.

        Parameters
        ----------
        plan
            Plan from the service.
        step
            Current step.
        checked_for
            Digest of the placement against which the sources of the plan's moves were checked.
        """
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
        after = self
        if (self.halted is self.paused is self.votes_lost is None) and plan.leader_term >= self.highest_term:
            # A new plan from the service supersedes the earlier one.
            after = self._with_abort_wish(f"the service has replaced this plan with plan {plan.plan_id}")
        return after, (PlanStatus(plan.plan_id, PlanState.REFUSED, reason=reason),)

    def call_off(self, plan_id: int) -> Transition:
        """Vote to drop a plan at the service's request. If this rank does not hold it, just report CALLED_OFF."""
        if self.plan is not None and self.plan.plan_id == plan_id:
            return replace(self, called_off=True), ()
        reason = "called off by the service; this rank does not hold the plan"
        return self, (PlanStatus(plan_id, PlanState.CALLED_OFF, reason=reason),)

    def lose_votes(self, reason: str) -> Transition:
        """Drop the plan, and reject all plans until voting resumes."""
        dropped, actions = self._drop(reason)
        return replace(dropped, votes_lost=reason), actions

    def decide(self, outcome: VoteOutcome) -> Transition:
        """Act on the outcome of a vote, as every other rank does at this step."""
        result = outcome.result
        if result is VoteResult.DIVERGED:
            reason = "the ranks serve different placements"
            dropped, _ = self._drop(reason)
            return replace(dropped, halted=self.halted or reason), (Halted(reason),)
        if result is VoteResult.REALIGN:
            return self._drop(
                "the ranks are at different forward passes: a rank missed a step, ran one twice, or is seconds late"
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

    def _with_abort_wish(self, reason: str) -> SwitchState:
        """Request an abort of the plan, if there is one. The first reason is kept."""
        return self if self.plan is None or self.abort_wish is not None else replace(self, abort_wish=reason)

    def _refusal(self, plan: RankPlan, checked_for: int) -> str | None:
        """Return the reason to reject a plan, or ``None`` to accept it."""
        if self.halted is not None:
            return f"this rank has halted: {self.halted}"
        if self.paused is not None:
            return f"balancing is paused on this rank: {self.paused}"
        if self.votes_lost is not None:
            return f"the ranks are not voting: {self.votes_lost}"
        if plan.leader_term < self.highest_term:
            return (
                f"leader term {plan.leader_term} is lower than {self.highest_term}, the highest that this rank has "
                "received"
            )
        if self.plan is not None:
            return f"plan {self.plan.plan_id} is still in progress; this rank now votes to abort it"
        if self.transfer_runs:
            return "the transfer of an aborted plan is still running"
        if plan.base_epoch != self.installed.epoch:
            return f"the plan starts from epoch {plan.base_epoch}, but this rank is at epoch {self.installed.epoch}"
        if plan.base_digest != self.installed.digest:
            return (
                f"the plan starts from the placement with digest {plan.base_digest:#x} in epoch {plan.base_epoch}, but "
                f"this rank's placement has digest {self.installed.digest:#x}"
            )
        if checked_for != self.installed.digest:
            return "a layer was switched between this plan's check and its offer"
        return None

    def _start(self) -> Transition:
        """Start the transfer of the current part."""
        assert self.plan is not None
        started = replace(
            self, progress=Progress.TRANSFERRING, generation=self.generation + 1, transfer_runs=True
        )
        return started, (StartTransfer(self.part, started.generation, self.lane),)

    def _commit(self) -> Transition:
        """Commit the current part, and start the next one or end the plan."""
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
        """Drop the plan and report it as aborted. Leave the lane if a transfer has used it."""
        if self.plan is None:
            return self, ()
        aborted = PlanStatus(self.plan.plan_id, PlanState.ABORTED, self.plan.layers[self.index].layer, reason)
        uses_lane = self.progress in (Progress.TRANSFERRING, Progress.READY)
        return replace(self._idle(), lane=self.lane + uses_lane), (aborted,)

    def _called_off(self) -> Transition:
        """Drop the plan and report it as called off. The lane stays in use, because no rank has bytes in flight."""
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
