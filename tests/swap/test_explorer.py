"""Whatever happens in whatever order, every promise of the switch holds; and each broken machine is found out."""

from __future__ import annotations

import pytest

from tests.swap.explored_state import Faults
from tests.swap.explorer import ASTRAY, HALFWAY, LATE, scenarios, walk
from tests.swap.mutants import hunt


def test_every_interleaving_keeps_every_promise() -> None:
    """The small walk; `make explore` does them all and prints the counts."""
    small = (
        scenarios(Faults())[HALFWAY],
        scenarios(Faults())[ASTRAY],
        scenarios(Faults(transfers=1))[LATE],
        scenarios(Faults(losses=1))[LATE],
        scenarios(Faults(skips=1, impatience=1))[LATE],
        scenarios(Faults(installs=1))[LATE],
    )
    for scenario in small:
        seen = walk(scenario)
        assert seen.broken is None, seen.broken
        assert seen.states > 100


@pytest.mark.slow
def test_every_broken_machine_is_caught() -> None:
    caught = {name: seen.broken for name, seen in hunt()}
    assert len(caught) >= 39
    survivors = [name for name, broken in caught.items() if broken is None]
    assert not survivors
