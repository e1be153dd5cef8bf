"""Switch machines with one transition broken, each in another way: the explorer has to catch every one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from eplb_service.wire.agent import PlanState, PlanStatus
from tests.exploring import Walk
from tests.swap.explored_state import Faults, Scenario
from tests.swap.explorer import ASTRAY, HALFWAY, LATE, RIVALS, in_parallel, scenarios, walk
from worker_agent.swap.commit_register import Settlement, Verdict
from worker_agent.swap.machine import (
    Ballot,
    Commit,
    Progress,
    SwitchState,
    Transition,
    VoteOutcome,
    VoteResult,
)


class _Decided(SwitchState):
    """A machine for which the outcome of a vote means something else."""

    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        return outcome.result

    def decide(self, outcome: VoteOutcome) -> Transition:
        return super().decide(_Reinterpreted(outcome, self.meaning(outcome)))


@dataclass(frozen=True)
class _Reinterpreted:
    outcome: VoteOutcome
    result: VoteResult

    @property
    def plans(self) -> frozenset[int]:
        return self.outcome.plans


class CommitsWhileTransferring(_Decided):
    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        early = outcome.slowest == Progress.TRANSFERRING and outcome.result is VoteResult.NOTHING
        return VoteResult.COMMIT if early else outcome.result


class StartsBeforeAllHold(_Decided):
    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        early = outcome.plan_low == 0 and outcome.plan_high != 0 and not outcome.abort
        return VoteResult.START if early else outcome.result


class IgnoresAbortVotes(_Decided):
    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        return replace(outcome, abort=False).result


class IgnoresOtherPlans(_Decided):
    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        rivals = outcome.plan_low not in (0, outcome.plan_high)
        return VoteResult.START if rivals and outcome.slowest == Progress.OFFERED else outcome.result


class IgnoresOtherPlacements(_Decided):
    def meaning(self, outcome: VoteOutcome) -> VoteResult:
        return replace(outcome, installed_agree=True).result


class AbortsForItselfOnly(SwitchState):
    def decide(self, outcome: VoteOutcome) -> Transition:
        if outcome.result is VoteResult.ABORT and self.abort_wish is None:
            return self, ()
        return super().decide(outcome)


class VotesWithoutWhatIsInstalled(SwitchState):
    @property
    def ballot(self) -> Ballot:
        return replace(super().ballot, installed=1)


class VotesWithoutItsAbort(SwitchState):
    @property
    def ballot(self) -> Ballot:
        return replace(super().ballot, abort=False)


class VotesReadyTooSoon(SwitchState):
    @property
    def ballot(self) -> Ballot:
        ballot = super().ballot
        return (
            replace(ballot, progress=Progress.READY) if ballot.progress == Progress.TRANSFERRING else ballot
        )


class KeepsTheLane(SwitchState):
    def _drop(self, reason: str) -> Transition:
        dropped, actions = super()._drop(reason)
        return replace(dropped, lane=self.lane), actions


class KeepsTheGeneration(SwitchState):
    def _start(self) -> Transition:
        started, actions = super()._start()
        if started.generation == 1:
            return started, actions
        (start,) = actions
        return replace(started, generation=self.generation), (replace(start, generation=self.generation),)


class BeginsBesideAnOldTransfer(SwitchState):
    def offer(self, plan: Any, step: int, checked_for: int) -> Transition:
        return SwitchState.offer(replace(self, transfer_runs=False), plan, step, checked_for)


class TakesAnyGenerationForItsOwn(BeginsBesideAnOldTransfer):
    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        return super().with_transfer_ended(self.generation, error)


class TakesFailureForSuccess(SwitchState):
    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        return super().with_transfer_ended(generation, None)


class KeepsStagingAfterAborts(SwitchState):
    def _drop(self, reason: str) -> Transition:
        dropped, actions = super()._drop(reason)
        return dropped, actions[:0]


class TakesAnyBase(SwitchState):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        fits = plan._replace(base_epoch=self.installed.epoch, base_digest=self.installed.digest)
        return super()._refusal(fits, checked_for)


class TakesUncheckedMoves(SwitchState):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        return super()._refusal(plan, self.installed.digest)


class TakesOlderTerms(SwitchState):
    def _refusal(self, plan: Any, checked_for: int) -> str | None:
        return SwitchState._refusal(replace(self, highest_term=0), plan, checked_for)


class LetsAPlanReplaceAnother(SwitchState):
    def offer(self, plan: Any, step: int, checked_for: int) -> Transition:
        if self.plan is not None and plan.digest != self.plan.digest:
            return replace(self, plan=plan, index=0), (PlanStatus(plan.plan_id, PlanState.ACCEPTED),)
        return super().offer(plan, step, checked_for)


class CommitsTheSameLayerAgain(SwitchState):
    def _commit(self) -> Transition:
        committed, actions = super()._commit()
        return committed if committed.plan is None else replace(committed, index=self.index), actions


class InstallsTheTablesAlone(SwitchState):
    def _commit(self) -> Transition:
        committed, actions = super()._commit()
        return committed, tuple(action for action in actions if not isinstance(action, Commit))


class KeepsAWishAfterTheLastCommit(SwitchState):
    def _commit(self) -> Transition:
        committed, actions = super()._commit()
        return replace(committed, abort_wish=self.abort_wish), actions


class StopsAfterOneLayer(SwitchState):
    def _commit(self) -> Transition:
        committed, actions = super()._commit()
        return committed, actions[:1]


class GoesBackToAnOldLane(SwitchState):
    def reformed(self, generation: int, lane: int) -> SwitchState:
        return replace(super().reformed(generation, lane), lane=self.lane)


class KeepsItsPlanWithoutVotes(SwitchState):
    def lose_votes(self, reason: str) -> Transition:
        return replace(self, unheard=reason), ()


class HasNoDeadline(SwitchState):
    def at_step(self, step: int) -> SwitchState:
        return self


class ForgetsFailedTransfers(SwitchState):
    def with_transfer_ended(self, generation: int, error: str | None = None) -> SwitchState:
        return super().with_transfer_ended(generation, error) if error is None else self


class NeverEndsAnAbortedPlan(SwitchState):
    def decide(self, outcome: VoteOutcome) -> Transition:
        if outcome.result is VoteResult.ABORT and self.progress == Progress.OFFERED:
            return self, ()
        return super().decide(outcome)


class AbortsUnasked(Settlement):
    def doubted(self) -> Settlement:
        return self if self.verdict is not None else replace(self, verdict=Verdict.ABORTED)


class AbortsAfterOneAnswer(Settlement):
    def answered(self, peer: int, verdict: Verdict) -> Settlement:
        settled = super().answered(peer, verdict)
        return replace(settled, verdict=Verdict.ABORTED) if verdict is Verdict.IN_DOUBT else settled


class AnswersAndCommitsAllTheSame(Settlement):
    def heard(self) -> Settlement:
        return replace(self, verdict=Verdict.COMMITTED)


MUTANTS: dict[type[SwitchState], tuple[int, Faults]] = {
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
    KeepsStagingAfterAborts: (LATE, Faults(1, 0, 0)),
    TakesAnyBase: (RIVALS, Faults(0, 0, 0)),
    TakesUncheckedMoves: (HALFWAY, Faults(0, 0, 0)),
    TakesOlderTerms: (RIVALS, Faults(0, 0, 0)),
    LetsAPlanReplaceAnother: (RIVALS, Faults(0, 0, 0)),
    CommitsTheSameLayerAgain: (LATE, Faults(0, 0, 0)),
    InstallsTheTablesAlone: (LATE, Faults(0, 0, 0)),
    KeepsAWishAfterTheLastCommit: (RIVALS, Faults(0, 0, 0)),
    StopsAfterOneLayer: (LATE, Faults(0, 0, 0)),
    GoesBackToAnOldLane: (LATE, Faults(1, 0, 1)),
    KeepsItsPlanWithoutVotes: (LATE, Faults(0, 0, 1)),
    HasNoDeadline: (LATE, Faults(0, 0, 0)),
    ForgetsFailedTransfers: (LATE, Faults(1, 0, 0)),
    NeverEndsAnAbortedPlan: (LATE, Faults(1, 0, 0)),
}
"""Each with the scenario and the faults that give it away soonest."""


def broken_scenarios() -> dict[str, Scenario]:
    """A scenario for each mutant, by its name."""
    found = {
        machine.__name__: replace(scenarios(faults)[place], machine=machine)
        for machine, (place, faults) in MUTANTS.items()
    }
    for late, faults in (("", Faults(losses=2)), (", out of patience", Faults(impatience=2))):
        for settlement in (AbortsUnasked, AbortsAfterOneAnswer, AnswersAndCommitsAllTheSame):
            found[settlement.__name__ + late] = replace(scenarios(faults)[LATE], settlement=settlement)
        skipping = faults._replace(skips=1, losses=min(faults.losses, 1))
        found[f"CommitsUnconfirmed{late}"] = replace(scenarios(skipping)[LATE], confirms=False)
    failing = scenarios(Faults(installs=1))[LATE]
    refusing = scenarios(Faults(losses=1, refusals=2))[LATE]
    found["TakesARefusalForDeath"] = replace(refusing, refusal_is_death=True)
    erring = scenarios(Faults(errors=1))[LATE]
    found["GivesUpAtOnce"] = replace(erring, settles_errors=False)
    found["KeepsItsFailureToItself"] = replace(failing, reports_failures=False)
    return found


def hunt() -> Iterator[tuple[str, Walk]]:
    """Each mutant's name and walk; one that broke no promise has got away."""
    broken = broken_scenarios()
    yield from zip(broken, in_parallel(walk, broken.values()), strict=True)
