"""Exhaustive exploration of layer switches with three ranks and two plans. ``make explore`` prints the state counts.

Each fault is explored in all scenarios. Combinations of faults are explored only in the smallest scenario that still
has a plan of two layers, an abort halfway, and a later plan from a different service.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tests.exploring import Walk, report
from tests.exploring import walk as walk_world
from tests.swap.explored_state import RANKS, Faults, Scenario
from tests.swap.explored_world import World
from tests.swap.tags import FIRST, plan_from

_AFTER_ONE = FIRST.with_layer(0, 1, 1)
_AFTER_BOTH = _AFTER_ONE.with_layer(1, 1, 1)
_LONG_PLAN = plan_from(FIRST, 1, 1, 0, 1)
_PLAN_OF_PARTS = plan_from(FIRST, 1, 1, 0, 1, 2)
_PROCESSES = 2

RIVALS, LATE, HALFWAY, AFTER, ASTRAY, PARTS = range(6)
"""Indices into ``scenarios``."""

SINGLE = (
    Faults(),
    Faults(transfers=1),
    Faults(errors=1),
    Faults(losses=1),
    Faults(skips=1),
    Faults(installs=1),
    Faults(calls=2),
)
COMBINED = (
    Faults(transfers=1, errors=1, losses=1),
    Faults(transfers=1, losses=1, skips=1),
    Faults(losses=2),
    Faults(losses=1, skips=1, impatience=2),
    Faults(transfers=1, losses=1, installs=1),
    Faults(losses=1, refusals=2),
    Faults(losses=1, presumptions=2),
    Faults(skips=1, drifts=2),
    Faults(transfers=1, calls=1),
    Faults(losses=1, calls=1),
    Faults(skips=1, calls=1),
)


def scenarios(faults: Faults) -> list[Scenario]:
    """Return the scenarios with these faults, in the order of the indices above.

    In the last scenario, the first plan has two parts: one of two layers, then one of a single layer.
    """
    astray = (FIRST, FIRST.with_layer(0, 7, 7), FIRST)
    assert len(astray) == RANKS
    return [
        Scenario("two services, one base", (_LONG_PLAN, plan_from(FIRST, 2, 2, 0)), faults),
        Scenario(
            "the older service's plan arrives late", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 0, 0)), faults
        ),
        Scenario("a plan after an abort halfway", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 2, 0)), faults),
        Scenario("a plan after a whole plan", (_LONG_PLAN, plan_from(_AFTER_BOTH, 2, 1, 0)), faults),
        Scenario("a rank that uses a different placement", (_LONG_PLAN,), faults, starts=astray),
        Scenario(
            "two parts, and a plan after the first",
            (_PLAN_OF_PARTS, plan_from(_AFTER_BOTH, 2, 2, 0)),
            faults._replace(calls=min(faults.calls, 1)),
            rows=2,
        ),
    ]


def all_scenarios() -> list[Scenario]:
    """Return all scenarios that ``make explore`` walks, starting with the one that takes longest."""
    combined = [scenarios(faults)[LATE] for faults in COMBINED]
    return [*combined, *(scenario for faults in reversed(SINGLE) for scenario in scenarios(faults))]


def walk(scenario: Scenario) -> Walk:
    """Visit every state of the scenario."""
    return walk_world(scenario.title, World(scenario))


def in_parallel(function: Callable[[Any], Any], arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield the result of ``function`` for each argument, in order, from a pool of processes."""
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        yield from pool.map(function, arguments)


def main() -> None:
    """Walk all scenarios, then hunt the mutants. Exit with code 1 if an invariant is violated or a mutant survives."""
    from tests.swap.mutants import hunt

    sys.exit(not report(in_parallel(walk, all_scenarios()), hunt()))


if __name__ == "__main__":
    main()
