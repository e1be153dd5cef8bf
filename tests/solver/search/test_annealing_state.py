"""While annealing, what is kept at hand stays what the placement says, and changes are judged by what they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver.search import annealing_state as module
from eplb_service.solver.search.annealing_state import AnnealingState, Move
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.search.test_top_ranks import assert_known
from tests.solver.slow import changes, heat

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)
SMALL = cases(most_ranks=6, most_slots=4)


def started(case: Case, seed: int) -> tuple[PlacedLayer, AnnealingState]:
    layer = PlacedLayer(case, 1.0, seed)
    return layer, module.start(layer.phy2log_RS, layer.scaled_EN)


def loads_of(layer: PlacedLayer, phy2log_RS: np.ndarray) -> np.ndarray:
    return heat.rank_series(phy2log_RS, heat.even_shares(phy2log_RS), layer.heat[0])


def assert_agrees(state: AnnealingState, layer: PlacedLayer) -> None:
    """Copies, holders, loads and hottest ranks are those of the placement; nothing is marked as changed."""
    experts = range(layer.case.experts)
    check_layer(state.phy2log_RS, len(experts))
    holders = [{r for r, row in enumerate(state.phy2log_RS) if expert in row} for expert in experts]
    assert state.replicas_E.tolist() == [len(held) for held in holders]
    for expert in experts:
        assert sorted(state.holder_EK[expert, : state.replicas_E[expert]]) == sorted(holders[expert])
        assert set(np.flatnonzero(state.holds_ER[expert])) == holders[expert]
    wanted_RN = loads_of(layer, state.phy2log_RS)
    np.testing.assert_allclose(state.top_ranks.load_RN, wanted_RN, rtol=1e-5, atol=1e-5 * layer.case.ranks)
    assert_known(state.top_ranks, state.top_ranks.load_RN.copy())
    assert not state.changed_R1.any()


def note(state: AnnealingState, scaled_EN: np.ndarray, attempt: Move) -> int:
    load_RN, marks = state.top_ranks.load_RN, state[5:]
    if attempt.swaps:
        return module.swapped_loads(load_RN, scaled_EN, state.replicas_E, attempt, *marks)
    return module.passed_loads(load_RN, scaled_EN, *state[1:4], attempt, *marks)


def go(state: AnnealingState, layer: PlacedLayer, attempt: Move) -> None:
    count = note(state, layer.scaled_EN, attempt)
    module.apply_move(state, attempt, count)
    state.changed_R1[:] = False


def may(state: AnnealingState, scaled_EN: np.ndarray, attempt: Move) -> bool:
    if attempt.swaps:
        return module.may_swap(state.top_ranks.load_NR, scaled_EN, *state[1:3], attempt)
    return module.may_pass(state.top_ranks.load_NR, scaled_EN, *state[1:4], attempt)


def some_tries(layer: PlacedLayer, phy2log_RS: np.ndarray, most: int, episode: int = -1) -> list[Move]:
    """A few of all changes, legal or not."""
    attempts = list(changes.every_try(phy2log_RS, episode))
    return [attempts[k] for k in layer.generator.permutation(len(attempts))[:most]]


def legal_tries(layer: PlacedLayer, phy2log_RS: np.ndarray, most: int) -> list[Move]:
    attempts = [attempt for attempt in changes.every_try(phy2log_RS) if changes.is_legal(phy2log_RS, attempt)]
    return [attempts[k] for k in layer.generator.permutation(len(attempts))[:most]]


@SETTINGS
@given(SMALL, SEEDS)
def test_a_search_starts_from_a_copy_of_what_it_is_given(case: Case, seed: int) -> None:
    layer, state = started(case, seed)
    np.testing.assert_array_equal(state.phy2log_RS, layer.phy2log_RS)
    assert not np.shares_memory(state.phy2log_RS, layer.phy2log_RS)
    assert_agrees(state, layer)


@SETTINGS
@given(SMALL, SEEDS)
def test_changes_that_leave_a_placement_to_be_served_are_legal(case: Case, seed: int) -> None:
    layer, state = started(case, seed)
    for attempt in some_tries(layer, layer.phy2log_RS, 60):
        assert may(state, layer.scaled_EN, attempt) == changes.is_legal(layer.phy2log_RS, attempt), attempt


@SETTINGS
@given(SMALL, SEEDS)
def test_guided_changes_keep_who_is_burdened_below_the_rank_relieved(case: Case, seed: int) -> None:
    layer, state = started(case, seed)
    episode = int(layer.generator.integers(layer.scaled_EN.shape[1]))
    rounding = 1e-5 * case.ranks
    before_R = loads_of(layer, layer.phy2log_RS)[:, episode]
    for attempt in some_tries(layer, layer.phy2log_RS, 60, episode):
        found = may(state, layer.scaled_EN, attempt)
        if not changes.is_legal(layer.phy2log_RS, attempt):
            assert not found
            continue
        room = changes.room(layer.phy2log_RS, attempt, layer.heat[0])
        if abs(room) > rounding:
            assert found == (room > 0), attempt
        if found:
            after_R = loads_of(layer, changes.after(layer.phy2log_RS, attempt))[:, episode]
            hotter_R = after_R > before_R + rounding
            assert (after_R[hotter_R] < before_R[attempt.rank] + rounding).all()


HOT_RANK = np.array([[0, 1], [2, 3], [2, 4], [5, 6]], dtype=np.int32)
"""The first rank is to carry 2, in experts 0 and 1; heat in eighths keeps all sums exact."""


def may_with(heat_E: list[float], attempt: Move) -> bool:
    scaled_EN = np.array([heat_E], dtype=np.float32).T.copy()
    state = module.start(HOT_RANK, scaled_EN)
    assert state.top_ranks.load_RN[0] == 2
    return may(state, scaled_EN, attempt)


def test_a_swap_must_leave_the_other_rank_below_what_the_hot_one_had() -> None:
    swap = Move(0, 0, 1, 0, 0, 2, True, 0)
    assert not may_with([1.5, 0.5, 1, 0.5, 0, 1, 1], swap), "it would carry 2 as well"
    assert may_with([1.5, 0.5, 1, 0.375, 0, 1, 1], swap)


def test_a_swap_must_cool_the_hot_rank() -> None:
    swap = Move(0, 1, 1, 0, 1, 2, True, 0)
    assert not may_with([2, 0, 0, 0.5, 0, 1, 1], swap), "both experts are idle"
    assert may_with([1.875, 0.125, 0, 0.5, 0, 1, 1], swap)


def test_a_copy_passed_on_must_leave_its_rank_below_what_the_hot_one_has() -> None:
    passed = Move(0, 0, 1, 0, 0, 2, False, 0)
    assert not may_with([2, 0, 1, 1, 0, 0.5, 0.5], passed), "it would carry 2 as well"
    assert may_with([2, 0, 1, 0.875, 0, 0.5, 0.5], passed)


def test_a_copy_given_up_must_leave_those_that_remain_below_what_the_hot_rank_has() -> None:
    passed = Move(0, 0, 1, 0, 0, 2, False, 0)
    assert not may_with([2, 0, 2, 0, 0, 0.5, 0.5], passed), "the other replica would carry 2 as well"
    assert may_with([2, 0, 1.875, 0, 0, 0.5, 0.5], passed)


@SETTINGS
@given(SMALL, SEEDS)
def test_a_change_is_judged_by_the_loads_that_it_would_make(case: Case, seed: int) -> None:
    layer, state = started(case, seed)
    before_RN = state.top_ranks.load_RN.copy()
    for attempt in legal_tries(layer, layer.phy2log_RS, 12):
        state.changed_RN[:] = np.nan
        count = note(state, layer.scaled_EN, attempt)
        after_RS = changes.after(layer.phy2log_RS, attempt)
        concerned_R = np.isin(layer.phy2log_RS, (attempt.mine, attempt.theirs)).any(axis=1)
        if attempt.swaps:
            concerned_R = np.isin(np.arange(case.ranks), (attempt.rank, attempt.other))
        assert sorted(state.rank_K[:count]) == np.flatnonzero(concerned_R).tolist()
        assert state.changed_R1.tolist() == [*concerned_R.tolist(), False]
        found_RN = np.where(concerned_R[:, None], state.changed_RN, before_RN)
        np.testing.assert_allclose(found_RN, loads_of(layer, after_RS), rtol=1e-5, atol=1e-6 * case.ranks)
        np.testing.assert_array_equal(state.top_ranks.load_RN, before_RN)
        state.changed_R1[:] = False


@SETTINGS
@given(SMALL, SEEDS, st.integers(1, 25))
def test_after_any_steps_everything_agrees_with_the_placement(case: Case, seed: int, steps: int) -> None:
    layer, state = started(case, seed)
    for _ in range(steps):
        before_RS = state.phy2log_RS.copy()
        for attempt in legal_tries(layer, before_RS, 1):
            go(state, layer, attempt)
            np.testing.assert_array_equal(state.phy2log_RS, changes.after(before_RS, attempt))
            assert_agrees(state, layer)


@SETTINGS
@given(SMALL, SEEDS)
def test_summing_again_takes_away_what_piled_up(case: Case, seed: int) -> None:
    layer, state = started(case, seed)
    state.changed_RN[:] = layer.generator.gamma(1, 1, state.changed_RN.shape)
    state.top_ranks.load_RN[:] += 1
    state.top_ranks.load_NR[:] += 1
    state.top_ranks.peak_KN[:] += 2
    module.resum(state, layer.scaled_EN)
    assert_agrees(state, layer)
    assert np.abs(state.top_ranks.load_RN - loads_of(layer, state.phy2log_RS)).max() <= 1e-6 * case.ranks


@pytest.mark.parametrize("gainer", range(5))
def test_all_spare_replicas_can_come_to_one_expert(gainer: int) -> None:
    layer, state = started(Case(4, 2, np.ones((1, 5))), 3)
    while state.replicas_E[gainer] < 4:
        attempts = [one for one in legal_tries(layer, state.phy2log_RS, 200) if gainer != one.theirs]
        passing = [one for one in attempts if gainer == one.mine and not one.swaps]
        go(state, layer, (passing or attempts)[0])
    assert_agrees(state, layer)
