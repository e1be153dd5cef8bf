"""``solve`` places recorded heat in one call and refuses what cannot be placed in one line."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service import Placement, solve

HEAT = np.random.default_rng(0).multinomial(
    2000, np.random.default_rng(1).dirichlet(np.full(12, 0.5)), (20, 3)
)


def test_fresh_solve_balances() -> None:
    found = solve(HEAT, ranks=4, slots=4)
    assert found.phy2log.shape == (3, 4, 4)
    assert found.log2phy.shape == (4, 3, 12)
    assert found.par_after < found.par_before
    assert found.moves == np.count_nonzero(found.phy2log != Placement.linear(3, 12, 4, 4).phy2log_LRS)


def test_deployed_placement_is_improved_with_few_moves() -> None:
    first = solve(HEAT[:10], ranks=4, slots=4)
    then = solve(HEAT[10:], ranks=4, slots=4, placement=first.phy2log)
    assert then.par_after <= then.par_before
    assert then.moves < first.moves


def test_source_heat_shapes_the_tables() -> None:
    generator = np.random.default_rng(2)
    mix_R = np.array([0.7, 0.1, 0.1, 0.1])
    source = np.moveaxis(generator.multinomial(HEAT, mix_R), -1, 1)
    blind = solve(HEAT, 4, 4, source_heat=source, solve_tables=False)
    seeing = solve(HEAT, 4, 4, source_heat=source)
    assert seeing.par_after < blind.par_after


def test_known_example_stays_below_205_with_even_shares() -> None:
    heat = np.array([[[600, 560, 120, 120, 20, 10, 10, 10]]])
    found = solve(heat, 8, 2)
    copies = np.bincount(found.phy2log.ravel())
    assert (heat.ravel() / copies)[found.phy2log[0]].sum(axis=1).max() <= 205


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 2}, "cannot hold 12 experts"),
        ({"slots": 13}, "at most 12 slots"),
        ({"policy": "magic"}, "policy"),
        ({"placement": np.zeros((3, 4, 4), dtype=int)}, "is in no slot"),
        ({"placement": Placement.linear(3, 12, 4, 3).phy2log_LRS}, "asked for 4 x 4"),
        ({"source_heat": HEAT}, "source heat has the shape"),
        ({"heat": -HEAT}, "zero or more"),
        ({"heat": HEAT[0]}, r"\[steps, layers, experts\]"),
        ({"heat": HEAT[:0]}, "no steps"),
    ],
)
def test_bad_input_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(**{"heat": HEAT, "ranks": 4, "slots": 4, **arguments})
