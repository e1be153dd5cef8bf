"""Switch machines with one transition broken, each in another way: the explorer has to catch every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.exploring import Walk
from tests.swap.explored_state import Faults
from tests.swap.explorer import scenarios, walk
from worker_agent.swap.ballot import Ballot, Outcome, Progress, VoteResult
from worker_agent.swap.machine import (
    Aborted,
    Accepted,
    Action,
    Commit,
    DropStaging,
    Halted,
    StartTransfer,
    SwitchMachine,
)


class _Decided(SwitchMachine):
    """A machine for which the outcome of a vote means something else."""

    def meaning(self, outcome: Outcome) -> VoteResult:
        return outcome.result

    def decide(self, outcome: Outcome) -> list[Action]:
        return super().decide(_Told(outcome, self.meaning(outcome)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Told:
    outcome: Outcome
    result: VoteResult

    @property
    def plans(self) -> frozenset[int]:
        return self.outcome.plans


class CommitsWhileTransferring(_Decided):
    def meaning(self, outcome: Outcome) -> VoteResult:
        early = outcome.slowest == Progress.TRANSFERRING and outcome.result is VoteResult.NOTHING
        return VoteResult.COMMIT if early else outcome.result


class StartsBeforeAllHold(_Decided):
    def meaning(self, outcome: Outcome) -> VoteResult:
        early = outcome.plan_low == 0 and outcome.plan_high != 0 and not outcome.abort
        return VoteResult.START if early else outcome.result


class IgnoresAbortVotes(_Decided):
    def meaning(self, outcome: Outcome) -> VoteResult:
        return replace(outcome, abort=False).decision


class IgnoresOtherPlans(_Decided):
    def meaning(self, outcome: Outcome) -> VoteResult:
        rivals = outcome.plan_low not in (0, outcome.plan_high)
        return VoteResult.START if rivals and outcome.slowest == Progress.OFFERED else outcome.result


class IgnoresOtherPlacements(_Decided):
    def meaning(self, outcome: Outcome) -> VoteResult:
        return replace(outcome, installed_agree=True).decision


class AbortsForItselfOnly(SwitchMachine):
    def decide(self, outcome: Outcome) -> list[Action]:
        if outcome.result is VoteResult.ABORT and self._abort_wish is None:
            return []
        return super().decide(outcome)


class VotesWithoutWhatIsInstalled(SwitchMachine):
    def ballot(self) -> Ballot:
        return replace(super().ballot(), installed=1)


class VotesWithoutItsAbort(SwitchMachine):
    def ballot(self) -> Ballot:
        return replace(super().ballot(), abort=False)


class VotesReadyTooSoon(SwitchMachine):
    def ballot(self) -> Ballot:
        ballot = super().ballot()
        return (
            replace(ballot, progress=Progress.READY) if ballot.progress == Progress.TRANSFERRING else ballot
        )


class KeepsTheLane(SwitchMachine):
    def _drop(self, reason: str) -> list[Action]:
        lane = self.lane
        actions = super()._drop(reason)
        self.lane = lane
        return actions


class KeepsTheGeneration(SwitchMachine):
    def _start(self) -> list[Action]:
        actions = super()._start()
        if self.generation > 1:
            self.generation -= 1
            started = actions[0]
            assert isinstance(started, StartTransfer)
            return [replace(started, generation=self.generation)]
        return actions


class TakesAnyGenerationForItsOwn(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        self._transfer_runs = False
        return super()._refusal(plan, checked_for)

    def transfer_ended(self, generation: int, error: str | None = None) -> list[Action]:
        return super().transfer_ended(self.generation, error)


class BeginsBesideAnOldTransfer(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        self._transfer_runs = False
        return super()._refusal(plan, checked_for)


class TakesFailureForSuccess(SwitchMachine):
    def transfer_ended(self, generation: int, error: str | None = None) -> list[Action]:
        return super().transfer_ended(generation, None)


class GivesUpAtOnce(SwitchMachine):
    def halt(self, reason: str) -> list[Action]:
        told: list[Action] = [Halted(reason)] if self.halted is None else []
        self.halted = reason
        return [*self._drop(reason), *told]


class KeepsStagingAfterAborts(SwitchMachine):
    def _drop(self, reason: str) -> list[Action]:
        return [action for action in super()._drop(reason) if not isinstance(action, DropStaging)]


class TakesAnyBase(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        fits = plan._replace(base_epoch=self.installed.epoch, base_digest=self.installed.digest)
        return super()._refusal(fits, checked_for)


class TakesUncheckedMoves(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        return super()._refusal(plan, self.installed.digest)


class TakesOlderTerms(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        self._highest_term = 0
        return super()._refusal(plan, checked_for)


class TakesPlansThoughHalted(SwitchMachine):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        halted, self.halted = self.halted, None
        reason = super()._refusal(plan, checked_for)
        self.halted = halted
        return reason


class LetsAPlanReplaceAnother(SwitchMachine):
    def offer(self, plan: Any, step: int, checked_for: int) -> list[Action]:
        if self._plan is not None and plan.digest != self._plan.digest:
            self._plan, self._index = plan, 0
            return [Accepted(plan.plan_id, 0)]
        return super().offer(plan, step, checked_for)


class CommitsTheSameLayerAgain(SwitchMachine):
    def _commit(self) -> list[Action]:
        actions = super()._commit()
        if self._plan is not None:
            self._index -= 1
        return actions


class InstallsTheTablesAlone(SwitchMachine):
    def _commit(self) -> list[Action]:
        return [action for action in super()._commit() if not isinstance(action, Commit)]


class KeepsAWishAfterTheLastCommit(SwitchMachine):
    def _commit(self) -> list[Action]:
        wish = self._abort_wish
        actions = super()._commit()
        self._abort_wish = wish
        return actions


class StopsAfterOneLayer(SwitchMachine):
    def _commit(self) -> list[Action]:
        return super()._commit()[:1]


class HasNoDeadline(SwitchMachine):
    def tick(self, step: int) -> list[Action]:
        return []


class ForgetsFailedTransfers(SwitchMachine):
    def transfer_ended(self, generation: int, error: str | None = None) -> list[Action]:
        return super().transfer_ended(generation, error) if error is None else []


class NeverEndsAnAbortedPlan(SwitchMachine):
    def _drop(self, reason: str) -> list[Action]:
        return [action for action in super()._drop(reason) if not isinstance(action, Aborted)] and []

    def decide(self, outcome: Outcome) -> list[Action]:
        if outcome.result is VoteResult.ABORT and self.progress == Progress.OFFERED:
            return []
        return super().decide(outcome)


RIVALS, LATE, HALFWAY, AFTER, ASTRAY = range(5)
"""Places in ``scenarios``."""

MUTANTS: dict[type[SwitchMachine], tuple[int, Faults]] = {
    CommitsWhileTransferring: (LATE, Faults(0, 0, 0)),
    StartsBeforeAllHold: (LATE, Faults(0, 0, 0)),
    IgnoresAbortVotes: (LATE, Faults(1, 0, 0)),
    IgnoresOtherPlans: (RIVALS, Faults(0, 0, 0)),
    IgnoresOtherPlacements: (ASTRAY, Faults(0, 0, 0)),
    AbortsForItselfOnly: (LATE, Faults(1, 0, 0)),
    VotesWithoutWhatIsInstalled: (ASTRAY, Faults(0, 0, 0)),
    VotesWithoutItsAbort: (LATE, Faults(0, 0, 0)),
    VotesReadyTooSoon: (LATE, Faults(0, 0, 0)),
    KeepsTheLane: (LATE, Faults(1, 0, 0)),
    KeepsTheGeneration: (LATE, Faults(0, 0, 0)),
    TakesAnyGenerationForItsOwn: (RIVALS, Faults(0, 0, 0)),
    BeginsBesideAnOldTransfer: (RIVALS, Faults(0, 0, 0)),
    TakesFailureForSuccess: (LATE, Faults(1, 0, 0)),
    GivesUpAtOnce: (LATE, Faults(0, 1, 0)),
    KeepsStagingAfterAborts: (LATE, Faults(1, 0, 0)),
    TakesAnyBase: (RIVALS, Faults(0, 0, 0)),
    TakesUncheckedMoves: (HALFWAY, Faults(0, 0, 0)),
    TakesOlderTerms: (RIVALS, Faults(0, 0, 0)),
    TakesPlansThoughHalted: (ASTRAY, Faults(0, 0, 0)),
    LetsAPlanReplaceAnother: (RIVALS, Faults(0, 0, 0)),
    CommitsTheSameLayerAgain: (LATE, Faults(0, 0, 0)),
    InstallsTheTablesAlone: (LATE, Faults(0, 0, 0)),
    KeepsAWishAfterTheLastCommit: (LATE, Faults(0, 1, 0)),
    StopsAfterOneLayer: (LATE, Faults(0, 0, 0)),
    HasNoDeadline: (LATE, Faults(0, 0, 0)),
    ForgetsFailedTransfers: (LATE, Faults(1, 0, 0)),
    NeverEndsAnAbortedPlan: (LATE, Faults(1, 0, 0)),
}
"""Each with the scenario and the faults that give it away soonest."""


def hunt() -> Iterator[tuple[str, Walk]]:
    """Each mutant's name and walk; one that broke no promise has got away."""
    for machine, (place, faults) in MUTANTS.items():
        yield machine.__name__, walk(replace(scenarios(faults)[place], machine=machine))
    unasked = replace(scenarios(Faults(0, 0, 1))[LATE], asks_register=False)
    yield "AbortsAnUnheardVoteUnasked", walk(unasked)
