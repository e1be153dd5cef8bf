"""Under every fault all ranks serve what their tables name and balance comes back; defects put back are found."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import runs
from tests.simulation.defects import DEFECTS, run
from tests.simulation.world import World

_QUICK = ("only late ranks confirm", "a flipped bit is not seen")


def test_a_seed_is_a_run() -> None:
    first, again, other = (World(seed, bound=0.0).run() for seed in (3, 3, 13))
    assert first == again
    assert first.fingerprint != other.fingerprint


def test_without_faults_plans_are_carried_out() -> None:
    outcome = World(3, kinds=()).run()
    assert outcome.breaches == ()
    assert outcome.plans


@pytest.mark.parametrize("seed", [3])
def test_promises_are_kept_under_faults(seed: int) -> None:
    outcome = World(seed).run()
    assert outcome.breaches == ()
    assert outcome.plans


@pytest.mark.slow
def test_hundreds_of_seeds_keep_every_promise() -> None:
    assert [(outcome.seed, outcome.breaches) for outcome in runs(range(1000, 1200)) if outcome.breaches] == []


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DEFECTS]
)
def test_a_defect_put_back_is_found(name: str) -> None:
    assert run(name, DEFECTS[name].seed).breaches
