"""State of one plan, from the offer to the last rank's report.

::

    OFFERED --a layer is committed--> (next layer) --all layers on all ranks--> DONE
       |
       +--a rank refuses the plan--------------------------------> REFUSED
       +--a rank aborts------------------------------------------> ABORTED
       +--the service calls the plan off and all ranks answer----> CALLED_OFF
       +--no rank reports in time, although ranks run steps------> TIMED_OUT
       +--the service stops or another group forms---------------> INTERRUPTED

Layers that were committed before the plan ended remain committed. The ranks' own vote decides what is committed, and
this module only records the result. A commit report that arrives after the plan has ended is still recorded, but does
not change the plan's outcome.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eplb_core.placement import combine_digests, layer_digest
from eplb_core.planner.plan import Plan
from eplb_core.wire.agent import PlanState, PlanStatus
from eplb_core.wire.plan import RankLayer, RankPlan, shared_digests, sources_of
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.group import rank_list

_MAX_REASONS = 3
"""Maximum number of reasons listed in an outcome."""
_IDLE_SHARE = 0.25
"""Fraction of the plan's timeout after which ranks without a new step count as idle. They report only every few
seconds, so a shorter gap does not show that they are idle."""


class Outcome(str, enum.Enum):
    """Outcome of a plan that has ended."""

    DONE = "done"
    CALLED_OFF = "called_off"
    """Heat changed while the plan was in progress. The next decision starts from the layers switched by then."""
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    """The service stopped, or another group formed, before all ranks had answered."""


@dataclass(frozen=True)
class PlanTracker:
    """One offered plan and the ranks' reports about it (immutable).

    Parameters
    ----------
    plan_id
        Id of the plan.
    base_epoch
        Epoch of the layout that the plan starts from.
    base_digest
        Digest of that layout.
    decision
        Layers of the plan, in commit order, and the verdicts on all layers.
    versions
        Epoch and digest of the deployment after the commit of each of the plan's layers.
    progress
        Number of the plan's layers that each rank is known to have committed, keyed by rank.
    heard_at
        Time of the offer or of the latest report, in seconds on the caller's clock, plus the idle time since then.
    step
        Highest step that any rank has reached.
    stepped_at
        Time at which that step was first observed.
    committed
        Number of the plan's layers that at least one rank is known to have committed.
    called_off
        Reason why the service called the plan off; empty if it did not.
    outcome
        Outcome of the plan; ``None`` while it is in progress.
    reason
        Reason for the outcome; empty if the plan is done.
    objections
        Status of each rank that dropped the plan before its last layer, keyed by rank.
    """

    plan_id: int
    base_epoch: int
    base_digest: int
    decision: Plan
    versions: tuple[tuple[int, int], ...]
    progress: tuple[int, ...]
    heard_at: float = 0.0
    step: int = 0
    stepped_at: float = 0.0
    committed: int = 0
    called_off: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    objections: Mapping[int, PlanStatus] = field(default_factory=dict)

    @classmethod
    def of(cls, plan_id: int, base: DeployedLayout, decision: Plan) -> PlanTracker:
        """Return a tracker for a new plan.

        Parameters
        ----------
        plan_id
            Id of the plan.
        base
            Layout that the plan starts from.
        decision
            Layers of the plan and verdicts on all layers.
        """
        digests = list(base.layer_digests)
        versions = []
        for epoch, update in enumerate(decision.layers, start=base.epoch + 1):
            digests[update.layer] = layer_digest(update.layer, update.phy2log_RS)
            versions.append((epoch, combine_digests(base.placement.experts, digests)))
        progress = (0,) * base.placement.ranks
        return cls(plan_id, base.epoch, base.digest, decision, tuple(versions), progress)

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks that have neither committed the last layer nor dropped the plan."""
        return [
            rank
            for rank, committed in enumerate(self.progress)
            if committed < len(self.versions) and rank not in self.objections
        ]

    @property
    def was_called_off(self) -> bool:
        """True if the plan ended early because it was stale."""
        return self.outcome is Outcome.CALLED_OFF

    @property
    def summary(self) -> str:
        """State of the plan in one line, for operators."""
        state = "under way" if self.outcome is None else self.outcome.value.replace("_", " ")
        reason = f": {self.reason}" if self.reason else ""
        return f"plan {self.plan_id} {state}{reason}"

    def rank_plan(self, leader_term: int, rank: int, token_groups: Sequence[int]) -> RankPlan:
        """Return the plan to send to one rank. The plans for different ranks differ only in the tables.

        Parameters
        ----------
        leader_term
            Leader term of the service.
        rank
            Rank that receives the plan.
        token_groups
            Token group of each rank.
        """
        layers = tuple(
            RankLayer(
                update.layer,
                update.phy2log_RS,
                sources_of(update.moves_M5, *update.phy2log_RS.shape),
                update.log2phy_RE[rank],
                shared_digests(update.log2phy_RE, token_groups),
            )
            for update in self.decision.layers
        )
        return RankPlan.of(self.plan_id, leader_term, self.base_epoch, self.base_digest, layers)

    def after_status(self, rank: int, status: PlanStatus, now: float) -> PlanTracker:
        """Return the tracker after a rank's report. Raises ``ConflictError`` if the report does not match the plan."""
        tracker = replace(self, heard_at=now)
        if status.state is PlanState.COMMITTED:
            tracker = tracker._with_progress(rank, self._committed_count(rank, status))
        elif status.state is PlanState.CALLED_OFF:
            tracker = tracker._with_call_off_answer(rank, status)
        elif status.state.drops_layers:
            tracker = replace(tracker, objections={**self.objections, rank: status})
        return tracker._with_outcome()

    def with_call_off(self, reason: str, now: float) -> PlanTracker:
        """Return the tracker after the service calls the plan off. The plan ends once all ranks have answered."""
        return replace(self, called_off=reason, heard_at=now)

    def after_version(self, rank: int, version: tuple[int, int]) -> PlanTracker | None:
        """Return the tracker after a rank reports that it uses ``version``, an epoch and digest.

        Returns ``None`` if the version is not one of the plan's.
        """
        if version not in self.versions:
            return None
        return self._with_progress(rank, self.versions.index(version) + 1)._with_outcome()

    def after_time(self, now: float, limit: float, step: int | None = None) -> PlanTracker:
        """Return the tracker at time ``now``, timed out if no rank has reported for too long.

        Ranks vote as they run steps, so time without steps does not count.

        Parameters
        ----------
        now
            Current time, in seconds.
        limit
            Seconds without a report after which the plan times out.
        step
            Highest step that any rank has reached; ``None`` if ranks are missing, so that idle time counts as well.
        """
        if step is not None and self.outcome is None:
            pause = now - self.stepped_at
            idle = pause > _IDLE_SHARE * limit
            if step != self.step:
                heard_at = min(now, self.heard_at + pause) if idle else self.heard_at
                return replace(self, step=step, stepped_at=now, heard_at=heard_at).after_time(now, limit)
            if idle:
                return self
        if self.outcome is not None or now - self.heard_at <= limit:
            return self
        silence = f"{rank_list(self.silent_ranks)} did not answer in time"
        tracker = self._ended_by_objections() if self.objections else self
        if tracker.outcome not in (None, Outcome.CALLED_OFF):
            return replace(tracker, reason=f"{tracker.reason}; {silence}")
        return replace(self, outcome=Outcome.TIMED_OUT, reason=silence)

    def interrupted(self, reason: str) -> PlanTracker:
        """Return the tracker after the plan ends for a reason unrelated to the plan itself."""
        return self if self.outcome is not None else replace(self, outcome=Outcome.INTERRUPTED, reason=reason)

    def _with_call_off_answer(self, rank: int, status: PlanStatus) -> PlanTracker:
        """Record a rank's answer to the call-off. The rank has either committed all layers or dropped the rest."""
        version = status.epoch, status.digest
        tracker = self
        if version in self.versions:
            tracker = self._with_progress(rank, self.versions.index(version) + 1)
        if tracker.progress[rank] == len(self.versions):
            return tracker
        return replace(tracker, objections={rank: status, **self.objections})

    def _committed_count(self, rank: int, status: PlanStatus) -> int:
        """Return the number of the plan's layers that a rank has committed, according to its commit report.

        Raises ``ConflictError`` if the report does not match the plan.
        """
        layers = [update.layer for update in self.decision.layers]
        if status.layer not in layers:
            raise ConflictError(f"rank {rank} committed layer {status.layer}, which is not in its plan")
        index = layers.index(status.layer)
        epoch, digest = self.versions[index]
        if (status.epoch, status.digest) != (epoch, digest):
            raise ConflictError(
                f"rank {rank} committed layer {status.layer} as epoch {status.epoch} (digest {status.digest:#x}), "
                f"but the plan requires epoch {epoch} (digest {digest:#x})"
            )
        return index + 1

    def _with_progress(self, rank: int, count: int) -> PlanTracker:
        """Record that a rank has committed at least the first ``count`` layers."""
        rank_count = max(self.progress[rank], count)
        progress = (*self.progress[:rank], rank_count, *self.progress[rank + 1 :])
        return replace(self, progress=progress, committed=max(self.committed, count))

    def _with_outcome(self) -> PlanTracker:
        """End the plan if all ranks have committed its last layer or dropped it."""
        # In a large group, there are almost always ranks that have yet to answer, and this test is cheaper than listing
        # them.
        incomplete = not self.objections and min(self.progress) < len(self.versions)
        if self.outcome is not None or incomplete or self.silent_ranks:
            return self
        return self._ended_by_objections() if self.objections else replace(self, outcome=Outcome.DONE)

    def _ended_by_objections(self) -> PlanTracker:
        """End the plan with the outcome of the most severe objection.

        The reason combines those given by the ranks that raised this objection.
        """
        states = {status.state for status in self.objections.values()}
        by_severity = PlanState.REFUSED, PlanState.ABORTED, PlanState.CALLED_OFF
        end_state = next(state for state in by_severity if state in states)
        if end_state is PlanState.CALLED_OFF and self.called_off:
            return replace(self, outcome=Outcome.CALLED_OFF, reason=self.called_off)
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, status in sorted(self.objections.items()):
            if status.state is end_state:
                ranks_by_reason.setdefault(status.reason or "no reason given", []).append(rank)
        # The rarest reason comes first. It is usually the root cause, and the other ranks are only reacting to it.
        rarest = sorted(ranks_by_reason.items(), key=lambda item: len(item[1]))[:_MAX_REASONS]
        reason = "; ".join(f"{rank_list(ranks)}: {reason}" for reason, ranks in rarest)
        return replace(self, outcome=Outcome[end_state.name], reason=reason)
