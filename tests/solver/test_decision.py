"""Whatever the shape and the heat, an answer can be served, and is no worse than what it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.solver.model import EVEN, FRESH, KEEP, RULE, SOLVED
from tests.solver.asked import SEARCH, assert_servable, solve
from tests.solver.layers_of import KNOWN_EXAMPLE, Case, cases, heat_of_kind, shares_of_sources
from tests.solver.slow import heat
from tests.solver.slow import tables as slow_tables

SEEDS = st.integers(0, 2**32 - 1)
SPLITS = st.sampled_from((EVEN, RULE, SOLVED))


@given(
    cases(),
    st.booleans(),
    SPLITS,
    st.sampled_from((0, 1, 3)),
    st.sampled_from((0, 300)),
    st.sampled_from((0, 200)),
    SEEDS,
)
def test_answers_can_be_served(
    case: Case, warm: bool, tables: int, leaves: int, steps: int, tries: int, seed: int
) -> None:
    share_GE = shares_of_sources(case.ranks, case.experts, ("uniform", "uneven", "silent")[seed % 3], seed)
    search = SEARCH._replace(
        tables=tables, tree_leaves=leaves, local_search_steps=steps, annealing_tries=tries
    )
    deployed, (answer,) = solve(case, search, unplaced=not warm, share_GE=share_GE)
    assert_servable(answer, deployed.phy2log_LRS[0], case.experts)
    if warm:
        assert answer.found.par <= answer.par_before
    else:
        assert answer.taken == FRESH
    scaled_EN, share_N = heat.normalise(case.heat_NE, np.ones(len(case.heat_NE)), case.ranks)
    share_RS = heat.even_shares(answer.found.phy2log_RS)
    if tables != EVEN:
        share_RS = slow_tables.slot_shares(answer.found.phy2log_RS, answer.found.log2phy_GE, share_GE)
    promised = heat.mean_of_max(scaled_EN, share_N, answer.found.phy2log_RS, share_RS)
    assert answer.found.par == pytest.approx(promised, rel=1e-4)


@pytest.mark.parametrize("kind", ["zero", "one hot", "even"])
@pytest.mark.parametrize("unplaced", [True, False])
@pytest.mark.parametrize(
    ("experts", "ranks", "slots"),
    [
        (1, 1, 1),
        (1, 7, 1),
        (5, 1, 5),
        (7, 7, 1),
        (6, 8, 1),
        (12, 4, 3),
        (13, 4, 4),
        (7, 5, 2),
        (4, 8, 4),
        (3, 9, 2),
    ],
    ids=str,
)
def test_awkward_shapes_are_placed(kind: str, unplaced: bool, experts: int, ranks: int, slots: int) -> None:
    for episodes in (1, 2, 3, 9):
        heat_NE = heat_of_kind(kind, episodes, experts, np.random.default_rng(experts))
        deployed, (answer,) = solve(Case(ranks, slots, heat_NE), unplaced=unplaced)
        assert_servable(answer, deployed.phy2log_LRS[0], experts)
        if kind == "zero":
            assert answer.found.par == 1.0
        if kind == "one hot":
            # All ranks at most share it, and no more than all of them.
            replicas = min(ranks, ranks * slots - experts + 1)
            assert answer.hindsight >= ranks / replicas - 1e-4


def test_all_zero_heat_moves_nothing() -> None:
    _, (answer,) = solve(Case(6, 3, np.zeros((8, 11))), unplaced=False)
    assert answer.taken == KEEP


def test_known_example_reaches_its_proven_optimum() -> None:
    case = Case(8, 2, KNOWN_EXAMPLE[None, :])
    search = SEARCH._replace(tables=EVEN, tree_leaves=8)
    _, (answer,) = solve(case, search)
    assert answer.found.par * KNOWN_EXAMPLE.sum() / 8 == pytest.approx(196.667, abs=0.01)


def test_a_growing_window_is_solved_at_every_length() -> None:
    generator = np.random.default_rng(8)
    heat_NE = generator.gamma(0.5, 100, 20) * np.exp(np.cumsum(generator.normal(0, 0.2, (12, 20)), axis=0))
    for episodes in range(1, 13):
        for unplaced in (True, False):
            deployed, (answer,) = solve(Case(6, 4, heat_NE[:episodes]), unplaced=unplaced)
            assert_servable(answer, deployed.phy2log_LRS[0], 20)
            assert answer.hindsight < answer.par_before


def test_price_holds_moves_back() -> None:
    heat_NE = np.random.default_rng(5).gamma(0.5, 100, 32) * np.linspace(1, 1.1, 6)[:, None]
    moves = [
        solve(Case(8, 5, heat_NE), SEARCH._replace(move_price=40 * price), unplaced=False)[1][0].found.moves
        for price in (0.0, 0.01, 1.0)
    ]
    assert moves[0] >= moves[1] >= moves[2] == 0
    assert moves[0] > 0


def test_nothing_changes_for_less_than_the_smallest_gain() -> None:
    heat_NE = np.random.default_rng(5).gamma(0.5, 100, 32) * np.ones((6, 1))
    _, (free,) = solve(Case(8, 5, heat_NE), unplaced=False)
    won = free.par_before - free.found.par
    assert won > 0.1
    _, (held,) = solve(Case(8, 5, heat_NE), unplaced=False, min_gain=free.par_before - 1.0)
    assert held.taken == KEEP
