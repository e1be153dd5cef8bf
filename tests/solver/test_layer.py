"""Whatever the shape and the heat, an answer can be served, and is no worse than what it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import Placement, check_layer, check_log2phy
from eplb_service.solver.candidates import KEEP, Search
from eplb_service.solver.engine import OutOfTimeError, SolverError, solve_many
from eplb_service.solver.layer import Answer
from eplb_service.solver.objective import demand_of, normalise
from eplb_service.solver.risk_search import risk_search
from eplb_service.solver.tree_search import place, tree_search
from tests.solver.layers_of import KNOWN_EXAMPLE, Case, cases

SEARCH = Search(z=1.0, price=0.0, groups=4, spread=1, beam=2, leaves=2, patience=1, steps=500, tables=True)


def solve(
    case: Case, search: Search, threads: int = 1, layers: int = 1, unplaced: bool = True
) -> tuple[Placement, list[Answer]]:
    deployed = Placement.linear(layers, case.experts, case.ranks, case.slots)
    answers = solve_many(
        np.broadcast_to(case.heat_NE, (layers, *case.heat_NE.shape)),
        deployed.phy2log_LRS,
        deployed.default_log2phy().transpose(1, 0, 2),
        np.full((layers, case.ranks, case.experts), 1 / case.ranks),
        search,
        np.array([np.inf, 1.0]),
        0.0,
        np.full(layers, unplaced),
        threads,
    )
    assert not any(isinstance(answer, SolverError) for answer in answers), answers
    return deployed, answers


@settings(deadline=None, max_examples=150)
@given(cases(), st.booleans(), st.booleans(), st.sampled_from((0, 2, 4)), st.sampled_from((0, 300)))
def test_answers_can_be_served(case: Case, warm: bool, tables: bool, groups: int, steps: int) -> None:
    search = SEARCH._replace(tables=tables, groups=groups, steps=steps)
    deployed, (answer,) = solve(case, search, unplaced=not warm)
    placed_RS = answer.found.phy2log_RS
    check_layer(placed_RS, case.experts)
    for table_E in answer.found.log2phy_GE:
        check_log2phy(table_E, placed_RS)
    assert answer.par_before >= 0.999
    assert answer.found.par >= 0.999
    assert answer.found.moves == np.count_nonzero(placed_RS != deployed.phy2log_LRS[0])
    for rank in range(case.ranks):
        was, now = deployed.phy2log_LRS[0, rank].tolist(), placed_RS[rank].tolist()
        assert all(now[was.index(expert)] == expert for expert in set(was) & set(now))
    if warm:
        assert answer.found.par <= answer.par_before
    if answer.taken == KEEP:
        assert answer.found.moves == 0
        assert answer.found.par == answer.par_before


def test_known_example_reaches_its_proven_optimum() -> None:
    scaled_EN, share_N = normalise(KNOWN_EXAMPLE[None, :], np.ones(1), 8)
    layer = demand_of(scaled_EN, share_N)
    counts_KE, _ = tree_search(layer, 8, 2, 1.0, 4, 2, 4, 1)
    packing = place(counts_KE[0], layer, 8, 2, 1.0)
    _, risk_K = risk_search(packing, layer, np.zeros((8, 8), dtype=bool), 1.0, np.zeros(1), 4, 1000)
    assert risk_K[0] * KNOWN_EXAMPLE.sum() / 8 == pytest.approx(196.667, abs=0.01)


def test_threads_change_nothing() -> None:
    heat_NE = np.random.default_rng(3).integers(0, 500, (6, 32)).astype(np.float64)
    case = Case(8, 5, heat_NE)
    _, alone = solve(case, SEARCH, threads=1, layers=5)
    _, shared = solve(case, SEARCH, threads=2, layers=5)
    for one, other in zip(alone, shared, strict=True):
        assert one.taken == other.taken
        for mine, theirs in zip(one.found, other.found, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_layers_past_the_budget_are_told_so() -> None:
    deployed = Placement.linear(2, 8, 4, 3)
    answers = solve_many(
        np.ones((2, 4, 8)),
        deployed.phy2log_LRS,
        deployed.default_log2phy().transpose(1, 0, 2),
        np.full((2, 4, 8), 0.25),
        SEARCH,
        np.array([np.inf]),
        0.0,
        np.ones(2, dtype=bool),
        threads=1,
        budget_ms=1e-9,
    )
    assert all(isinstance(answer, OutOfTimeError) for answer in answers)


def test_price_holds_moves_back() -> None:
    heat_NE = np.random.default_rng(5).gamma(0.5, 100, 32) * np.linspace(1, 1.1, 6)[:, None]
    case = Case(8, 5, heat_NE)
    moves = [
        solve(case, SEARCH._replace(price=price), unplaced=False)[1][0].found.moves
        for price in (0.0, 0.01, 1.0)
    ]
    assert moves[0] >= moves[1] >= moves[2] == 0
    assert moves[0] > 0
