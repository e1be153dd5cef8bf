"""Tables follow their rules, are never worse than the fixed rule on the window, and improve by swapping experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.placement import check_layer, check_log2phy, default_log2phy
from eplb_core.planner.dealing import tables_of_sources
from eplb_core.solver import tables
from eplb_core.solver.candidates import _refine_through_tables, par_on
from eplb_core.solver.construction import assignment_of, descending, hottest_rank, largest_first
from eplb_core.solver.evaluation import expert_heat
from eplb_core.solver.model import SOLVED, Candidate, Layer, SearchParams
from eplb_core.solver.swaps import MIN_RELIEF
from eplb_core.solver.tables import (
    fixed_rule,
    follow_slots,
    slot_shares,
    slots_by_expert,
    solve_tables,
    swap_through_tables,
    tables_par,
)
from eplb_core.solver.topology import keep_slots
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import PlacedLayer, deployed_on, random_placement
from tests.solver.slow import heat
from tests.solver.slow import local_search as slow_search
from tests.solver.slow import tables as slow

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(("uniform", "uneven", "silent"))
Z = st.sampled_from((0.0, 1.0))


class Sources:
    """A placed layer, the split of its tokens over sources, and the fixed rule's tables."""

    def __init__(self, case: Case, z: float, sources: int, kind: str, seed: int) -> None:
        self.layer = PlacedLayer(case, z, seed)
        self.phy2log_RS = self.layer.phy2log_RS
        self.share_GE = shares_of_sources(sources, case.experts, kind, seed)
        self.first_E1, self.slot_P = slots_by_expert(self.phy2log_RS, case.experts)
        self.rule_GE = fixed_rule(self.first_E1, self.slot_P, sources)

    def par(self, table_GE: np.ndarray) -> float:
        return slow.tables_par(self.phy2log_RS, table_GE, *self.layer.heat, self.share_GE.astype(float))

    def solved(self) -> tuple[np.ndarray, float]:
        layer = self.layer
        return solve_tables(self.phy2log_RS, layer.heat32, self.share_GE, layer.z)


def scenes(cases_: st.SearchStrategy[Case], max_ranks: int) -> st.SearchStrategy[Sources]:
    return st.builds(Sources, cases_, Z, st.integers(1, max_ranks), KINDS, SEEDS)


@SETTINGS
@given(scenes(cases(), 9))
def test_the_fixed_rule_uses_replicas_in_turn(scene: Sources) -> None:
    case = scene.layer.case
    phy2log_RS = scene.phy2log_RS
    sources = len(scene.rule_GE)
    for e in range(case.experts):
        holders = scene.slot_P[scene.first_E1[e] : scene.first_E1[e + 1]]
        np.testing.assert_array_equal(holders, slow.holders_of(phy2log_RS, e))
    np.testing.assert_array_equal(scene.rule_GE, slow.fixed_rule(phy2log_RS, sources, case.experts))
    if sources == case.ranks:
        np.testing.assert_array_equal(scene.rule_GE, default_log2phy(phy2log_RS, case.experts))
    for width in (2, 3, 5):
        result_VE = fixed_rule(scene.first_E1, scene.slot_P, sources * width, width)
        expected_VE = slow.fixed_rule(phy2log_RS, sources * width, case.experts, width)
        np.testing.assert_array_equal(result_VE, expected_VE)
        if sources == case.ranks:
            dealt_RE = default_log2phy(phy2log_RS, case.experts, width)
            np.testing.assert_array_equal(tables_of_sources(result_VE, sources), dealt_RE)
    result_RS = slot_shares(phy2log_RS, scene.rule_GE, scene.share_GE)
    expected_RS = slow.slot_shares(phy2log_RS, scene.rule_GE, scene.share_GE.astype(float))
    np.testing.assert_allclose(result_RS, expected_RS, atol=1e-6)
    par = tables_par(phy2log_RS, scene.rule_GE, scene.layer.heat32, scene.share_GE)
    assert par == pytest.approx(scene.par(scene.rule_GE), rel=1e-5)


