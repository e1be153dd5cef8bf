"""What becomes of one plan, from the offer to each rank's last report.

::

    OFFERED --a layer committed--> (next layer) --all layers, all ranks--> DONE
       |               |
       |               +--a rank aborted--------------------------------> ABORTED  (layers before it stay switched)
       +--a rank refused-----------------------------------------------> REFUSED
       +--silence past the limit---------------------------------------> TIMED_OUT

The ranks decide by their own vote; this only follows what became of it. A report that comes after the end still counts
for what is installed, never for the outcome.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eplb_service.control.core.membership import rank_list
from eplb_service.control.core.offer import Offer
from eplb_service.wire.status import PlanState, PlanStatus

_REASONS_NAMED = 3


class Outcome(str, enum.Enum):
    """How a plan ended."""

    DONE = "done"
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    """The service stopped, or the group was formed again, before the ranks had answered."""


class ContradictionError(Exception):
    """A rank reports of a plan what cannot be."""


@dataclass(frozen=True)
class PlanTracker:
    """One offered plan and what the ranks have reported of it; a value, of which each report makes another.

    Parameters
    ----------
    offer
        What was sent.
    progress
        Layers that each rank is known to have switched, by rank.
    heard_at
        Seconds, by the clock of whoever calls, at which a rank last reported.
    committed
        Layers that are known to have switched.
    outcome, reason
        How it ended, and why where it was not done; ``None`` while it is under way.
    refusals, aborts
        Reasons by rank.
    """

    offer: Offer
    progress: tuple[int, ...]
    heard_at: float
    committed: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    refusals: Mapping[int, str] = field(default_factory=dict)
    aborts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, offer: Offer, ranks: int, now: float) -> PlanTracker:
        """A plan that has just been sent to ``ranks`` ranks."""
        return cls(offer, (0,) * ranks, now)

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks whose last report is still missing."""
        return [rank for rank in range(len(self.progress)) if not self._is_final(rank)]

    @property
    def summary(self) -> str:
        """Its state as operators read it."""
        state = "under way" if self.outcome is None else self.outcome.value.replace("_", " ")
        reason = f": {self.reason}" if self.reason else ""
        return f"plan {self.offer.plan_id} {state}{reason}"

    def after_status(self, rank: int, status: PlanStatus, now: float) -> PlanTracker:
        """A rank has reported; raises ``ContradictionError`` where that does not fit the plan."""
        heard = replace(self, heard_at=now)
        if status.state is PlanState.COMMITTED:
            heard = heard._with_progress(rank, self._reached_by(rank, status))
        elif status.state is PlanState.REFUSED:
            heard = replace(heard, refusals={**self.refusals, rank: status.reason})
        elif status.state is PlanState.ABORTED:
            heard = replace(heard, aborts={**self.aborts, rank: status.reason})
        return heard._with_outcome()

    def after_version(self, rank: int, version: tuple[int, int]) -> PlanTracker | None:
        """A rank serves ``version``, epoch and digest; ``None`` where the plan does not lead there."""
        for index, milestone in enumerate(self.offer.milestones):
            if milestone.version == version:
                return self._with_progress(rank, index + 1)._with_outcome()
        return None

    def after_time(self, now: float, limit: float) -> PlanTracker:
        """Given up after ``limit`` seconds without a report."""
        if self.outcome is not None or now - self.heard_at <= limit:
            return self
        silent = f"{rank_list(self.silent_ranks)} did not answer in time"
        if self.refusals or self.aborts:
            refused = self._refused()
            return replace(refused, reason=f"{refused.reason}; {silent}")
        return replace(self, outcome=Outcome.TIMED_OUT, reason=silent)

    def interrupted(self, reason: str) -> PlanTracker:
        """Ended for a reason outside the plan."""
        return self if self.outcome is not None else replace(self, outcome=Outcome.INTERRUPTED, reason=reason)

    def _reached_by(self, rank: int, status: PlanStatus) -> int:
        """Layers that a rank has switched which reports that it committed one."""
        layers = [milestone.update.layer for milestone in self.offer.milestones]
        if status.layer not in layers:
            raise ContradictionError(f"rank {rank} committed layer {status.layer}, which is not in its plan")
        index = layers.index(status.layer)
        milestone = self.offer.milestones[index]
        if (status.epoch, status.digest) != milestone.version:
            raise ContradictionError(
                f"rank {rank} committed layer {status.layer} as epoch {status.epoch} digest {status.digest:#x}, "
                f"the plan says epoch {milestone.epoch} digest {milestone.digest:#x}"
            )
        return index + 1

    def _with_progress(self, rank: int, count: int) -> PlanTracker:
        reached = max(self.progress[rank], count)
        progress = (*self.progress[:rank], reached, *self.progress[rank + 1 :])
        return replace(self, progress=progress, committed=max(self.committed, count))

    def _is_final(self, rank: int) -> bool:
        done = self.progress[rank] == len(self.offer.milestones)
        return done or rank in self.refusals or rank in self.aborts

    def _with_outcome(self) -> PlanTracker:
        if self.outcome is not None or self.silent_ranks:
            return self
        return self._refused() if self.refusals or self.aborts else replace(self, outcome=Outcome.DONE)

    def _refused(self) -> PlanTracker:
        # Most ranks only follow the one whose fault it was: the reason that the fewest give comes first.
        reasons: dict[str, list[int]] = {}
        for rank, reason in sorted((self.refusals or self.aborts).items()):
            reasons.setdefault(reason or "no reason given", []).append(rank)
        rarest = sorted(reasons.items(), key=lambda item: len(item[1]))[:_REASONS_NAMED]
        return replace(
            self,
            outcome=Outcome.REFUSED if self.refusals else Outcome.ABORTED,
            reason="; ".join(f"{rank_list(ranks)}: {reason}" for reason, ranks in rarest),
        )
