"""Every interleaving of the layer switch for three ranks and two plans: ``make explore`` prints what was seen."""

from __future__ import annotations

import sys

from tests.exploring import Walk, report
from tests.exploring import walk as walk_world
from tests.swap.explored_state import RANKS, Faults, Scenario
from tests.swap.explored_world import World
from tests.swap.tags import FIRST, plan_from

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


def walk(scenario: Scenario) -> Walk:
    """Visit every state of the scenario."""
    return walk_world(scenario.name, World(scenario))


def main() -> None:
    """The full walk, then every mutant; exit code 1 where a promise is broken or a mutant survives."""
    from tests.swap.mutants import hunt

    full = scenarios(Faults(transfers=1, halts=1, losses=1))
    sys.exit(not report((walk(scenario) for scenario in full), hunt()))


if __name__ == "__main__":
    main()