@SETTINGS
@given(scenes(cases(most_ranks=6, most_slots=4), 6))
def test_each_share_goes_to_the_rank_that_stays_coolest(scene: Sources) -> None:
    layer = scene.layer
    z = layer.z
    chosen_EG = scene.rule_GE.T.copy()
    chosen_GE = chosen_EG.T
    share_EG = scene.share_GE.T.copy()
    order_E = descending(expert_heat(layer.heat32, z))
    assert largest_first(share_EG).tolist() == [slow.largest_first(share_G) for share_G in share_EG]
    by_expert = tables.TablesByExpert(chosen_EG, share_EG, scene.first_E1, scene.slot_P)
    order_EG = largest_first(share_EG)
    assignment = tables._assign_shares(scene.phy2log_RS, by_expert, layer.heat32, order_E, order_EG, z)
    share_RS = slow.slot_shares(scene.phy2log_RS, chosen_GE, scene.share_GE.astype(float))
    result_RS = assignment.share_ER[scene.phy2log_RS, np.arange(layer.case.ranks)[:, None]]
    np.testing.assert_allclose(result_RS, share_RS, atol=1e-5)
    expected_GE, margin = slow.spread(scene.phy2log_RS, order_E, *layer.heat, scene.share_GE.astype(float), z)
    if margin > layer.rounding:
        np.testing.assert_array_equal(chosen_GE, expected_GE)


@SETTINGS
@given(scenes(cases(most_ranks=5, most_slots=3), 5))
def test_shares_leave_the_hottest_rank_until_no_move_cools_it(scene: Sources) -> None:
    layer = scene.layer
    z = layer.z
    chosen_EG = scene.rule_GE.T.copy()
    by_expert = tables.TablesByExpert(chosen_EG, scene.share_GE.T.copy(), scene.first_E1, scene.slot_P)
    share_RS = slot_shares(scene.phy2log_RS, scene.rule_GE, scene.share_GE)
    tables.cool(assignment_of(scene.phy2log_RS, share_RS, layer.heat32), by_expert, layer.heat32, z)
    expected_GE, margin = slow.cool(
        scene.phy2log_RS, scene.rule_GE, *layer.heat, scene.share_GE.astype(float), z
    )
    if margin > layer.rounding:
        np.testing.assert_array_equal(chosen_EG.T, expected_GE)


@SETTINGS
@given(scenes(cases(), 9))
def test_solved_tables_are_never_worse_than_the_fixed_rule(scene: Sources) -> None:
    chosen_GE, par = scene.solved()
    assert par <= scene.par(scene.rule_GE) * (1 + 1e-5)
    assert par == pytest.approx(scene.par(chosen_GE), rel=1e-5)
    for table_E in chosen_GE:
        check_log2phy(table_E, scene.phy2log_RS)


def test_solved_tables_bring_a_large_gain_if_sources_are_uneven() -> None:
    heat_NE = np.random.default_rng(2).integers(50, 150, (4, 12)).astype(float)
    scene = Sources(Case(8, 3, heat_NE), 1.0, 8, "uneven", 4)
    assert scene.solved()[1] < scene.par(scene.rule_GE) - 0.1


def company(table_GE: np.ndarray) -> list[list[list[bool]]]:
    """Return, for each expert, which sources use the same replica."""
    return [(column_G[:, None] == column_G).tolist() for column_G in table_GE.T]


RELIEVED_BUT_HIGHER = Case(4, 2, np.array([[85.0, 64, 51, 27, 31], [5, 8, 2, 18, 81]]))
"""A case with a deceptive swap.

Measured on the scale from before the swap, the hottest rank is relieved, but the smooth maximum rises from 5.486 to
5.623.
"""


