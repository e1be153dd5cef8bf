"""In every order of events and faults, a service and its ranks preserve all invariants, and the service recovers."""

from __future__ import annotations

import pytest

from tests.control.core.explored_mutants import hunt
from tests.control.core.explored_service import walk
from tests.control.core.explored_state import Faults, Scenario

SMALL = [
    Scenario("ranks join in any order and leave again", Faults(cuts=1), plans=((0,),), joined=False),
    Scenario("a status is lost", Faults(losses=1), plans=((0,),)),
    Scenario("statuses are repeated and reordered", Faults(repeats=1, swaps=1), plans=((0, 1),)),
    Scenario("the service restarts", Faults(restarts=1), plans=((0,),)),
    Scenario("the service restarts and a stream does not end", Faults(restarts=1, hangs=1), plans=((0,),)),
    Scenario("a plan is called off", Faults(call_offs=1), plans=((0, 1),)),
    Scenario("the group is formed again", Faults(reforms=1), plans=((0,),)),
    Scenario("an outsider registers as a rank", Faults(cuts=1, squats=1), plans=((0,),), joined=False),
]


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_every_interleaving_preserves_every_invariant(scenario: Scenario) -> None:
    """Walk the small scenarios. ``make explore`` walks larger ones and prints the counts."""
    result = walk(scenario)
    assert result.broken is None, result.broken
    assert result.states > 100


def test_the_explorer_catches_every_mutant() -> None:
    walks = dict(hunt())
    assert len(walks) == 23
    assert [name for name, result in walks.items() if not result.caught] == []
