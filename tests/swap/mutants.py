"""Switch state machines that each have one broken transition. The explorer must catch all of them."""

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
    """Change the result that a state machine derives from a vote's outcome."""
    decide: Any = SwitchState.decide
    return {"decide": lambda self, outcome: decide(self, _Reinterpreted(outcome, change(outcome)))}


def _ballot(change: Callable[[Ballot], Ballot]) -> Methods:
    """Change the ballot that a state machine casts."""
    ballot: Any = SwitchState.ballot
    return {"ballot": property(lambda self: change(ballot.fget(self)))}


def _arguments(method: str, change: Callable[..., tuple[Any, ...]]) -> Methods:
    """Call the method on a changed state or with changed arguments."""
    original = getattr(SwitchState, method)
    return {method: lambda self, *arguments: original(*change(self, *arguments))}


def _state(method: str, change: Callable[[Any, Any], SwitchState]) -> Methods:
    """Replace the state that a transition returns. ``change`` receives the states before and after it."""
    original = getattr(SwitchState, method)

    def changed(self: Any, *arguments: Any) -> Transition:
        after, actions = original(self, *arguments)
        return change(self, after), actions

    return {method: changed}


def _actions(method: str, change: Callable[[Any], Any]) -> Methods:
    """Change the actions that a transition returns."""
    original = getattr(SwitchState, method)

    def changed(self: Any, *arguments: Any) -> Transition:
        after, actions = original(self, *arguments)
        return after, tuple(change(actions))

    return {method: changed}


def _ignoring(is_ignored: Callable[[Any, VoteOutcome], bool]) -> Methods:
    """Ignore some outcomes."""
    decide = SwitchState.decide
    return {"decide": lambda self, vote: (self, ()) if is_ignored(self, vote) else decide(self, vote)}


def _reuses_its_generation(self: Any) -> Transition:
    started, (start,) = SwitchState._start(self)
    number = max(1, self.generation)
    return replace(started, generation=number), (replace(start, generation=number),)


def _replaces_its_plan(self: Any, plan: Any, step: int, checked_for: int) -> Transition:
    if self.plan is not None and plan.digest != self.plan.digest:
        return replace(self, plan=plan, index=0), (PlanStatus(plan.plan_id, PlanState.ACCEPTED),)
    return SwitchState.offer(self, plan, step, checked_for)


def _rebased(self: Any, plan: Any, checked_for: int) -> tuple[Any, ...]:
    installed = self.installed
    return self, plan._replace(base_epoch=installed.epoch, base_digest=installed.digest), checked_for


def _hasty(ballot: Ballot) -> Ballot:
    return replace(ballot, progress=READY if ballot.progress == BUSY else ballot.progress)


