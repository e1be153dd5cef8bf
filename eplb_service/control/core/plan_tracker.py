"""The life of one plan, from the offer to each rank's last word.

::

    OFFERED --a layer committed--> (next layer) --all layers, all ranks--> DONE
       |               |
       |               +--a rank aborted--------------------------------> ABORTED  (layers before it stay switched)
       +--a rank refused-----------------------------------------------> REFUSED
       +--silence past the limit---------------------------------------> TIMED_OUT

The ranks decide by their own vote; here is only told what became of it. A word that comes after the end still counts
for what is installed, never for the outcome.
"""

from __future__ import annotations

import enum

from eplb_service.control.core.offer import Milestone, Offer
from eplb_service.control.core.rank_list import rank_list
from eplb_service.wire.status import PlanState, PlanStatus

_REASONS_TOLD = 3


class Outcome(str, enum.Enum):
    """How a plan ended."""

    DONE = "done"
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    """The service stopped, or the group was formed anew, before the ranks had answered."""


class ContradictionError(Exception):
    """A rank says of a plan what cannot be; nothing was changed."""


class PlanTracker:
    """One offered plan and what the ranks have said of it.

    Parameters
    ----------
    offer
        What was sent.
    ranks
        R; each has to give its last word.
    now
        Any clock's seconds; later calls must use the same clock.
    """

    def __init__(self, offer: Offer, ranks: int, now: float) -> None:
        self.offer = offer
        self.committed = 0
        self.outcome: Outcome | None = None
        self.reason = ""
        self._heard_at = now
        self._progress = [0] * ranks
        self._refusals: dict[int, str] = {}
        self._aborts: dict[int, str] = {}

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks whose last word is still missing."""
        return [rank for rank in range(len(self._progress)) if not self._is_final(rank)]

    @property
    def summary(self) -> str:
        """How it stands, in an operator's words."""
        state = "under way" if self.outcome is None else self.outcome.value.replace("_", " ")
        reason = f": {self.reason}" if self.reason else ""
        return f"plan {self.offer.plan_id} {state}{reason}"

    def hear(self, rank: int, status: PlanStatus, now: float) -> list[Milestone]:
        """A rank's word; returns the layers that are now known to have switched, in order.

        Raises ``ContradictionError`` where it does not fit the plan.
        """
        self._heard_at = now
        reached: list[Milestone] = []
        if status.state is PlanState.COMMITTED:
            reached = self._commit(rank, status)
        elif status.state is PlanState.REFUSED:
            self._refusals[rank] = status.reason
        elif status.state is PlanState.ABORTED:
            self._aborts[rank] = status.reason
        self._settle()
        return reached

    def sees(self, rank: int, epoch: int, digest: int) -> list[Milestone] | None:
        """A rank serves ``epoch``: the layers that this proves switched, or ``None`` where the plan leads not there."""
        for index, milestone in enumerate(self.offer.milestones):
            if milestone.version == (epoch, digest):
                reached = self._reach(rank, index + 1)
                self._settle()
                return reached
        return None

    def tick(self, now: float, limit: float) -> None:
        """Give the plan up after ``limit`` seconds without a word."""
        if self.outcome is not None or now - self._heard_at <= limit:
            return
        silent = f"{rank_list(self.silent_ranks)} did not answer in time"
        if self._refusals or self._aborts:
            self._settle_by_refusal()
            self.reason += f"; {silent}"
        else:
            self.outcome, self.reason = Outcome.TIMED_OUT, silent

    def interrupt(self, reason: str) -> None:
        """End it for a reason outside the plan."""
        if self.outcome is None:
            self.outcome, self.reason = Outcome.INTERRUPTED, reason

    def _commit(self, rank: int, status: PlanStatus) -> list[Milestone]:
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
        return self._reach(rank, index + 1)

    def _reach(self, rank: int, count: int) -> list[Milestone]:
        self._progress[rank] = max(self._progress[rank], count)
        reached = self.offer.milestones[self.committed : count]
        self.committed = max(self.committed, count)
        return list(reached)

    def _is_final(self, rank: int) -> bool:
        done = self._progress[rank] == len(self.offer.milestones)
        return done or rank in self._refusals or rank in self._aborts

    def _settle(self) -> None:
        if self.outcome is not None or self.silent_ranks:
            return
        if self._refusals or self._aborts:
            self._settle_by_refusal()
        else:
            self.outcome = Outcome.DONE

    def _settle_by_refusal(self) -> None:
        said = self._refusals or self._aborts
        self.outcome = Outcome.REFUSED if self._refusals else Outcome.ABORTED
        # Most ranks only follow the one whose fault it was: the reason that the fewest give comes first.
        reasons: dict[str, list[int]] = {}
        for rank, reason in sorted(said.items()):
            reasons.setdefault(reason or "no reason given", []).append(rank)
        told = sorted(reasons.items(), key=lambda item: len(item[1]))[:_REASONS_TOLD]
        self.reason = "; ".join(f"{rank_list(ranks)}: {reason}" for reason, ranks in told)
