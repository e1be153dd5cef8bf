"""Run scenarios and controls, and compare answers with and without moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from eplb_lab.conformance.comparison import Tolerance, compare
from eplb_lab.conformance.engine import Answer, Engine, EngineError, Setup, Start
from eplb_lab.conformance.scenarios import CONTROLS, SCENARIOS, Load, Scenario, Session

Verdict: TypeAlias = Literal["equal", "differs", "failed", "not possible", "detected", "not detected"]
_BAD = ("differs", "failed", "not detected")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one scenario or control.

    Parameters
    ----------
    name
        Name of the scenario, or ``control: `` followed by the fault.
    verdict
        ``not possible`` if the engine cannot run the scenario even without moves, ``failed`` if only the moves make it
        fail.
    moves
        Number of placements that the engine adopted.
    experts
        Number of slots to which the orders assigned a different expert.
    tokens
        Number of compared tokens.
    largest
        Largest difference between the log-probabilities of equal tokens.
    ties
        Number of tokens that differ by more than rounding but count as ties.
    detail
        First difference, or the reason.
    """

    name: str
    verdict: Verdict
    moves: int = 0
    experts: int = 0
    tokens: int = 0
    largest: float = 0.0
    ties: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Outcomes of a run on one engine."""

    engine: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """True if experts moved, no answer differs and all controls were detected."""
        moved = any(outcome.verdict == "equal" and outcome.moves for outcome in self.outcomes)
        return moved and not any(outcome.verdict in _BAD for outcome in self.outcomes)


def run(
    name: str,
    start: Start,
    load: Load,
    tolerance: Tolerance,
    scenarios: Sequence[Scenario] = SCENARIOS,
    progress: Callable[[Outcome], None] = lambda _: None,
) -> Report:
    """Run scenarios and then the controls that belong to them.

    Parameters
    ----------
    name
        Name of the engine in the report.
    start
        Function that starts an engine.
    load
        Requests to serve.
    tolerance
        Differences that do not matter.
    scenarios
        Scenarios to run, in this order.
    progress
        Callback that receives each outcome.
    """
    kit = _Run(start, load, tolerance)
    outcomes = []
    try:
        for outcome in kit.outcomes(scenarios):
            outcomes.append(outcome)
            progress(outcome)
    finally:
        kit.close()
    return Report(name, tuple(outcomes))


class _Run:
    def __init__(self, start: Start, load: Load, tolerance: Tolerance) -> None:
        self._start = start
        self._load = load
        self._tolerance = tolerance
        self._shared: Engine | None = None
        self._expected: dict[str, list[Answer]] = {}

    def outcomes(self, scenarios: Sequence[Scenario]) -> Iterator[Outcome]:
        """Yield the outcome of each scenario, then of each control whose scenario has expected answers."""
        shared = [scenario for scenario in scenarios if not scenario.own_engine]
        shared_reason = self._expect(shared)
        for scenario in scenarios:
            reason = self._expect_alone(scenario) if scenario.own_engine else shared_reason
            if reason is not None:
                yield Outcome(scenario.name, "not possible", detail=reason)
            else:
                yield self._checked(scenario)
        self._close_shared()
        for fault, scenario in CONTROLS:
            if scenario.name in self._expected:
                yield self._controlled(fault, scenario)

    def close(self) -> None:
        """Stop the shared engine."""
        self._close_shared()

    def _expect(self, shared: Sequence[Scenario]) -> str | None:
        """Serve the rounds of all shared scenarios before the first move. Return the reason if that is not possible."""
        if not shared:
            return None
        try:
            self._shared = self._start(Setup())
            expected = {
                scenario.name: self._play(scenario, self._shared, moving=False).answers for scenario in shared
            }
        except EngineError as error:
            self._close_shared()
            return str(error)
        self._expected |= expected
        return None

    def _expect_alone(self, scenario: Scenario) -> str | None:
        """Serve the rounds of a scenario without moves. Return the reason if that is not possible."""
        try:
            with self._engine(scenario.setup) as engine:
                self._expected[scenario.name] = self._play(scenario, engine, moving=False).answers
        except EngineError as error:
            return str(error)
        return None

    def _checked(self, scenario: Scenario) -> Outcome:
        try:
            if scenario.own_engine:
                with self._engine(scenario.setup) as engine:
                    return self._compared(scenario, self._play(scenario, engine, moving=True))
            self._shared = self._shared or self._start(scenario.setup)
            outcome = self._compared(scenario, self._play(scenario, self._shared, moving=True))
            if outcome.verdict != "equal":
                # The engine's weights may be wrong, so the next scenario must start a new engine.
                self._close_shared()
            return outcome
        except EngineError as error:
            self._close_shared()
            return Outcome(scenario.name, "failed", detail=str(error))

    def _controlled(self, fault: str, scenario: Scenario) -> Outcome:
        name = f"control: {fault}"
        try:
            with self._engine(replace(scenario.setup, control=fault)) as engine:
                outcome = self._compared(scenario, self._play(scenario, engine, moving=True))
        except EngineError as error:
            return Outcome(name, "failed", detail=str(error))
        if outcome.verdict == "equal":
            return replace(
                outcome, name=name, verdict="not detected", detail="answers do not reveal the fault"
            )
        return replace(outcome, name=name, verdict="detected")

    def _play(self, scenario: Scenario, engine: Engine, *, moving: bool) -> Session:
        session = Session(engine, self._load, moving)
        scenario.play(session)
        return session

    def _compared(self, scenario: Scenario, session: Session) -> Outcome:
        result = compare(session.answers, self._expected[scenario.name], self._tolerance)
        return Outcome(
            scenario.name,
            "differs" if result.difference else "equal",
            session.moves,
            session.experts,
            result.tokens,
            result.largest,
            result.ties,
            result.difference or "",
        )

    @contextmanager
    def _engine(self, setup: Setup) -> Iterator[Engine]:
        # Most devices do not have enough memory for two engines at the same time.
        self._close_shared()
        engine = self._start(setup)
        try:
            yield engine
        finally:
            engine.close()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
