"""Whatever happens between a service and its ranks, in whatever order: it believes nothing false, and recovers."""

from __future__ import annotations

import pytest

from tests.control.core.explored_mutants import hunt
from tests.control.core.explored_service import walk
from tests.control.core.explored_state import Faults, Scenario

SMALL = [
    Scenario("ranks join in any order, and go again", Faults(cuts=1), plans=((0,),), joined=False),
    Scenario("a status is lost", Faults(losses=1), plans=((0,),)),
    Scenario("statuses come twice and out of order", Faults(repeats=1, swaps=1), plans=((0, 1),)),
    Scenario("the service starts again", Faults(restarts=1), plans=((0,),)),
    Scenario(
        "the service starts again, and a stream does not end", Faults(restarts=1, deaf=1), plans=((0,),)
    ),
    Scenario("a plan is called off", Faults(calls=1), plans=((0, 1),)),
    Scenario("the group is formed again", Faults(reforms=1), plans=((0,),)),
    Scenario("a stranger holds a seat", Faults(cuts=1, squats=1), plans=((0,),), joined=False),
]


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_every_interleaving_keeps_every_promise(scenario: Scenario) -> None:
    """The small walks; `make explore` does larger ones and prints the counts."""
    seen = walk(scenario)
    assert seen.broken is None, seen.broken
    assert seen.states > 100


def test_every_broken_service_is_caught() -> None:
    seen = dict(hunt())
    assert len(seen) == 23
    assert [name for name, walked in seen.items() if not walked.caught] == []
