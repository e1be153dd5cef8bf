"""Exploration of layer switches: every invariant holds in all interleavings, and every mutant is caught."""

from __future__ import annotations

import pytest

from tests.swap.explored_state import Faults
from tests.swap.explorer import ASTRAY, HALFWAY, LATE, PARTS, scenarios, walk
from tests.swap.mutants import hunt


@pytest.mark.parametrize(
    ("faults", "scenario"),
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
def test_no_interleaving_violates_an_invariant(faults: Faults, scenario: int) -> None:
    """Only the small scenarios are walked here; `make explore` walks all of them and prints the state counts."""
    result = walk(scenarios(faults)[scenario])
    assert result.broken is None, result.broken
    assert result.states > 100


@pytest.mark.slow
def test_every_mutant_is_caught() -> None:
    walks = dict(hunt())
    assert len(walks) >= 50
    assert [name for name, walked in walks.items() if not walked.caught] == []
