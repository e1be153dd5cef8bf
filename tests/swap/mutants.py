"""Switch machines with one transition broken, each in another way: the explorer has to catch every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from eplb_core.wire.agent import PlanState, PlanStatus
from tests.exploring import Walk
from tests.swap.explored_state import Faults, Scenario
from tests.swap.explorer import ASTRAY, HALFWAY, LATE, PARTS, RIVALS, in_parallel, scenarios, walk
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

Methods = dict[str, Any]


@dataclass(frozen=True)
class _Reinterpreted:
    outcome: VoteOutcome
    result: VoteResult

    @property
    def plans(self) -> frozenset[int]:
        return self.outcome.plans


def _meaning(change: Callable[[VoteOutcome], VoteResult]) -> Methods:
    """A vote's outcome means something else."""
    whole: Any = SwitchState.decide
    return {"decide": lambda self, outcome: whole(self, _Reinterpreted(outcome, change(outcome)))}


def _ballot(change: Callable[[Ballot], Ballot]) -> Methods:
    whole: Any = SwitchState.ballot
    return {"ballot": property(lambda self: change(whole.fget(self)))}


def _given(method: str, change: Callable[..., tuple[Any, ...]]) -> Methods:
    """The method is called on another state, or with something else."""
    whole = getattr(SwitchState, method)
    return {method: lambda self, *given: whole(*change(self, *given))}


def _state(method: str, change: Callable[[Any, Any], SwitchState]) -> Methods:
    """Of the state before and after a method that asks for something, another one is made."""
    whole = getattr(SwitchState, method)

    def changed(self: Any, *given: Any) -> Transition:
        after, actions = whole(self, *given)
        return change(self, after), actions

    return {method: changed}


def _actions(method: str, change: Callable[[Any], Any]) -> Methods:
    """A method asks for something else."""
    whole = getattr(SwitchState, method)

    def changed(self: Any, *given: Any) -> Transition:
        after, actions = whole(self, *given)
        return after, tuple(change(actions))

    return {method: changed}


def _deaf(is_passed_over: Callable[[Any, VoteOutcome], bool]) -> Methods:
    """Nothing follows from some outcomes."""
    whole = SwitchState.decide
    return {"decide": lambda self, vote: (self, ()) if is_passed_over(self, vote) else whole(self, vote)}


def _one_number_twice(self: Any) -> Transition:
    started, (start,) = SwitchState._start(self)
    number = max(1, self.generation)
    return replace(started, generation=number), (replace(start, generation=number),)


def _replaces_its_plan(self: Any, plan: Any, step: int, checked_for: int) -> Transition:
    if self.plan is not None and plan.digest != self.plan.digest:
        return replace(self, plan=plan, index=0), (PlanStatus(plan.plan_id, PlanState.ACCEPTED),)
    return SwitchState.offer(self, plan, step, checked_for)


def _rebased(self: Any, plan: Any, checked_for: int) -> tuple[Any, ...]:
    here = self.installed
    return self, plan._replace(base_epoch=here.epoch, base_digest=here.digest), checked_for


def _hasty(ballot: Ballot) -> Ballot:
    return replace(ballot, progress=READY if ballot.progress == BUSY else ballot.progress)


