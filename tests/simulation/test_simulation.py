"""Tests that balancing recovers under every fault, and that the simulation finds known bugs."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import runs
from tests.simulation.defects import DEFECTS, hunt
from tests.simulation.faults import BEYOND
from tests.simulation.world import World

_QUICK = ("only late ranks confirm",)


def test_a_seed_is_a_run_that_keeps_every_promise() -> None:
    first = World(2).run()
    again = World(2).run()
    assert first == again
    assert first.breaches == ()
    assert first.faults
    assert first.plans


def test_a_transfer_whose_end_an_error_has_kept_from_being_noted_blocks_nothing() -> None:
    assert World(20).run().breaches == ()


def test_hosts_that_are_unequally_far_ahead_agree_on_a_pass() -> None:
    assert World(2, BEYOND, many=4).run().breaches == ()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_hundreds_of_seeds_keep_every_promise() -> None:
    assert [(outcome.seed, outcome.breaches) for outcome in runs(range(1000, 1500)) if outcome.breaches] == []


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DEFECTS]
)
def test_a_defect_put_back_is_found(name: str) -> None:
    assert hunt(name, 5 if name in _QUICK else 1)


@pytest.mark.slow
def test_attempts_that_failed_for_another_reason_do_not_put_the_first_vote_off() -> None:
    """After six attempts that fail on rejected datagrams, the next attempt must not wait 4,096 passes for its vote."""
    outcome = World(1088).run()
    assert outcome.breaches == ()
    assert outcome.healed_after < 200


@pytest.mark.slow
def test_a_pass_that_one_device_counts_twice_switches_no_layer_a_pass_apart() -> None:
    runs_of_it = [World(seed, ("counted twice",), bound=0.0).run() for seed in range(1, 41)]
    assert [outcome.breaches for outcome in runs_of_it if outcome.breaches] == []
    assert sum(outcome.plans for outcome in runs_of_it) > len(runs_of_it)
