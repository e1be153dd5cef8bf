"""Placements are legal and place the hottest experts first. Tree search rates replica counts by placing them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import check_layer
from eplb_core.solver.construction import (
    _allot_replicas,
    _cut_into_groups,
    _greedy_replicas,
    descending,
    even_shares,
    hottest_rank,
    place,
    replace,
    replicas_of,
    shift_load,
    tree_search,
)
from eplb_core.solver.evaluation import expert_heat
from tests.solver.assignment_sums import assert_sums_hold
from tests.solver.layers_of import PLAIN, Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import construction as slow

SETTINGS = settings(max_examples=80)
SEEDS = st.integers(0, 2**32 - 1)


@SETTINGS
@given(cases(), SEEDS)
def test_the_sums_of_an_assignment_match_its_slots(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    share_RS = even_shares(layer.phy2log_RS, case.experts)
    np.testing.assert_allclose(share_RS, layer.share_RS, rtol=1e-6)
    assignment = layer.assignment()
    assert_sums_hold(assignment, layer)
    np.testing.assert_array_equal(assignment.phy2log_RS, layer.phy2log_RS)
    counts_E = np.bincount(layer.phy2log_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(assignment.replicas_E, counts_E)
    np.testing.assert_array_equal(replicas_of(layer.phy2log_RS, case.experts), counts_E)
    rank, risk = hottest_rank(assignment, layer.z)
    risk_R = layer.risks()
    assert risk == pytest.approx(risk_R.max(), abs=layer.rounding)
    assert risk_R[rank] == pytest.approx(risk_R.max(), abs=layer.rounding)


@SETTINGS
@given(cases(most_ranks=5, most_slots=4), SEEDS, st.integers(1, 30))
def test_sums_stay_correct_after_any_changes(case: Case, seed: int, changes: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    assignment = layer.assignment()
    for _ in range(changes):
        rank = layer.generator.integers(case.ranks)
        slot = layer.generator.integers(case.slots)
        held = set(assignment.phy2log_RS[rank].tolist())
        absent = sorted(set(range(case.experts)) - held)
        if absent and layer.generator.random() < 0.6:
            come = int(layer.generator.choice(absent))
            replace(assignment, layer.heat32, rank, slot, come, layer.generator.random())
            assert assignment.phy2log_RS[rank, slot] == come
        else:
            expert = assignment.phy2log_RS[rank, slot]
            before = assignment.share_ER[expert, rank]
            shift_load(assignment, layer.heat32, expert, rank, 0.25)
            assert assignment.share_ER[expert, rank] == pytest.approx(before + 0.25)
    assert_sums_hold(assignment, layer)


@settings(max_examples=120)
@given(cases(most_ranks=6, most_slots=4), st.sampled_from((0.0, 1.0, 3.0)), SEEDS, st.booleans())
def test_each_replica_goes_to_the_coolest_rank(case: Case, z: float, seed: int, greedy: bool) -> None:
    layer = PlacedLayer(case, z, seed)
    # Random legal counts include cases in which a full rank must free a slot.
    replicas_E = np.bincount(layer.phy2log_RS.ravel(), minlength=case.experts).astype(np.int32)
    if greedy:
        replicas_E = _greedy_replicas(expert_heat(layer.heat32, z), case.ranks, case.slots)
    assignment = place(replicas_E, layer.heat32, case.ranks, case.slots, z)
    check_layer(assignment.phy2log_RS, case.experts)
    placed_E = np.bincount(assignment.phy2log_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(placed_E, replicas_E)
    assert_sums_hold(assignment, layer)
    order_E = descending(expert_heat(layer.heat32, z) / replicas_E.astype(np.float32))
    expected_RS, margin = slow.place(replicas_E, order_E, *layer.heat, case.ranks, case.slots, z)
    if margin > layer.rounding:
        np.testing.assert_array_equal(assignment.phy2log_RS, expected_RS)


def test_a_full_rank_frees_a_slot_if_every_open_rank_holds_the_expert() -> None:
    # Cold experts 2, 3 and 4 fill rank 2. When expert 5's last replica is placed, every rank with a free slot already
    # holds the expert.
    layer = PlacedLayer(Case(3, 3, np.array([[100.0, 90.0, 3.3, 3.2, 3.1, 3.0, 0.5]])), 0.0)
    assignment = place(np.array([1, 1, 1, 1, 1, 3, 1], dtype=np.int32), layer.heat32, 3, 3, 0.0)
    assert assignment.phy2log_RS.tolist() == [[0, 5, 2], [1, 5, 6], [4, 3, 5]]
    assert_sums_hold(assignment, layer)


HEAT = st.integers(0, 50) | st.floats(0, 2.0**100, width=32)


@SETTINGS
@given(st.lists(HEAT, min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 6), st.data())
def test_replicas_go_to_the_hottest_experts(
    heat: list[float], budget: int, ranks: int, data: st.DataObject
) -> None:
    heat_E = np.array(heat, dtype=np.float32)
    start = data.draw(st.lists(st.integers(1, ranks), min_size=len(heat), max_size=len(heat)))
    replicas_E = np.array(start, dtype=np.int32)
    unused = _allot_replicas(replicas_E, heat_E, budget, ranks)
    assert (replicas_E.tolist(), unused) == slow.allot(start, heat_E, budget, ranks)


Z = st.sampled_from((0.0, 1.0))


def peak_of(layer: PlacedLayer, replicas_E: np.ndarray) -> float:
    """Return the hottest rank's risk after placing these replicas greedily."""
    assignment = place(replicas_E, layer.heat32, layer.case.ranks, layer.case.slots, layer.z)
    return hottest_rank(assignment, layer.z)[1]


