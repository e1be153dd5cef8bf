"""Walks every state that a scenario can reach, breadth first; ``make explore`` prints what it saw."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.swap.explored_world import FIRST, RANKS, Broken, Event, Faults, Scenario, World, plan_from

Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Walk:
    """What a walk has seen, and the processor's seconds that it took.

    ``broken`` tells the shortest story that breaks a promise, or is ``None``.
    """

    scenario: str
    states: int
    transitions: int
    seconds: float
    broken: str | None

    @property
    def line(self) -> str:
        seen = f"{self.states:>10,} states {self.transitions:>12,} transitions"
        return f"{self.scenario:<44}{seen} {self.seconds:>7.1f} s"


def walk(scenario: Scenario) -> Walk:
    """Visit every state once; stops at the first broken promise, also where a state can never settle."""
    began = time.process_time()
    first = World(scenario)
    ids: dict[Key, int] = {first.key(): 0}
    parents: list[tuple[int, Event]] = [(-1, ("start",))]
    settled = [first.settled]
    calm: list[list[int]] = [[]]
    frontier = deque([(0, first)])
    transitions = 0

    def told(broken: str | None) -> Walk:
        return Walk(scenario.name, len(ids), transitions, time.process_time() - began, broken)

    while frontier:
        here, world = frontier.popleft()
        for event in world.events():
            transitions += 1
            try:
                reached = world.after(event)
            except Broken as broken:
                return told(f"{broken}\n    after {_story(parents, here, event)}")
            key = reached.key()
            there = ids.get(key)
            if there is None:
                there = ids[key] = len(parents)
                parents.append((here, event))
                settled.append(reached.settled)
                calm.append([])
                frontier.append((there, reached))
            if World.needs_no_fault(event):
                calm[there].append(here)
    stuck = _never_settling(settled, calm)
    if stuck is not None:
        return told(f"nothing ever ends what is under way\n    after {_story(parents, stuck)}")
    return told(None)


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


_AFTER_ONE = FIRST.with_layer(0, 1, 1)
_AFTER_BOTH = _AFTER_ONE.with_layer(1, 1, 1)
_LONG_PLAN = plan_from(FIRST, 1, 1, 0, 1)


def scenarios(faults: Faults) -> list[Scenario]:
    """Two plans each: rivals of two services, one after the other, one after an abort halfway, and a rank astray."""
    astray = (FIRST, FIRST.with_layer(0, 7, 7), FIRST)
    assert len(astray) == RANKS
    return [
        Scenario("two services, one base", (_LONG_PLAN, plan_from(FIRST, 2, 2, 0)), faults),
        Scenario("the older service's plan comes late", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 0, 0)), faults),
        Scenario("a plan after an abort halfway", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 2, 0)), faults),
        Scenario("a plan after a whole plan", (_LONG_PLAN, plan_from(_AFTER_BOTH, 2, 1, 0)), faults),
        Scenario("a rank that serves another placement", (_LONG_PLAN,), faults, starts=astray),
    ]


def main() -> None:
    """The full walk, then every mutant; exit code 1 where a promise is broken or a mutant survives."""
    from tests.swap.mutants import hunt

    failed = False
    walks = []
    for scenario in scenarios(Faults(transfers=1, halts=1, losses=1)):
        walks.append(walk(scenario))
        print(walks[-1].line, flush=True)
        if walks[-1].broken is not None:
            failed = True
            print(f"  BROKEN: {walks[-1].broken}")
    print(
        f"{sum(one.states for one in walks):,} states, {sum(one.transitions for one in walks):,} transitions, "
        f"{sum(one.seconds for one in walks):.1f} s"
    )
    for name, hunted in hunt():
        failed |= hunted.broken is None
        told = "SURVIVED" if hunted.broken is None else f"caught: {hunted.broken.splitlines()[0]}"
        print(f"mutant {name:<30} {told} ({hunted.states:,} states, {hunted.seconds:.1f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
