"""The tree returns legal counts, judged as they will be placed, never worse than greedy; full width misses none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.model import SearchParams
from eplb_service.solver.search.construction import descending, greedy_replicas, hottest_rank
from eplb_service.solver.search.evaluation import expert_heat
from eplb_service.solver.search.tree_search import floor_of, heat_per_replica, place, tree_search
from tests.solver.layers_of import KNOWN_EXAMPLE, PLAIN, Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import placing, replicas, tree

SETTINGS = settings(max_examples=80)
Z = st.sampled_from((0.0, 1.0))


def peak_of(layer: PlacedLayer, replicas_E: np.ndarray) -> float:
    """Risk of the hottest rank once these replicas are placed greedily."""
    assignment = place(replicas_E, layer.demand, layer.case.ranks, layer.case.slots, layer.z)
    return hottest_rank(assignment, layer.z)[1]


def tree_params(z: float, groups: int, spread: int, beam: int, leaves: int) -> SearchParams:
    return SearchParams(z=z, tree_groups=groups, tree_spread=spread, tree_beam=beam, tree_leaves=leaves)


def greedy_peak(layer: PlacedLayer) -> float:
    case = layer.case
    return peak_of(layer, greedy_replicas(expert_heat(layer.demand, layer.z), case.ranks, case.slots))


@SETTINGS
@given(cases(), Z, st.integers(1, 5), st.integers(0, 2), st.integers(1, 4), st.integers(1, 5))
def test_leaves_are_legal_and_judged_truly(
    case: Case, z: float, groups: int, spread: int, beam: int, leaves: int
) -> None:
    layer = PlacedLayer(case, z)
    found_KE, risk_K = tree_search(
        layer.demand, case.ranks, case.slots, tree_params(z, groups, spread, beam, leaves)
    )
    assert 1 <= len(found_KE) == len(risk_K) <= leaves
    assert (found_KE.sum(axis=1) == case.ranks * case.slots).all()
    assert found_KE.min() >= 1
    assert found_KE.max() <= case.ranks
    assert len({tuple(replicas_E) for replicas_E in found_KE.tolist()}) == len(found_KE)
    if case.ranks * case.slots == case.experts:
        assert (found_KE == 1).all()
        return
    assert risk_K.tolist() == sorted(risk_K)
    for replicas_E, risk in zip(found_KE, risk_K, strict=True):
        assert risk == pytest.approx(peak_of(layer, replicas_E), rel=1e-5)
    assert risk_K[0] <= greedy_peak(layer) * (1 + 1e-5)


@SETTINGS
@given(
    cases(kinds=(*PLAIN, "bursty")),
    Z,
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_the_tree_is_walked_group_by_group(
    case: Case, z: float, groups: int, spread: int, beam: int, leaves: int
) -> None:
    layer = PlacedLayer(case, z)
    if case.ranks * case.slots == case.experts:
        return
    heat_E = expert_heat(layer.demand, z)
    wanted = tree.tree_search(
        lambda replicas_E: peak_of(layer, np.array(replicas_E, dtype=np.int32)),
        lambda replicas_E, fixed: floor_of(np.array(replicas_E, np.int32), heat_E, np.array(fixed, np.int64)),
        heat_E,
        *(case.ranks, case.slots, groups, spread, beam, leaves),
    )
    _, risk_K = tree_search(
        layer.demand, case.ranks, case.slots, tree_params(z, groups, spread, beam, leaves)
    )
    np.testing.assert_allclose(risk_K, [risk for risk, _ in wanted], rtol=1e-5)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), Z)
def test_a_leaf_is_as_cool_as_slow_placing_makes_it(case: Case, z: float) -> None:
    layer = PlacedLayer(case, z)
    (replicas_E, *_), _ = tree_search(layer.demand, case.ranks, case.slots, tree_params(z, 3, 1, 2, 1))
    order_E = descending(heat_per_replica(layer.demand, replicas_E, z))
    _, margin = placing.place(replicas_E, order_E, *layer.heat, case.ranks, case.slots, z)
    if margin > layer.rounding:
        wanted = placing.peak(replicas_E, order_E, *layer.heat, case.ranks, case.slots, z)
        assert peak_of(layer, replicas_E) == pytest.approx(wanted, abs=layer.rounding)


@settings(max_examples=40)
@given(cases(most_ranks=4, most_slots=2, kinds=(*PLAIN, "bursty", "alternating")))
def test_full_width_finds_the_best_counts_there_are(case: Case) -> None:
    layer = PlacedLayer(case, 0.0)
    spare = case.ranks * case.slots - case.experts
    all_KE = list(replicas.all_counts(case.experts, case.ranks, case.slots))
    if spare == 0 or len(all_KE) > 300:
        return
    leaves = 3
    _, risk_K = tree_search(
        layer.demand, case.ranks, case.slots, tree_params(0.0, case.experts, spare, len(all_KE), leaves)
    )
    best = sorted(peak_of(layer, np.array(replicas_E, dtype=np.int32)) for replicas_E in all_KE)[:leaves]
    np.testing.assert_allclose(risk_K, best, rtol=1e-5)


@settings(max_examples=40)
@given(cases(most_ranks=4, most_slots=2), Z, st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_no_leaf_is_better_than_the_best_counts_there_are(
    case: Case, z: float, groups: int, spread: int, beam: int
) -> None:
    layer = PlacedLayer(case, z)
    all_KE = list(replicas.all_counts(case.experts, case.ranks, case.slots))
    if case.ranks * case.slots == case.experts or len(all_KE) > 300:
        return
    _, risk_K = tree_search(layer.demand, case.ranks, case.slots, tree_params(z, groups, spread, beam, 1))
    assert risk_K[0] >= min(peak_of(layer, np.array(counts, dtype=np.int32)) for counts in all_KE) * (
        1 - 1e-5
    )


@given(cases())
@settings(max_examples=30)
def test_without_groups_the_greedy_counts_are_taken_as_they_are(case: Case) -> None:
    layer = PlacedLayer(case, 1.0)
    found_KE, risk_K = tree_search(layer.demand, case.ranks, case.slots, tree_params(1.0, 0, 2, 4, 3))
    greedy_E = greedy_replicas(expert_heat(layer.demand, 1.0), case.ranks, case.slots)
    np.testing.assert_array_equal(found_KE, greedy_E[None, :])
    assert np.isinf(risk_K).all()


def test_the_tree_beats_greedy_counts_on_the_known_example() -> None:
    layer = PlacedLayer(Case(8, 2, KNOWN_EXAMPLE[None, :]), 0.0)
    _, risk_K = tree_search(layer.demand, 8, 2, tree_params(0.0, 4, 2, 4, 8))
    assert greedy_peak(layer) * KNOWN_EXAMPLE.sum() / 8 == pytest.approx(232, abs=0.1)
    assert risk_K[0] * KNOWN_EXAMPLE.sum() / 8 <= 200.01
