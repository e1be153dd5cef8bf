"""Tests that balancing recovers under every fault, and that the simulation finds known bugs."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import runs
from tests.simulation.defects import DEFECTS, hunt
from tests.simulation.faults import BEYOND
from tests.simulation.world import World

_QUICK = ("only late ranks confirm",)


def test_the_same_seed_gives_the_same_run_and_no_guarantee_is_violated() -> None:
    first = World(2).run()
    again = World(2).run()
    assert first == again
    assert first.breaches == ()
    assert first.faults
    assert first.plans


def test_balancing_recovers_if_an_error_hides_the_end_of_a_transfer() -> None:
    assert World(20).run().breaches == ()


def test_hosts_that_run_ahead_by_different_numbers_of_passes_agree_on_a_pass() -> None:
    assert World(2, BEYOND, many=4).run().breaches == ()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_no_guarantee_is_violated_in_hundreds_of_runs() -> None:
    assert [(outcome.seed, outcome.breaches) for outcome in runs(range(1000, 1500)) if outcome.breaches] == []


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DEFECTS]
)
def test_a_reintroduced_bug_is_detected(name: str) -> None:
    assert hunt(name, 5 if name in _QUICK else 1)


@pytest.mark.slow
def test_unrelated_failed_attempts_do_not_delay_the_first_vote() -> None:
    """After six attempts that fail on rejected datagrams, the next attempt must not wait 4,096 passes for its vote."""
    outcome = World(1088).run()
    assert outcome.breaches == ()
    assert outcome.healed_after < 200


@pytest.mark.slow
def test_ranks_switch_at_the_same_pass_if_one_device_counts_a_pass_twice() -> None:
    runs_of_it = [World(seed, ("counted twice",), bound=0.0).run() for seed in range(1, 41)]
    assert [outcome.breaches for outcome in runs_of_it if outcome.breaches] == []
    assert sum(outcome.plans for outcome in runs_of_it) > len(runs_of_it)
