"""Tests of ``solve``: placement for recorded heat in one call, and one-line errors."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service import Placement, solve

HEAT = np.random.default_rng(0).multinomial(
    2000, np.random.default_rng(1).dirichlet(np.full(12, 0.5)), (20, 3)
)


def test_a_first_placement_is_balanced() -> None:
    solution = solve(HEAT, ranks=4, slots=4)
    assert solution.phy2log.shape == (3, 4, 4)
    assert solution.log2phy.shape == (4, 3, 12)
    assert solution.par_after < solution.par_before
    assert solution.moves == np.count_nonzero(solution.phy2log != Placement.linear(3, 12, 4, 4).phy2log_LRS)


def test_a_deployed_placement_is_improved_with_few_moves() -> None:
    first = solve(HEAT[:10], ranks=4, slots=4)
    then = solve(HEAT[10:], ranks=4, slots=4, placement=first.phy2log)
    assert then.par_after <= then.par_before
    assert then.moves < first.moves


def test_a_prior_replaces_the_deployed_placement() -> None:
    then = solve(HEAT[10:], ranks=4, slots=4, prior=HEAT[:10])
    first = solve(HEAT[:10], ranks=4, slots=4)
    again = solve(HEAT[10:], ranks=4, slots=4, placement=first.phy2log, log2phy=first.log2phy)
    np.testing.assert_array_equal(then.phy2log, again.phy2log)
    np.testing.assert_array_equal(then.log2phy, again.log2phy)
    with pytest.raises(ValueError, match="prior and placement cannot be used together"):
        solve(HEAT, 4, 4, prior=HEAT, placement=first.phy2log)
    with pytest.raises(ValueError, match="must come from the same model"):
        solve(HEAT, 4, 4, prior=HEAT[:, :2])


def test_a_decision_starts_from_the_deployed_tables() -> None:
    first = solve(HEAT, ranks=4, slots=4)
    kept = solve(HEAT, 4, 4, placement=first.phy2log, log2phy=first.log2phy)
    # The promise of a first placement includes a correction for overfitting to the window.
    optimism_L = [verdict.optimism for verdict in first.verdicts]
    assert kept.par_before_L == pytest.approx(first.par_after_L - optimism_L)
    assert kept.moves == 0
    one_replica_each = np.broadcast_to(first.log2phy[:1], first.log2phy.shape)
    unshared = solve(HEAT, 4, 4, placement=first.phy2log, log2phy=one_replica_each, policy="none")
    assert unshared.par_before > kept.par_before


def test_source_heat_shapes_the_tables() -> None:
    generator = np.random.default_rng(2)
    mix_R = np.array([0.7, 0.1, 0.1, 0.1])
    source = np.moveaxis(generator.multinomial(HEAT, mix_R), -1, 1)
    seeing = solve(HEAT, 4, 4, source_heat=source)
    blind = solve(HEAT, 4, 4, placement=seeing.phy2log, source_heat=source, policy="none")
    assert seeing.par_after < blind.par_after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 2}, "cannot hold 12 experts"),
        ({"slots": 13}, "at most 12 slots"),
        ({"policy": "magic"}, "policy"),
        ({"placement": np.zeros((3, 4, 4), dtype=int)}, "has no slot"),
        (
            {"placement": Placement.linear(3, 12, 3, 4).phy2log_LRS},
            "expected a placement of 3 layers x 4 ranks, got 3 x 3",
        ),
        ({"ranks": -1}, "ranks is -1; it must be a whole number, 1 or more"),
        ({"ranks": 2.5}, "ranks is 2.5; it must be a whole number"),
        ({"ranks": "8"}, "ranks is '8'; it must be a whole number"),
        ({"slots": True}, "slots is True; it must be a whole number"),
        ({"slots": None}, "slots is None"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"threads": "2"}, "threads is '2'; it must be a whole number"),
        ({"fitted_curve": "yes"}, "fitted_curve is 'yes'; it must be True or False"),
        ({"cost_curve": "h100.json"}, "cost_curve is 'h100.json'; it must be a CostCurve"),
        ({"max_leyers": 3}, "unknown option 'max_leyers'"),
        ({"topology": 4}, "topology is a int"),
        ({"source_heat": np.ones((1, 4, 3, 12))}, "expected source heat of shape"),
        ({"source_heat": np.full((len(HEAT), 4, 3, 12), 1)}, "both must count the same tokens"),
        ({"log2phy": np.zeros((4, 3, 12), dtype=int)}, "without the placement"),
        (
            {
                "placement": Placement.linear(3, 12, 4, 4).phy2log_LRS,
                "log2phy": np.zeros((4, 3, 12), dtype=int),
            },
            "log2phy of layer 0, rank 0: expert 1 points to slot 0",
        ),
        (
            {"placement": Placement.linear(3, 12, 4, 4).phy2log_LRS, "log2phy": np.zeros((4, 3, 12))},
            "log2phy must be an array of integers",
        ),
        ({"source_heat": HEAT}, "expected source heat of shape"),
        ({"heat": -HEAT}, "finite and non-negative"),
        ({"heat": HEAT[0]}, r"\[steps, layers, experts\]"),
        ({"heat": HEAT[:0]}, "no steps"),
    ],
)
def test_invalid_input_is_rejected(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(**{"heat": HEAT, "ranks": 4, "slots": 4, **arguments})
