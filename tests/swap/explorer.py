"""Every interleaving of the layer switch for three ranks and two plans: ``make explore`` prints what was seen.

Each fault alone is walked in all scenarios; faults of several kinds at once in the one that is smallest and still has
a plan of two layers, a switch by halves and another service's plan after it.
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
"""Places in ``scenarios``."""

ALONE = (
    Faults(),
    Faults(transfers=1),
    Faults(errors=1),
    Faults(losses=1),
    Faults(skips=1),
    Faults(installs=1),
    Faults(calls=2),
)
TOGETHER = (
    Faults(transfers=1, errors=1, losses=1),
    Faults(transfers=1, losses=1, skips=1),
    Faults(losses=2),
    Faults(losses=1, skips=1, impatience=2),
    Faults(transfers=1, losses=1, installs=1),
    Faults(losses=1, refusals=2),
    Faults(skips=1, drifts=2),
    Faults(transfers=1, calls=1),
    Faults(losses=1, calls=1),
    Faults(skips=1, calls=1),
)


def scenarios(faults: Faults) -> list[Scenario]:
    """Return the scenarios: two services, a late plan, a plan after another or after its abort, and a rank astray.

    In the last scenario, the first plan switches in two parts, of two layers and of one.
    """
    astray = (FIRST, FIRST.with_layer(0, 7, 7), FIRST)
    assert len(astray) == RANKS
    return [
        Scenario("two services, one base", (_LONG_PLAN, plan_from(FIRST, 2, 2, 0)), faults),
        Scenario("the older service's plan comes late", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 0, 0)), faults),
        Scenario("a plan after an abort halfway", (_LONG_PLAN, plan_from(_AFTER_ONE, 2, 2, 0)), faults),
        Scenario("a plan after a whole plan", (_LONG_PLAN, plan_from(_AFTER_BOTH, 2, 1, 0)), faults),
        Scenario("a rank that serves another placement", (_LONG_PLAN,), faults, starts=astray),
        Scenario(
            "two parts, and a plan after the first",
            (_PLAN_OF_PARTS, plan_from(_AFTER_BOTH, 2, 2, 0)),
            faults._replace(calls=min(faults.calls, 1)),
            rows=2,
        ),
    ]


def whole() -> list[Scenario]:
    """All that ``make explore`` walks, the longest first."""
    together = [scenarios(faults)[LATE] for faults in TOGETHER]
    return [*together, *(scenario for faults in reversed(ALONE) for scenario in scenarios(faults))]


def walk(scenario: Scenario) -> Walk:
    """Visit every state of the scenario."""
    return walk_world(scenario.title, World(scenario))


def in_parallel(do: Callable[[Any], Any], given: Iterable[Any]) -> Iterator[Any]:
    """``do`` of each, in order, on some processes."""
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        yield from pool.map(do, given)


def main() -> None:
    """The full walk, then every mutant; exit code 1 where a promise is broken or a mutant survives."""
    from tests.swap.mutants import hunt

    sys.exit(not report(in_parallel(walk, whole()), hunt()))


if __name__ == "__main__":
    main()
