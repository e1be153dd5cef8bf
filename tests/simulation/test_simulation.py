"""Under every fault all ranks serve what their tables name and balance comes back; defects put back are found."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import runs
from tests.simulation.defects import DEFECTS, hunt
from tests.simulation.world import World

_QUICK = ("only late ranks confirm",)


def test_a_seed_is_a_run_that_keeps_every_promise() -> None:
    first, again = World(2).run(), World(2).run()
    assert first == again
    assert first.breaches == ()
    assert first.faults
    assert first.plans


@pytest.mark.slow
def test_hundreds_of_seeds_keep_every_promise() -> None:
    assert [(outcome.seed, outcome.breaches) for outcome in runs(range(1000, 1500)) if outcome.breaches] == []


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DEFECTS]
)
def test_a_defect_put_back_is_found(name: str) -> None:
    assert hunt(name, 5 if name in _QUICK else 1)
