"""Whatever happens in whatever order, every promise of the switch holds; and each broken machine is found out."""

from __future__ import annotations

import pytest

from tests.swap.explored_state import Faults
from tests.swap.explorer import scenarios, walk
from tests.swap.mutants import ASTRAY, HALFWAY, LATE, hunt


def test_every_interleaving_keeps_every_promise() -> None:
    """The small walk; `make explore` does them all and prints the counts."""
    calm = scenarios(Faults(0, 0, 0))
    faulty = scenarios(Faults(1, 0, 1))
    skipping = scenarios(Faults(0, 0, 1, skips=1))
    for scenario in (calm[HALFWAY], calm[ASTRAY], faulty[LATE], skipping[LATE]):
        seen = walk(scenario)
        assert seen.broken is None, seen.broken
        assert seen.states > 100


@pytest.mark.slow
def test_every_broken_machine_is_caught() -> None:
    caught = {name: seen.broken for name, seen in hunt()}
    assert len(caught) >= 32
    survivors = [name for name, broken in caught.items() if broken is None]
    assert not survivors