def greedy_peak(layer: PlacedLayer) -> float:
    case = layer.case
    return peak_of(layer, _greedy_replicas(expert_heat(layer.heat32, layer.z), case.ranks, case.slots))


@SETTINGS
@given(cases(), Z, st.integers(1, 5), st.integers(0, 2), st.integers(1, 4), st.integers(1, 5))
def test_search_leaves_are_legal_and_rated_by_their_placement(
    case: Case, z: float, groups: int, spread: int, beam: int, leaves: int
) -> None:
    layer = PlacedLayer(case, z)
    actual_KE, risk_K = tree_search(layer.heat32, case.ranks, case.slots, z, leaves, groups, spread, beam)
    assert 1 <= len(actual_KE) == len(risk_K) <= leaves
    assert (actual_KE.sum(axis=1) == case.ranks * case.slots).all()
    assert actual_KE.min() >= 1
    assert actual_KE.max() <= case.ranks
    assert len({tuple(replicas_E) for replicas_E in actual_KE.tolist()}) == len(actual_KE)
    if case.ranks * case.slots == case.experts:
        assert (actual_KE == 1).all()
        return
    assert risk_K.tolist() == sorted(risk_K)
    for replicas_E, risk in zip(actual_KE, risk_K, strict=True):
        assert risk == pytest.approx(peak_of(layer, replicas_E), rel=1e-5)
    assert risk_K[0] <= greedy_peak(layer) * (1 + 1e-5)


def is_greedy_within_groups(layer: PlacedLayer, replicas_E: np.ndarray) -> bool:
    """Return True if, within each group of the tree search, replicas are allotted by the greedy rule."""
    heat_E = expert_heat(layer.heat32, layer.z)
    greedy_E = _greedy_replicas(heat_E, layer.case.ranks, layer.case.slots)
    for group_M, _ in _cut_into_groups(greedy_E, descending(heat_E), layer.case.experts):
        group_M = np.sort(group_M)
        budget = int(replicas_E[group_M].sum()) - len(group_M)
        allotted, _ = slow.allot(np.ones(len(group_M)), heat_E[group_M], budget, layer.case.ranks)
        if allotted != replicas_E[group_M].tolist():
            return False
    return True


@settings(max_examples=40)
@given(cases(most_ranks=4, most_slots=2, kinds=(*PLAIN, "bursty", "alternating")))
def test_a_full_width_search_returns_the_best_replica_counts_that_are_greedy_within_groups(
    case: Case,
) -> None:
    layer = PlacedLayer(case, 0.0)
    spare = case.ranks * case.slots - case.experts
    all_KE = np.array(list(slow.all_counts(case.experts, case.ranks, case.slots)), dtype=np.int32)
    if spare == 0 or len(all_KE) > 300:
        return
    leaves = 3
    _, risk_K = tree_search(
        layer.heat32, case.ranks, case.slots, 0.0, leaves, case.experts, spare, len(all_KE)
    )
    reachable_KE = [replicas_E for replicas_E in all_KE if is_greedy_within_groups(layer, replicas_E)]
    best = sorted(peak_of(layer, replicas_E) for replicas_E in reachable_KE)[:leaves]
    np.testing.assert_allclose(risk_K, best, rtol=1e-5)
