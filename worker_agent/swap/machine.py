"""The layer switch as a pure state machine: state and event in, state and actions out; no clock, sockets or tensors.

::

    IDLE --offer--> OFFERED --all hold it--> TRANSFERRING --all bytes here--> READY --all ready--> commit, next layer
                       |                          |                            |
                       +------ any rank votes abort, or a deadline passes -----+--> IDLE, old placement stays

Two rules keep the ranks together. A rank changes between OFFERED, TRANSFERRING and the next layer, commits or aborts
only on the outcome of a vote, never on its own. And a wish to abort waits for the next ballot, so that a rank which
has voted READY keeps its word until it has seen what the vote decided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from eplb_service.wire.plan import RankPlan
from worker_agent.swap.actions import (
    Aborted,
    Accepted,
    Action,
    Commit,
    Diverged,
    DropStaging,
    Halted,
    Refused,
    StartTransfer,
)
from worker_agent.swap.ballot import Ballot, Outcome, Progress, VoteResult
from worker_agent.swap.installed import Installed

Transition: TypeAlias = "tuple[SwitchState, tuple[Action, ...]]"
"""The state after an event, and what is to be done about it, in order."""


@dataclass(frozen=True)
class SwitchState:
    """One rank's side of the switch, a value: each event gives another, with what is to be done about it.

    Parameters
    ----------
    installed
        What the rank serves.
    offer_deadline_steps
        Steps that a plan may stay OFFERED before this rank votes to drop it: some rank may never get it.
    progress, plan, index
        How far the rank is with which of the plan's layers; IDLE exactly where ``plan`` is ``None``.
    offered_at
        Step at which the plan was accepted.
    abort_wish
        Why this rank's next ballot votes to abort, or ``None``.
    generation
        Number of the last transfer that was begun; equal on all ranks.
    lane
        Number of the lane that transfers use; grows, on all ranks alike, where one was aborted.
    transfer_runs
        Whether the last transfer has not ended yet.
    highest_term
        Highest leader term seen; plans of lower ones are refused.
    paused, unheard, halted
        Why this rank takes no plans, or ``None``: until it is resumed, until the ranks vote again, for good.
    """

    installed: Installed
    offer_deadline_steps: int
    progress: Progress = Progress.IDLE
    plan: RankPlan | None = None
    index: int = 0
    offered_at: int = 0
    abort_wish: str | None = None
    generation: int = 0
    lane: int = 0
    transfer_runs: bool = False
    highest_term: int = 0
    paused: str | None = None
    unheard: str | None = None
    halted: str | None = None

    @property
    def plan_under_way(self) -> tuple[int, int] | None:
        """Plan id and the layer it is at, or ``None``."""
        return None if self.plan is None else (self.plan.plan_id, self.plan.layers[self.index].layer)

    @property
    def ballot(self) -> Ballot:
        """This rank's vote."""
        return Ballot(
            progress=self.progress,
            plan=self.plan.digest if self.plan is not None else 0,
            installed=self.installed.version_digest,
            abort=self.abort_wish is not None or self.halted is not None,
        )

    # Events that only change the state

    def with_term(self, term: int) -> SwitchState:
        """A service of this leader term is about: plans of older ones are refused from here on."""
        return self if term <= self.highest_term else replace(self, highest_term=term)

    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        """The transfer of ``generation`` has staged everything, or failed with ``error``."""
        if generation != self.generation:
            return self
        ended = replace(self, transfer_runs=False)
        if self.progress != Progress.TRANSFERRING:
            return ended
        return replace(ended, progress=Progress.READY) if error is None else replace(ended, abort_wish=error)

    def at_step(self, step: int) -> SwitchState:
        """A step boundary; turns a passed deadline into a wish to abort."""
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
        """The ranks vote again; ``generation`` and ``lane`` are the highest that any of them knew."""
        return replace(self, unheard=None, generation=generation, lane=lane + 1)

    # Events that ask for something

    def offer(self, plan: RankPlan, step: int, checked_for: int) -> Transition:
        """A plan has arrived whose moves were checked to start from the placement with the digest ``checked_for``."""
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
            return accepted, (Accepted(plan.plan_id, plan.layers[0].layer),)
        refused = self
        if (
            self.halted is None
            and self.paused is None
            and self.unheard is None
            and plan.leader_term >= self.highest_term
        ):
            # The service is the one to decide, also that its earlier plan is worth nothing any more.
            refused = self._wishing(f"the service has moved on to plan {plan.plan_id}")
        return refused, (Refused(plan.plan_id, reason),)

    def halt(self, reason: str) -> Transition:
        """Take no more plans; whatever is under way, here or elsewhere, is voted down."""
        if self.halted is not None:
            return self, ()
        return replace(self._wishing(reason), halted=reason), (Halted(reason),)

    def lose_votes(self, reason: str) -> Transition:
        """Drop the plan, and take no other until the ranks vote again."""
        dropped, actions = self._drop(reason)
        return replace(dropped, unheard=reason), actions

    def decide(self, outcome: Outcome) -> Transition:
        """Act on the outcome of a vote, as every other rank does at this same step."""
        result = outcome.result
        if result is VoteResult.DIVERGED:
            reason = "the ranks serve different placements"
            halted, actions = self._drop(reason)[0].halt(reason)
            return halted, (*actions, Diverged(reason))
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
        return self, ()

    # Transitions

    def _wishing(self, reason: str) -> SwitchState:
        """Wish to abort the plan, if there is one; the first reason is kept."""
        return self if self.plan is None or self.abort_wish is not None else replace(self, abort_wish=reason)

    def _refusal(self, plan: RankPlan, checked_for: int) -> str | None:
        if self.halted is not None:
            return f"balancing has stopped on this rank: {self.halted}"
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
        return started, (StartTransfer(self.plan.layers[self.index], started.generation, self.lane),)

    def _commit(self) -> Transition:
        assert self.plan is not None
        plan, layer = self.plan, self.plan.layers[self.index]
        after = self.installed.with_layer(layer.layer, layer.phy2log_RS, layer.log2phy_E)
        commit = Commit(plan.plan_id, self.generation, layer, self.installed, after)
        if self.index + 1 < len(plan.layers):
            started, actions = replace(self, installed=after, index=self.index + 1)._start()
            return started, (commit, *actions)
        return replace(self._idle(), installed=after), (commit,)

    def _drop(self, reason: str) -> Transition:
        if self.plan is None:
            return self, ()
        aborted = Aborted(self.plan.plan_id, self.plan.layers[self.index].layer, reason)
        if self.progress in (Progress.TRANSFERRING, Progress.READY):
            return replace(self._idle(), lane=self.lane + 1), (DropStaging(self.generation), aborted)
        return self._idle(), (aborted,)

    def _idle(self) -> SwitchState:
        return replace(self, plan=None, index=0, offered_at=0, progress=Progress.IDLE, abort_wish=None)
