"""Walks every state that a small world can reach, breadth first, and reports the shortest story of a broken promise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Event: TypeAlias = tuple[Any, ...]
"""What happens: its name, then to whom."""


class Broken(AssertionError):
    """A promise was broken."""


TRIPPED = "trips over itself: "
"""How a story begins in which a machine raised what it never should. A mutant that does is no defect of use."""


def must(holds: bool, otherwise: str) -> None:
    """Raise ``Broken`` unless it holds."""
    if not holds:
        raise Broken(otherwise)


def happen(what: Callable[..., None], *arguments: Any) -> None:
    """Let it happen; a machine that trips over itself breaks a promise as well."""
    try:
        what(*arguments)
    except Broken:
        raise
    except (AssertionError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise Broken(f"{TRIPPED}{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Walk:
    """What a walk has seen, and the processor's seconds that it took.

    ``broken`` is the shortest story that breaks a promise, or ``None``.
    """

    scenario: str
    states: int
    transitions: int
    seconds: float
    broken: str | None

    @property
    def caught(self) -> bool:
        """Of a mutant: whether it broke a promise, rather than tripping over its own mistakes."""
        return self.broken is not None and not self.broken.startswith(TRIPPED)

    @property
    def line(self) -> str:
        """For a terminal."""
        seen = f"{self.states:>10,} states {self.transitions:>12,} transitions"
        return f"{self.scenario:<72}{seen} {self.seconds:>7.1f} s"


def walk(scenario: str, first: Any) -> Walk:
    """Visit every state once; stops at the first broken promise, also where a state can never settle.

    A state lists the ``events()`` that it admits; ``after(event)`` is the state that follows, or raises ``Broken``. It
    is ``settled`` where nothing is under way. An event ``needs_no_fault`` that happens sooner or later if nothing goes
    wrong any more. The ``key()`` is equal for states from which the same can happen.
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
        here, world = frontier.popleft()
        for event in world.events():
            transitions += 1
            try:
                reached = world.after(event)
            except Broken as broken:
                return reported(f"{broken}\n    after {_story(parents, here, event)}")
            key = reached.key()
            there = ids.get(key)
            if there is None:
                there = ids[key] = len(parents)
                parents.append((here, event))
                settled.append(reached.settled)
                calm.append([])
                frontier.append((there, reached))
            if world.needs_no_fault(event):
                calm[there].append(here)
    stuck = _never_settling(settled, calm)
    if stuck is not None:
        return reported(f"nothing ever ends what is under way\n    after {_story(parents, stuck)}")
    return reported(None)


def report(walks: Iterator[Walk], hunted: Iterator[tuple[str, Walk]]) -> bool:
    """Print what each walk saw and what became of each mutant; whether all was as it should be."""
    good = True
    seen = []
    for one in walks:
        seen.append(one)
        print(one.line, flush=True)
        if one.broken is not None:
            good = False
            print(f"  BROKEN: {one.broken}")
    print(
        f"{sum(one.states for one in seen):,} states, {sum(one.transitions for one in seen):,} transitions, "
        f"{sum(one.seconds for one in seen):.1f} s"
    )
    for name, one in hunted:
        good &= one.caught
        story = "" if one.broken is None else one.broken.splitlines()[0]
        reported = f"caught: {story}" if one.caught else f"SURVIVED {story}"
        print(f"mutant {name:<34} {reported} ({one.states:,} states, {one.seconds:.1f} s)", flush=True)
    return good


def _never_settling(settled: list[bool], calm_into: list[list[int]]) -> int | None:
    """The first state from which no settled one can be reached without another fault; walks backwards."""
    good = bytearray(settled)
    waiting = [state for state, is_settled in enumerate(settled) if is_settled]
    while waiting:
        for before in calm_into[waiting.pop()]:
            if not good[before]:
                good[before] = 1
                waiting.append(before)
    return next((state for state, is_good in enumerate(good) if not is_good), None)


def _story(parents: list[tuple[int, Event]], state: int, *more: Event) -> str:
    events = list(more)
    while state > 0:
        state, event = parents[state]
        events.insert(0, event)
    return ", ".join(" ".join(str(word) for word in event) for event in events)
