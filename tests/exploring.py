"""Breadth-first search of a small world's states for the shortest sequence of events that violates an invariant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Event: TypeAlias = tuple[Any, ...]
"""An event's name, followed by the members that it affects."""


class Broken(AssertionError):
    """Raised if an invariant is violated."""


TRIPPED = "raised an unexpected error: "
"""Prefix of the report if a machine raised an unexpected error. Such a mutant does not test an invariant."""


def must(holds: bool, otherwise: str) -> None:
    """Raise ``Broken`` with the message ``otherwise`` if the invariant does not hold."""
    if not holds:
        raise Broken(otherwise)


def happen(action: Callable[..., None], *arguments: Any) -> None:
    """Run ``action``. An unexpected error in the machine also violates an invariant."""
    try:
        action(*arguments)
    except Broken:
        raise
    except (AssertionError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise Broken(f"{TRIPPED}{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Walk:
    """Result of a walk: visited states and transitions, and CPU time in seconds.

    ``broken`` describes the shortest sequence of events that violates an invariant, or is ``None``.
    """

    scenario: str
    states: int
    transitions: int
    seconds: float
    broken: str | None

    @property
    def caught(self) -> bool:
        """Return True if a mutant violated an invariant and did not merely raise an unexpected error."""
        return self.broken is not None and not self.broken.startswith(TRIPPED)

    @property
    def line(self) -> str:
        """Summary line for a terminal."""
        seen = f"{self.states:>10,} states {self.transitions:>12,} transitions"
        return f"{self.scenario:<72}{seen} {self.seconds:>7.1f} s"


def walk(scenario: str, first: Any) -> Walk:
    """Visit every state once and stop at the first violated invariant.

    An invariant is also violated if a state can never settle without another fault.

    A state lists its possible ``events()``. ``after(event)`` returns the next state or raises ``Broken``. A state is
    ``settled`` if nothing is pending. An event ``needs_no_fault`` if it happens eventually without further faults.
    States with the same future have equal ``key()``.
    """
    began = time.process_time()
    ids: dict[Hashable, int] = {first.key(): 0}
    parents: list[tuple[int, Event]] = [(-1, ("start",))]
    settled = [first.settled]
    calm: list[list[int]] = [[]]
    frontier = deque([(0, first)])
    transitions = 0

    def reported(broken: str | None) -> Walk:
        return Walk(scenario, len(ids), transitions, time.process_time() - began, broken)

    while frontier:
        state, world = frontier.popleft()
        for event in world.events():
            transitions += 1
            try:
                reached = world.after(event)
            except Broken as broken:
                return reported(f"{broken}\n    after {_story(parents, state, event)}")
            key = reached.key()
            next_state = ids.get(key)
            if next_state is None:
                next_state = ids[key] = len(parents)
                parents.append((state, event))
                settled.append(reached.settled)
                calm.append([])
                frontier.append((next_state, reached))
            if world.needs_no_fault(event):
                calm[next_state].append(state)
    stuck = _never_settling(settled, calm)
    if stuck is not None:
        return reported(f"the pending actions can never end\n    after {_story(parents, stuck)}")
    return reported(None)


def report(walks: Iterator[Walk], hunted: Iterator[tuple[str, Walk]]) -> bool:
    """Print the result of each walk and mutant; return True if no invariant is violated and all mutants are caught."""
    good = True
    seen = []
    for result in walks:
        seen.append(result)
        print(result.line, flush=True)
        if result.broken is not None:
            good = False
            print(f"  BROKEN: {result.broken}")
    states = sum(result.states for result in seen)
    transitions = sum(result.transitions for result in seen)
    print(f"{states:,} states, {transitions:,} transitions, {sum(result.seconds for result in seen):.1f} s")
    for name, result in hunted:
        good &= result.caught
        story = "" if result.broken is None else result.broken.splitlines()[0]
        reported = f"caught: {story}" if result.caught else f"SURVIVED {story}"
        print(f"mutant {name:<34} {reported} ({result.states:,} states, {result.seconds:.1f} s)", flush=True)
    return good


def _never_settling(settled: list[bool], calm_into: list[list[int]]) -> int | None:
    """Return the first state that cannot reach a settled one without another fault, by a backward search."""
    good = bytearray(settled)
    waiting = [state for state, is_settled in enumerate(settled) if is_settled]
    while waiting:
        for before in calm_into[waiting.pop()]:
            if not good[before]:
                good[before] = 1
                waiting.append(before)
    return next((state for state, is_good in enumerate(good) if not is_good), None)


def _story(parents: list[tuple[int, Event]], state: int, *final_events: Event) -> str:
    events = list(final_events)
    while state > 0:
        state, event = parents[state]
        events.insert(0, event)
    return ", ".join(" ".join(str(word) for word in event) for event in events)
