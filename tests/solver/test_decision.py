"""For any shape and heat, the result is a valid layout that is no worse than the current one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.solver.model import EVEN, FRESH, KEEP, RULE, SOLVED
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.slow import heat
from tests.solver.slow import tables as slow_tables
from tests.solver.solved_layers import SEARCH, assert_servable, solve

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
def test_results_are_valid_layouts(
    case: Case, warm: bool, tables: int, leaves: int, steps: int, tries: int, seed: int
) -> None:
    share_GE = shares_of_sources(case.ranks, case.experts, ("uniform", "uneven", "silent")[seed % 3], seed)
    search = SEARCH._replace(
        tables=tables, tree_leaves=leaves, local_search_steps=steps, annealing_tries=tries
    )
    deployed, (answer,) = solve(case, search, unplaced=not warm, share_GE=share_GE)
    assert_servable(answer, deployed.phy2log_LRS[0], case.experts)
    if warm:
        assert answer.candidate.par <= answer.par_before
    else:
        assert answer.taken == FRESH
    if not case.heat_NE.any():
        assert answer.candidate.par == 1.0
        assert answer.taken == (KEEP if warm else FRESH)
    elif not case.heat_NE[:, 1:].any():
        # At best, the one hot expert has all redundant replicas, at most one per rank.
        holders = min(case.ranks, case.ranks * case.slots - case.experts + 1)
        assert answer.candidate.par >= case.ranks / holders - 1e-4
    scaled_EN, share_N = heat.normalise(case.heat_NE, np.ones(len(case.heat_NE)), case.ranks)
    share_RS = heat.even_shares(answer.candidate.phy2log_RS)
    if tables != EVEN:
        share_RS = slow_tables.slot_shares(answer.candidate.phy2log_RS, answer.candidate.log2phy_GE, share_GE)
    promised = heat.mean_of_max(scaled_EN, share_N, answer.candidate.phy2log_RS, share_RS)
    assert answer.candidate.par == pytest.approx(promised, rel=1e-4)


def test_a_move_price_reduces_moves() -> None:
    heat_NE = np.random.default_rng(5).gamma(0.5, 100, 32) * np.linspace(1, 1.1, 6)[:, None]
    moves = [
        solve(Case(8, 5, heat_NE), SEARCH._replace(move_price=40 * price), unplaced=False)[1][
            0
        ].candidate.moves
        for price in (0.0, 0.01, 1.0)
    ]
    assert moves[0] >= moves[1] >= moves[2] == 0
    assert moves[0] > 0


def test_no_layer_changes_for_less_than_the_smallest_gain() -> None:
    heat_NE = np.random.default_rng(5).gamma(0.5, 100, 32) * np.ones((6, 1))
    _, (free,) = solve(Case(8, 5, heat_NE), unplaced=False)
    won = free.par_before - free.candidate.par
    assert won > 0.1
    _, (held,) = solve(Case(8, 5, heat_NE), unplaced=False, min_gain=free.par_before - 1.0)
    assert held.taken == KEEP