@SETTINGS
@example(Sources(RELIEVED_BUT_HIGHER, 1.0, 1, "uniform", 0))
@given(scenes(cases(most_ranks=5, most_slots=3), 5))
def test_swap_through_tables_stops_when_no_swap_cools_the_hottest_rank(scene: Sources) -> None:
    layer = scene.layer
    z = layer.z
    share_GE = scene.share_GE.astype(float)
    table_GE = scene.rule_GE.copy()
    result_RS = swap_through_tables(scene.phy2log_RS, table_GE, layer.heat32, scene.share_GE, z, 5_000)
    check_layer(result_RS, layer.case.experts)
    for table_E in table_GE:
        check_log2phy(table_E, result_RS)
    assert company(table_GE) == company(scene.rule_GE)
    for e in range(layer.case.experts):
        assert (result_RS == e).sum() == (scene.phy2log_RS == e).sum()
    share_RS = slow.slot_shares(result_RS, table_GE, share_GE)
    blurred = layer.rounding / slow_search.scale_of(heat.rank_risks(result_RS, share_RS, *layer.heat, z))[1]
    if blurred < 1e-2:
        hot = hottest_rank(assignment_of(result_RS, share_RS.astype(np.float32), layer.heat32), z)[0]
        gains = slow_search.swap_gains(result_RS, share_RS, hot, *layer.heat, z)
        assert max(gains.values(), default=0.0) <= MIN_RELIEF + 1e-3 + 32 * blurred


@SETTINGS
@example(Sources(RELIEVED_BUT_HIGHER, 1.0, 1, "uniform", 0))
@given(scenes(cases(most_ranks=5, most_slots=3), 5))
def test_swap_through_tables_never_raises_the_par_of_a_candidate(scene: Sources) -> None:
    layer = scene.layer
    table_GE = scene.rule_GE
    current = Layer(layer.heat32, deployed_on(scene.phy2log_RS, scene.share_GE, table_GE))
    candidate = Candidate(scene.phy2log_RS, table_GE, 0.0, 0)
    candidate = candidate._replace(par=par_on(candidate, current.heat.episodes, current.deployed, SOLVED))
    result = _refine_through_tables(
        candidate, current, SearchParams(z=layer.z, local_search_steps=5_000, tables=SOLVED)
    )
    check_layer(result.phy2log_RS, layer.case.experts)
    for table_E in result.log2phy_GE:
        check_log2phy(table_E, result.phy2log_RS)
    share_RS = slow.slot_shares(result.phy2log_RS, result.log2phy_GE, scene.share_GE.astype(float))
    assert result.par == pytest.approx(heat.mean_of_max(*layer.heat, result.phy2log_RS, share_RS), rel=1e-4)
    assert result.par <= scene.par(table_GE) * (1 + 1e-5)


@SETTINGS
@given(scenes(cases(), 6))
def test_tables_follow_replicas_that_change_slots(scene: Sources) -> None:
    case = scene.layer.case
    deployed_RS = random_placement(case.ranks, case.slots, case.experts, scene.layer.generator)
    kept_RS, _ = keep_slots(scene.phy2log_RS, deployed_RS)
    result_GE = follow_slots(scene.rule_GE, kept_RS)
    np.testing.assert_array_equal(result_GE // case.slots, scene.rule_GE // case.slots)
    for table_E in result_GE:
        check_log2phy(table_E, kept_RS)


def test_swap_through_tables_chooses_the_best_swap() -> None:
    compared = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        ranks, slots, spare = generator.integers((2, 2, 0), (5, 4, 3))
        heat_NE = generator.gamma(1.0, 100, (generator.integers(1, 5), ranks * slots - spare))
        scene = Sources(Case(int(ranks), int(slots), heat_NE), 0.0, 3, "uneven", seed)
        share_RS = slow.slot_shares(scene.phy2log_RS, scene.rule_GE, scene.share_GE.astype(float))
        expected_RS, margin = slow_search.swapped_through_tables(
            scene.phy2log_RS, share_RS, *scene.layer.heat, 0.0, 12
        )
        table_GE = scene.rule_GE.copy()
        result_RS = swap_through_tables(
            scene.phy2log_RS, table_GE, scene.layer.heat32, scene.share_GE, 0.0, 12
        )
        # If two swaps have nearly the same gain, rounding may decide between them.
        if margin > 3e-5:
            np.testing.assert_array_equal(result_RS, scene.phy2log_RS.ravel()[expected_RS])
            np.testing.assert_array_equal(table_GE, expected_RS.ravel().argsort()[scene.rule_GE])
            compared += (result_RS != scene.phy2log_RS).any()
    assert compared >= 8
