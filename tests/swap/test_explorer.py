"""Whatever happens in whatever order, every promise of the switch holds; and each broken machine is found out."""

from __future__ import annotations

import pytest

from tests.swap.explored_state import Faults
from tests.swap.explorer import ASTRAY, HALFWAY, LATE, PARTS, scenarios, walk
from tests.swap.mutants import hunt


@pytest.mark.parametrize(
    ("faults", "start"),
    [
        (Faults(), HALFWAY),
        (Faults(), ASTRAY),
        (Faults(), PARTS),
        pytest.param(Faults(transfers=1), PARTS, marks=pytest.mark.slow),
        pytest.param(Faults(installs=1), PARTS, marks=pytest.mark.slow),
        pytest.param(Faults(calls=1), PARTS, marks=pytest.mark.slow),
        pytest.param(Faults(losses=1), LATE, marks=pytest.mark.slow),
        pytest.param(Faults(transfers=1), LATE, marks=pytest.mark.slow),
        pytest.param(Faults(installs=1), LATE, marks=pytest.mark.slow),
        pytest.param(Faults(calls=1), LATE, marks=pytest.mark.slow),
        pytest.param(Faults(skips=1, impatience=1), LATE, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_keeps_every_promise(faults: Faults, start: int) -> None:
    """The small walks; `make explore` does them all and prints the counts."""
    seen = walk(scenarios(faults)[start])
    assert seen.broken is None, seen.broken
    assert seen.states > 100


@pytest.mark.slow
def test_every_broken_machine_is_caught() -> None:
    seen = dict(hunt())
    assert len(seen) >= 50
    assert [name for name, walked in seen.items() if not walked.caught] == []
