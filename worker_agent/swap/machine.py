"""The layer switch as a pure state machine: events in, actions out, no clock, sockets, threads or tensors.

::

    IDLE --offer--> OFFERED --all hold it--> TRANSFERRING --all bytes here--> READY --all ready--> commit, next layer
                       |                          |                            |
                       +------ any rank votes abort, or a deadline passes -----+--> IDLE, old placement stays

Two rules keep the ranks together. A rank changes between OFFERED, TRANSFERRING and the next layer, commits or aborts
only on the outcome of a vote, never on its own. And a wish to abort waits for the next ballot, so that a rank which
has voted READY keeps its word until it has seen what the vote decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from eplb_service.wire.plan_codec import WireLayer, WirePlan
from worker_agent.swap.ballot import Ballot, Outcome, Progress, VoteResult
from worker_agent.swap.installed import Installed


@dataclass(frozen=True)
class StartTransfer:
    """Stage this rank's incoming experts of ``layer``; answer with ``transfer_ended(generation)``.

    ``lane`` grows, on all ranks at once, whenever a transfer was aborted: bytes of an abandoned transfer must never
    meet those of a later one.
    """

    layer: WireLayer
    generation: int
    lane: int


@dataclass(frozen=True)
class Commit:
    """Copy what the transfer of ``generation`` has staged, and the new tables, into place, now.

    ``before`` is what was served until here.
    """

    plan_id: int
    generation: int
    layer: WireLayer
    before: Installed
    after: Installed


@dataclass(frozen=True)
class DropStaging:
    """Forget what is staged; the transfer of ``generation`` may still be running out."""

    generation: int


@dataclass(frozen=True)
class Accepted:
    """Report to the service that the plan is valid here."""

    plan_id: int
    layer: int


@dataclass(frozen=True)
class Refused:
    """Report to the service why the plan is not valid here."""

    plan_id: int
    reason: str


@dataclass(frozen=True)
class Aborted:
    """Report to the service that ``layer`` and those after it stay as they were."""

    plan_id: int
    layer: int
    reason: str


@dataclass(frozen=True)
class Halted:
    """Report to the service that this rank no longer takes plans, and why."""

    reason: str


Action: TypeAlias = StartTransfer | Commit | DropStaging | Accepted | Refused | Aborted | Halted


class SwitchMachine:
    """One rank's side of the switch.

    Parameters
    ----------
    installed
        What the rank serves.
    offer_deadline_steps
        Steps that a plan may stay OFFERED before this rank votes to drop it: some rank may never get it.
    """

    def __init__(self, installed: Installed, offer_deadline_steps: int) -> None:
        self.installed = installed
        self.progress = Progress.IDLE
        self.generation = 0
        self.lane = 0
        self.halted: str | None = None
        self._offer_deadline_steps = offer_deadline_steps
        self._plan: WirePlan | None = None
        self._index = 0
        self._offered_at = 0
        self._abort_wish: str | None = None
        self._highest_term = 0
        self._transfer_runs = False
        self._paused: str | None = None

    @property
    def plan_under_way(self) -> tuple[int, int] | None:
        """Plan id and the layer it is at, or ``None``."""
        return None if self._plan is None else (self._plan.plan_id, self._plan.layers[self._index].layer)

    # Events

    def offer(self, plan: WirePlan, step: int, checked_for: int) -> list[Action]:
        """A plan has arrived whose moves were checked to start from the placement with the digest ``checked_for``."""
        if self._plan is not None and plan.digest == self._plan.digest:
            return []
        reason = self._refusal(plan, checked_for)
        if reason is not None:
            return [Refused(plan.plan_id, reason)]
        self._highest_term = plan.leader_term
        self._plan, self._index, self._offered_at = plan, 0, step
        self._abort_wish = None
        self.progress = Progress.OFFERED
        return [Accepted(plan.plan_id, plan.layers[0].layer)]

    def hear_term(self, term: int) -> None:
        """A service of this leader term is about: plans of older ones are refused from here on."""
        self._highest_term = max(self._highest_term, term)

    def transfer_ended(self, generation: int, error: str | None = None) -> list[Action]:
        """The transfer of ``generation`` has staged everything, or failed with ``error``."""
        if generation != self.generation:
            return []
        self._transfer_runs = False
        if self.progress == Progress.TRANSFERRING:
            if error is None:
                self.progress = Progress.READY
            else:
                self._abort_wish = error
        return []

    def tick(self, step: int) -> list[Action]:
        """A step boundary; turns a passed deadline into a wish to abort."""
        waited = step - self._offered_at
        if (
            self.progress == Progress.OFFERED
            and waited > self._offer_deadline_steps
            and self._abort_wish is None
        ):
            self._abort_wish = f"not all ranks held the plan within {self._offer_deadline_steps} steps"
        return []

    def pause(self, reason: str | None) -> None:
        """Take no plans until ``None`` is given here, and vote down the one under way."""
        self._paused = reason
        if reason is not None and self._plan is not None and self._abort_wish is None:
            self._abort_wish = reason

    def halt(self, reason: str) -> list[Action]:
        """Take no more plans; whatever is under way, here or elsewhere, is voted down."""
        if self.halted is not None:
            return []
        self.halted = reason
        if self._plan is not None and self._abort_wish is None:
            self._abort_wish = reason
        return [Halted(reason)]

    # Votes

    def ballot(self) -> Ballot:
        """This rank's vote."""
        return Ballot(
            progress=self.progress,
            plan=self._plan.digest if self._plan is not None else 0,
            installed=self.installed.version_digest,
            abort=self._abort_wish is not None or self.halted is not None,
        )

    def decide(self, outcome: Outcome) -> list[Action]:
        """Act on the outcome of a vote, as every other rank does at this same step."""
        result = outcome.result
        if result is VoteResult.HALT:
            reason = "the ranks serve different placements"
            return [*self._drop(reason), *self.halt(reason)]
        if self._plan is None or self._plan.digest not in outcome.plans:
            return []
        if result is VoteResult.START:
            return self._start()
        if result is VoteResult.COMMIT:
            return self._commit()
        if result is VoteResult.ABORT:
            return self._drop(self._abort_wish or "another rank voted to abort")
        return []

    # Transitions

    def _refusal(self, plan: WirePlan, checked_for: int) -> str | None:
        if self.halted is not None:
            return f"balancing has stopped on this rank: {self.halted}"
        if self._paused is not None:
            return f"balancing is paused on this rank: {self._paused}"
        if plan.leader_term < self._highest_term:
            return (
                f"leader term {plan.leader_term} is older than {self._highest_term}, which this rank has seen"
            )
        if self._plan is not None:
            self._abort_wish = self._abort_wish or f"the service has moved on to plan {plan.plan_id}"
            return f"plan {self._plan.plan_id} is still under way; it is being given up"
        if self._transfer_runs:
            return "the transfer of an aborted plan is still running out"
        if (plan.base_epoch, plan.base_digest) != (self.installed.epoch, self.installed.digest):
            return (
                f"the plan starts from epoch {plan.base_epoch}, this rank serves epoch {self.installed.epoch}"
            )
        if checked_for != self.installed.digest:
            return "a layer was switched between this plan's check and its offer"
        return None

    def _start(self) -> list[Action]:
        assert self._plan is not None
        self.progress = Progress.TRANSFERRING
        self.generation += 1
        self._transfer_runs = True
        return [StartTransfer(self._plan.layers[self._index], self.generation, self.lane)]

    def _commit(self) -> list[Action]:
        assert self._plan is not None
        plan, layer = self._plan, self._plan.layers[self._index]
        before = self.installed
        self.installed = before.with_layer(layer.layer, layer.phy2log_RS, layer.log2phy_E)
        commit = Commit(plan.plan_id, self.generation, layer, before, self.installed)
        self._index += 1
        if self._index < len(plan.layers):
            return [commit, *self._start()]
        self._plan, self.progress, self._abort_wish = None, Progress.IDLE, None
        return [commit]

    def _drop(self, reason: str) -> list[Action]:
        if self._plan is None:
            return []
        actions: list[Action] = [Aborted(self._plan.plan_id, self._plan.layers[self._index].layer, reason)]
        if self.progress in (Progress.TRANSFERRING, Progress.READY):
            self.lane += 1
            actions.insert(0, DropStaging(self.generation))
        self._plan, self.progress, self._abort_wish = None, Progress.IDLE, None
        return actions
