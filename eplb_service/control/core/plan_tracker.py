"""One plan from the offer to each rank's last report.

::

    OFFERED --a layer committed--> (next layer) --all layers, all ranks--> DONE
       |               |
       |               +--a rank aborted--------------------------------> ABORTED  (layers before it stay switched)
       +--a rank refused-----------------------------------------------> REFUSED
       +--the service called it off, all ranks answered-----------------> CALLED_OFF  (as ABORTED)
       +--silence past the limit, while the ranks make steps------------> TIMED_OUT

The ranks decide by their own vote; this only follows what became of it. A report that comes after the end still counts
for what is installed, never for the outcome.
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

_REASONS_NAMED = 3
_IDLE_SHARE = 0.25
"""Share of the limit without a step after which the ranks are idle: they are heard every few seconds."""


class Outcome(str, enum.Enum):
    """The end of a plan."""

    DONE = "done"
    CALLED_OFF = "called_off"
    """Heat changed while the plan was under way. The next decision starts from the layers switched by then."""
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    """The service stopped, or the group was formed again, before the ranks had answered."""


@dataclass(frozen=True)
class PlanTracker:
    """One offered plan and the ranks' reports of it (immutable).

    Parameters
    ----------
    plan_id, base_epoch, base_digest, decision
        Its number, the version that it starts from, and its layers in order with the verdicts.
    versions
        Epoch and digest that the deployment serves once each of its layers has switched.
    progress, committed
        Layers that each rank is known to have switched, by rank, and that any has.
    heard_at
        Seconds, by the clock of whoever calls, at which it was offered, or a rank last reported, less idle time since.
    step, stepped_at
        Furthest step of the ranks, and when that was first seen.
    called_off
        Reason for which the service called the plan off; empty if it did not.
    outcome, reason, objections
        Its end, ``None`` while it is under way, and why where it was not done; how it ended early, by rank.
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
        """Follow the decision's layers from ``base``."""
        digests, versions = list(base.layer_digests), []
        for epoch, update in enumerate(decision.layers, start=base.epoch + 1):
            digests[update.layer] = layer_digest(update.layer, update.phy2log_RS)
            versions.append((epoch, combine_digests(base.placement.experts, digests)))
        return cls(plan_id, base.epoch, base.digest, decision, tuple(versions), (0,) * base.placement.ranks)

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks whose last report is still missing."""
        return [
            rank
            for rank, switched in enumerate(self.progress)
            if switched < len(self.versions) and rank not in self.objections
        ]

    @property
    def was_called_off(self) -> bool:
        """True if the plan ended early because it was outdated."""
        return self.outcome is Outcome.CALLED_OFF

    @property
    def summary(self) -> str:
        """Its state as operators read it."""
        state = "under way" if self.outcome is None else self.outcome.value.replace("_", " ")
        reason = f": {self.reason}" if self.reason else ""
        return f"plan {self.plan_id} {state}{reason}"

    def rank_plan(self, leader_term: int, rank: int, token_groups: Sequence[int]) -> RankPlan:
        """Return what a rank receives; equal for all ranks in all but the rank's own tables.

        ``token_groups`` has the group of each rank.
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
        """Note a rank's report; raises ``ConflictError`` where that does not fit the plan."""
        heard = replace(self, heard_at=now)
        if status.state is PlanState.COMMITTED:
            heard = heard._with_progress(rank, self._reached_by(rank, status))
        elif status.state is PlanState.CALLED_OFF:
            heard = heard._called_off_by(rank, status)
        elif status.state.drops_layers:
            heard = replace(heard, objections={**self.objections, rank: status})
        return heard._with_outcome()

    def calling_off(self, reason: str, now: float) -> PlanTracker:
        """Note that the service calls the plan off. It ends once all ranks have answered."""
        return replace(self, called_off=reason, heard_at=now)

    def after_version(self, rank: int, version: tuple[int, int]) -> PlanTracker | None:
        """Note that a rank serves ``version``, epoch and digest; ``None`` where the plan does not lead there."""
        if version not in self.versions:
            return None
        return self._with_progress(rank, self.versions.index(version) + 1)._with_outcome()

    def after_time(self, now: float, limit: float, step: int | None = None) -> PlanTracker:
        """Give up after ``limit`` seconds without a report.

        Ranks vote as they make steps, so that the time in which they make none does not count: ``step`` is the
        furthest rank's, or ``None`` where ranks are missing, which are not waited for longer.
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
        silent = f"{rank_list(self.silent_ranks)} did not answer in time"
        refused = self._refused() if self.objections else self
        if refused.outcome not in (None, Outcome.CALLED_OFF):
            return replace(refused, reason=f"{refused.reason}; {silent}")
        return replace(self, outcome=Outcome.TIMED_OUT, reason=silent)

    def interrupted(self, reason: str) -> PlanTracker:
        """End for a reason outside the plan."""
        return self if self.outcome is not None else replace(self, outcome=Outcome.INTERRUPTED, reason=reason)

    def _called_off_by(self, rank: int, status: PlanStatus) -> PlanTracker:
        """Note a rank's answer to the call-off. It has either switched all layers or dropped the rest."""
        version = status.epoch, status.digest
        reached = self
        if version in self.versions:
            reached = self._with_progress(rank, self.versions.index(version) + 1)
        if reached.progress[rank] == len(self.versions):
            return reached
        return replace(reached, objections={rank: status, **self.objections})

    def _reached_by(self, rank: int, status: PlanStatus) -> int:
        """Layers that a rank has switched which reports that it committed one."""
        layers = [update.layer for update in self.decision.layers]
        if status.layer not in layers:
            raise ConflictError(f"rank {rank} committed layer {status.layer}, which is not in its plan")
        index = layers.index(status.layer)
        epoch, digest = self.versions[index]
        if (status.epoch, status.digest) != (epoch, digest):
            raise ConflictError(
                f"rank {rank} committed layer {status.layer} as epoch {status.epoch} digest {status.digest:#x}, "
                f"the plan says epoch {epoch} digest {digest:#x}"
            )
        return index + 1

    def _with_progress(self, rank: int, count: int) -> PlanTracker:
        reached = max(self.progress[rank], count)
        progress = (*self.progress[:rank], reached, *self.progress[rank + 1 :])
        return replace(self, progress=progress, committed=max(self.committed, count))

    def _with_outcome(self) -> PlanTracker:
        # Of a thousand ranks some has still to answer nearly always: that is found without listing them.
        waiting = not self.objections and min(self.progress) < len(self.versions)
        if self.outcome is not None or waiting or self.silent_ranks:
            return self
        return self._refused() if self.objections else replace(self, outcome=Outcome.DONE)

    def _refused(self) -> PlanTracker:
        states = {status.state for status in self.objections.values()}
        end = next(
            state for state in (PlanState.REFUSED, PlanState.ABORTED, PlanState.CALLED_OFF) if state in states
        )
        if end is PlanState.CALLED_OFF and self.called_off:
            return replace(self, outcome=Outcome.CALLED_OFF, reason=self.called_off)
        reasons: dict[str, list[int]] = {}
        for rank, status in sorted(self.objections.items()):
            if status.state is end:
                reasons.setdefault(status.reason or "no reason given", []).append(rank)
        # Rarest reason first: it is usually the cause, which the other ranks follow.
        rarest = sorted(reasons.items(), key=lambda item: len(item[1]))[:_REASONS_NAMED]
        reason = "; ".join(f"{rank_list(ranks)}: {reason}" for reason, ranks in rarest)
        return replace(self, outcome=Outcome[end.name], reason=reason)