OFFERED = Progress.OFFERED
BUSY = Progress.TRANSFERRING
READY = Progress.READY
NOTHING = VoteResult.NOTHING
START = VoteResult.START
COMMIT = VoteResult.COMMIT
ABORT = VoteResult.ABORT
CALL_OFF = VoteResult.CALL_OFF
OVERLAPS = _arguments("offer", lambda m, *arguments: (replace(m, transfer_runs=False), *arguments))
ANY_END = _arguments("with_transfer_ended", lambda m, _, *error: (m, m.generation, *error))
ended = SwitchState.with_transfer_ended
MUTANTS: dict[tuple[int, Faults], dict[str, Methods]] = {
    (LATE, Faults()): {
        "CommitsEarly": _meaning(lambda v: COMMIT if v.slowest == BUSY and v.result is NOTHING else v.result),
        "StartsBeforeAllHold": _meaning(lambda v: START if v.plan_low == 0 != v.plan_high else v.result),
        "VotesWithoutItsAbort": _ballot(lambda ballot: replace(ballot, abort=False)),
        "VotesReadyTooSoon": _ballot(_hasty),
        "KeepsTheGeneration": {"_start": _reuses_its_generation},
        "CommitsALayerAgain": _state(
            "_commit", lambda m, new: replace(new, index=m.index if new.plan else 0)
        ),
        "InstallsOnlyTheTables": _actions(
            "_commit", lambda actions: [x for x in actions if type(x) is not Commit]
        ),
        "StopsAfterOneLayer": _actions("_commit", lambda actions: actions[:1]),
        "HasNoDeadline": {"at_step": lambda m, _: m},
    },
    (LATE, Faults(transfers=1)): {
        "IgnoresAbortVotes": _meaning(lambda v: replace(v, abort=False).result),
        "AbortsForItselfOnly": _ignoring(lambda m, v: v.result is ABORT and m.abort_wish is None),
        "NeverEndsAnAbortedPlan": _ignoring(lambda m, v: v.result is ABORT and m.progress == OFFERED),
        "KeepsTheLane": _state("_drop", lambda m, new: replace(new, lane=m.lane)),
        "TreatsFailureAsSuccess": _arguments("with_transfer_ended", lambda m, number, *_: (m, number)),
        "KeepsStagingAfterAborts": _actions("_drop", lambda _: ()),
        "ForgetsFailures": {"with_transfer_ended": lambda m, at, error=None: m if error else ended(m, at)},
    },
    (LATE, Faults(calls=1)): {
        "CallsOffForItselfOnly": _ignoring(lambda m, v: v.result is CALL_OFF and not m.called_off),
        "CommitsACalledOffPlan": _meaning(
            lambda v: COMMIT if v.result is CALL_OFF and v.slowest == READY else v.result
        ),
        "CallsOffAnyPlan": _arguments(
            "call_off", lambda m, number: (m, m.plan.plan_id if m.plan else number)
        ),
        "DropsACalledOffPlanAtOnce": {
            "call_off": lambda m, _: SwitchState._called_off(m) if m.plan else (m, ())
        },
        "KeepsACallOff": _state("_called_off", lambda _, new: replace(new, called_off=True)),
    },
    (LATE, Faults(transfers=1, losses=1)): {
        "ReturnsToAnOldLane": {"reformed": lambda m, *to: replace(SwitchState.reformed(m, *to), lane=m.lane)}
    },
    (LATE, Faults(losses=1)): {
        "KeepsItsPlanWithoutVotes": {"lose_votes": lambda m, why: (replace(m, votes_lost=why), ())}
    },
    (RIVALS, Faults()): {
        "IgnoresOtherPlans": _meaning(
            lambda v: START if v.plan_low not in (0, v.plan_high) and v.slowest == OFFERED else v.result
        ),
        "AcceptsAnyGeneration": OVERLAPS | ANY_END,
        "StartsDuringAnOldTransfer": OVERLAPS,
        "AcceptsAnyBase": _arguments("_refusal", _rebased),
        "AcceptsOlderTerms": _arguments(
            "_refusal", lambda m, *arguments: (replace(m, highest_term=0), *arguments)
        ),
        "LetsAPlanReplaceAnother": {"offer": _replaces_its_plan},
        "KeepsAnAbortWish": _state("_commit", lambda m, new: replace(new, abort_wish=m.abort_wish)),
    },
    (HALFWAY, Faults()): {
        "AcceptsUncheckedMoves": _arguments("_refusal", lambda m, plan, _: (m, plan, m.installed.digest))
    },
    (PARTS, Faults()): {
        "InstallsTheFirstLayerOfAPart": _actions(
            "_commit",
            lambda actions: [
                replace(x, layers=x.layers[:1], installed=x.installed[:1]) if type(x) is Commit else x
                for x in actions
            ],
        ),
        "StagesTheFirstLayerOfAPart": _actions(
            "_start", lambda actions: [replace(x, layers=x.layers[:1]) for x in actions]
        ),
        "AdvancesByOneLayer": _state(
            "_commit", lambda m, new: replace(new, index=m.index + 1 if new.plan else 0)
        ),
        "OverfillsItsStaging": {"part": property(lambda m: m.plan.layers[m.index :])},
    },
    (ASTRAY, Faults()): {
        "IgnoresOtherPlacements": _meaning(lambda v: replace(v, installed_agree=True).result),
        "VotesWithoutItsLayout": _ballot(lambda ballot: replace(ballot, installed=1)),
    },
}
"""Each mutant's changed methods, grouped by the scenario and faults that expose the mutant soonest."""


class AbortsWithoutAsking(Settlement):
    def with_doubt(self) -> Settlement:
        return self if self.verdict is not None else replace(self, verdict=Verdict.ABORTED)


class AbortsAfterOneAnswer(Settlement):
    def with_answer(self, peer: int, verdict: Verdict) -> Settlement:
        settled = super().with_answer(peer, verdict)
        return replace(settled, verdict=Verdict.ABORTED) if verdict is Verdict.IN_DOUBT else settled


class CommitsAfterAnsweringInDoubt(Settlement):
    def with_commit(self) -> Settlement:
        return replace(self, verdict=Verdict.COMMITTED)


def broken_scenarios() -> dict[str, Scenario]:
    """Return each mutant's scenario, keyed by the mutant's name."""
    broken = {
        name: replace(scenarios(faults)[index], machine=type(name, (SwitchState,), methods))
        for (index, faults), machines in MUTANTS.items()
        for name, methods in machines.items()
    }
    for late, faults in (("", Faults(losses=2)), (", after a timeout", Faults(impatience=2))):
        for settlement in (AbortsWithoutAsking, AbortsAfterOneAnswer, CommitsAfterAnsweringInDoubt):
            broken[settlement.__name__ + late] = replace(scenarios(faults)[LATE], settlement=settlement)
        skipping = faults._replace(skips=1, losses=min(faults.losses, 1))
        broken[f"CommitsUnconfirmed{late}"] = replace(scenarios(skipping)[LATE], confirms="nothing")
    flags: dict[str, tuple[Faults, dict[str, Any]]] = {
        "TreatsARefusalAsDeath": (Faults(losses=1, refusals=2), {"refusal_is_death": True}),
        "ServesWithoutItsPeersInstalls": (
            Faults(losses=1, presumptions=2),
            {"waits_for_installs": False},
        ),
        "DoesNotSettleAfterErrors": (Faults(errors=1), {"settles_errors": False}),
        "DoesNotReportItsFailure": (Faults(installs=1), {"reports_failures": False}),
        "ConfirmsItsHostsCount": (Faults(skips=1, drifts=2), {"confirms": "its host's count"}),
        "DoesNotConfirmSettledInstalls": (Faults(impatience=1), {"confirms_settled": False}),
    }
    return broken | {name: replace(scenarios(faults)[LATE], **flag) for name, (faults, flag) in flags.items()}


def _walked(name: str) -> tuple[str, Walk]:
    return name, walk(broken_scenarios()[name])


def hunt() -> Iterator[tuple[str, Walk]]:
    """Yield each mutant's name and walk. A mutant survives if its walk violates no invariant."""
    yield from in_parallel(_walked, broken_scenarios())
