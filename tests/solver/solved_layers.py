"""Solver calls with the planner's arguments, and checks that every result must pass."""

from __future__ import annotations

import numpy as np

from eplb_core.placement import Placement, check_layer, check_log2phy
from eplb_core.solver.engine import LayerBatch, Limits, SearchRules, SolverError, solve_many
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import KEEP, SOLVED, SearchOptions, SearchParams
from tests.solver.layers_of import Case

SEARCH = SearchParams(
    z=1.0, tree_leaves=2, local_search_steps=500, tables=SOLVED, options=SearchOptions(sureness=0.0)
)


def solve(
    case: Case,
    search: SearchParams = SEARCH,
    threads: int = 1,
    layers: int = 1,
    unplaced: bool = True,
    share_GE: np.ndarray | None = None,
    min_gain: float = 0.0,
) -> tuple[Placement, list[LayerResult]]:
    """Solve ``layers`` identical layers, starting from the engines' initial layout."""
    deployed = Placement.linear(layers, case.experts, case.ranks, case.slots)
    if share_GE is None:
        share_GE = np.full((case.ranks, case.experts), 1 / case.ranks)
    tables_LGE = deployed.default_log2phy().transpose(1, 0, 2)[:, np.arange(len(share_GE)) % case.ranks]
    batch = LayerBatch(
        np.broadcast_to(case.heat_NE, (layers, *case.heat_NE.shape)),
        deployed.phy2log_LRS,
        tables_LGE,
        np.broadcast_to(share_GE, (layers, *share_GE.shape)),
        np.full(layers, unplaced),
    )
    rules = SearchRules(search, np.array([np.inf, 1.0]), min_gain)
    answers = solve_many(batch, rules, limits=Limits(threads))
    assert not any(isinstance(answer, SolverError) for answer in answers), answers
    return deployed, answers


def assert_servable(answer: LayerResult, deployed_RS: np.ndarray, experts: int) -> None:
    """Check that a result is a valid layout, keeps remaining experts in their slots, and has the right move count."""
    placed_RS = answer.candidate.phy2log_RS
    check_layer(placed_RS, experts)
    assert np.bincount(placed_RS.ravel(), minlength=experts).max() <= len(placed_RS)
    for table_E in answer.candidate.log2phy_GE:
        check_log2phy(table_E, placed_RS)
    assert answer.candidate.moves == np.count_nonzero(placed_RS != deployed_RS)
    for before_S, after_S in zip(deployed_RS.tolist(), placed_RS.tolist(), strict=True):
        assert all(after_S[before_S.index(expert)] == expert for expert in set(before_S) & set(after_S))
    assert min(answer.par_before, answer.candidate.par) >= 1 - 1e-4
    if answer.taken == KEEP:
        assert answer.candidate.moves == 0
        assert answer.candidate.par == answer.par_before