OFFERED, BUSY, READY = Progress.OFFERED, Progress.TRANSFERRING, Progress.READY
NOTHING, START, COMMIT, ABORT = VoteResult.NOTHING, VoteResult.START, VoteResult.COMMIT, VoteResult.ABORT
CALL_OFF = VoteResult.CALL_OFF
OVERLAPS = _given("offer", lambda m, *given: (replace(m, transfer_runs=False), *given))
ANY_END = _given("with_transfer_ended", lambda m, _, *error: (m, m.generation, *error))
ended = SwitchState.with_transfer_ended
MUTANTS: dict[tuple[int, Faults], dict[str, Methods]] = {
    (LATE, Faults()): {
        "CommitsEarly": _meaning(lambda v: COMMIT if v.slowest == BUSY and v.result is NOTHING else v.result),
        "StartsBeforeAllHold": _meaning(lambda v: START if v.plan_low == 0 != v.plan_high else v.result),
        "VotesWithoutItsAbort": _ballot(lambda ballot: replace(ballot, abort=False)),
        "VotesReadyTooSoon": _ballot(_hasty),
        "KeepsTheGeneration": {"_start": _one_number_twice},
        "CommitsALayerAgain": _state(
            "_commit", lambda m, new: replace(new, index=m.index if new.plan else 0)
        ),
        "InstallsTheTablesAlone": _actions(
            "_commit", lambda asked: [x for x in asked if type(x) is not Commit]
        ),
        "StopsAfterOneLayer": _actions("_commit", lambda asked: asked[:1]),
        "HasNoDeadline": {"at_step": lambda m, _: m},
    },
    (LATE, Faults(transfers=1)): {
        "IgnoresAbortVotes": _meaning(lambda v: replace(v, abort=False).result),
        "AbortsForItselfOnly": _deaf(lambda m, v: v.result is ABORT and m.abort_wish is None),
        "NeverEndsAnAbortedPlan": _deaf(lambda m, v: v.result is ABORT and m.progress == OFFERED),
        "KeepsTheLane": _state("_drop", lambda m, new: replace(new, lane=m.lane)),
        "TakesFailureForSuccess": _given("with_transfer_ended", lambda m, number, *_: (m, number)),
        "KeepsStagingAfterAborts": _actions("_drop", lambda _: ()),
        "ForgetsFailures": {"with_transfer_ended": lambda m, at, error=None: m if error else ended(m, at)},
    },
    (LATE, Faults(calls=1)): {
        "CallsOffForItselfOnly": _deaf(lambda m, v: v.result is CALL_OFF and not m.called_off),
        "CommitsWhatIsCalledOff": _meaning(
            lambda v: COMMIT if v.result is CALL_OFF and v.slowest == READY else v.result
        ),
        "CallsOffAnyPlan": _given("call_off", lambda m, number: (m, m.plan.plan_id if m.plan else number)),
        "DropsACalledPlanAtOnce": {
            "call_off": lambda m, _: SwitchState._called_off(m) if m.plan else (m, ())
        },
        "KeepsACall": _state("_called_off", lambda _, new: replace(new, called_off=True)),
    },
    (LATE, Faults(transfers=1, losses=1)): {
        "GoesBackToAnOldLane": {"reformed": lambda m, *to: replace(SwitchState.reformed(m, *to), lane=m.lane)}
    },
    (LATE, Faults(losses=1)): {
        "KeepsItsPlanWithoutVotes": {"lose_votes": lambda m, why: (replace(m, unheard=why), ())}
    },
    (RIVALS, Faults()): {
        "IgnoresOtherPlans": _meaning(
            lambda v: START if v.plan_low not in (0, v.plan_high) and v.slowest == OFFERED else v.result
        ),
        "TakesAnyGenerationForItsOwn": OVERLAPS | ANY_END,
        "BeginsBesideAnOldTransfer": OVERLAPS,
        "TakesAnyBase": _given("_refusal", _rebased),
        "TakesOlderTerms": _given("_refusal", lambda m, *given: (replace(m, highest_term=0), *given)),
        "LetsAPlanReplaceAnother": {"offer": _replaces_its_plan},
        "KeepsAWish": _state("_commit", lambda m, new: replace(new, abort_wish=m.abort_wish)),
    },
    (HALFWAY, Faults()): {
        "TakesUncheckedMoves": _given("_refusal", lambda m, plan, _: (m, plan, m.installed.digest))
    },
    (PARTS, Faults()): {
        "InstallsTheFirstLayerOfAPart": _actions(
            "_commit",
            lambda asked: [
                replace(x, layers=x.layers[:1], installed=x.installed[:1]) if type(x) is Commit else x
                for x in asked
            ],
        ),
        "StagesTheFirstLayerOfAPart": _actions(
            "_start", lambda asked: [replace(x, layers=x.layers[:1]) for x in asked]
        ),
        "GoesOnByOneLayer": _state(
            "_commit", lambda m, new: replace(new, index=m.index + 1 if new.plan else 0)
        ),
        "OverfillsItsStaging": {"part": property(lambda m: m.plan.layers[m.index :])},
    },
    (ASTRAY, Faults()): {
        "IgnoresOtherPlacements": _meaning(lambda v: replace(v, installed_agree=True).result),
        "VotesWithoutWhatIsInstalled": _ballot(lambda ballot: replace(ballot, installed=1)),
    },
}
"""By the scenario and the faults that give them away soonest, and what is other about each machine."""


class AbortsUnasked(Settlement):
    def with_doubt(self) -> Settlement:
        return self if self.verdict is not None else replace(self, verdict=Verdict.ABORTED)


class AbortsAfterOneAnswer(Settlement):
    def with_answer(self, peer: int, verdict: Verdict) -> Settlement:
        settled = super().with_answer(peer, verdict)
        return replace(settled, verdict=Verdict.ABORTED) if verdict is Verdict.IN_DOUBT else settled


class AnswersAndCommitsAllTheSame(Settlement):
    def with_commit(self) -> Settlement:
        return replace(self, verdict=Verdict.COMMITTED)


def broken_scenarios() -> dict[str, Scenario]:
    """A scenario for each mutant, by its name."""
    found = {
        name: replace(scenarios(faults)[place], machine=type(name, (SwitchState,), methods))
        for (place, faults), machines in MUTANTS.items()
        for name, methods in machines.items()
    }
    for late, faults in (("", Faults(losses=2)), (", out of patience", Faults(impatience=2))):
        for settlement in (AbortsUnasked, AbortsAfterOneAnswer, AnswersAndCommitsAllTheSame):
            found[settlement.__name__ + late] = replace(scenarios(faults)[LATE], settlement=settlement)
        skipping = faults._replace(skips=1, losses=min(faults.losses, 1))
        found[f"CommitsUnconfirmed{late}"] = replace(scenarios(skipping)[LATE], confirms="nothing")
    flags: dict[str, tuple[Faults, dict[str, Any]]] = {
        "TakesARefusalForDeath": (Faults(losses=1, refusals=2), {"refusal_is_death": True}),
        "GivesUpAtOnce": (Faults(errors=1), {"settles_errors": False}),
        "KeepsItsFailureToItself": (Faults(installs=1), {"reports_failures": False}),
        "ConfirmsItsHostsCount": (Faults(skips=1, drifts=2), {"confirms": "its host's count"}),
        "SaysNothingOfInstallsThatWereSettled": (Faults(impatience=1), {"confirms_settled": False}),
    }
    return found | {name: replace(scenarios(faults)[LATE], **flag) for name, (faults, flag) in flags.items()}


def _walked(name: str) -> tuple[str, Walk]:
    return name, walk(broken_scenarios()[name])


def hunt() -> Iterator[tuple[str, Walk]]:
    """Each mutant's name and walk; one that broke no promise has got away."""
    yield from in_parallel(_walked, broken_scenarios())
