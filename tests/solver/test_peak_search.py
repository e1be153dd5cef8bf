"""The search on the peaks takes the best swap of all, tells the true ratio, ends where no swap helps; kicks win."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver import peak_search as module
from eplb_service.solver.chance import draw
from eplb_service.solver.episode_loads import loads_in_episodes
from eplb_service.solver.kicks import kicked
from eplb_service.solver.peak_search import peak_search
from tests.solver.layers_of import PLAIN, Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import heat, steps

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)
BUSY = (*PLAIN, "one hot", "sparse", "bursty", "alternating")
GAIN = 1e-5


def ratio(layer: PlacedLayer, phy2log_RS: np.ndarray, share_RS: np.ndarray) -> float:
    return heat.mean_of_max(*layer.heat, phy2log_RS, share_RS)


def swap_ratios(layer: PlacedLayer, phy2log_RS: np.ndarray, share_RS: np.ndarray, hot: int) -> dict:
    """Ratio after each legal swap of one rank."""
    return {
        step: ratio(layer, *steps.swapped(phy2log_RS, share_RS, hot, step))
        for step in steps.legal_swaps(phy2log_RS, hot)
    }


@SETTINGS
@given(cases(kinds=BUSY), SEEDS)
def test_the_three_hottest_ranks_of_each_episode_are_known(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    load_RN = loads_in_episodes(layer.phy2log_RS, layer.share_RS.astype(np.float32), layer.scaled_EN)
    wanted_RN = heat.rank_series(layer.phy2log_RS, layer.share_RS, layer.heat[0])
    np.testing.assert_allclose(load_RN, wanted_RN, rtol=1e-5, atol=1e-6)
    top_KN = module._hottest(load_RN)
    for n in range(load_RN.shape[1]):
        wanted = np.argsort(-load_RN[:, n], kind="stable")[:3].tolist()
        assert top_KN[:, n].tolist() == wanted + [-1] * (3 - len(wanted))


@SETTINGS
@given(cases(most_ranks=6, most_slots=4, kinds=BUSY), SEEDS)
def test_the_swap_taken_is_the_best_of_all(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    share_RS = layer.share_RS.astype(np.float32)
    load_RN = loads_in_episodes(layer.phy2log_RS, share_RS, layer.scaled_EN)
    top_KN = module._hottest(load_RN)
    hot = seed % case.ranks
    before = ratio(layer, layer.phy2log_RS, layer.share_RS)
    *step, found = module._best_peak_swap(
        layer.phy2log_RS, share_RS, layer.scaled_EN, layer.share_N, load_RN, top_KN, hot, before - GAIN
    )
    after = swap_ratios(layer, layer.phy2log_RS, layer.share_RS, hot)
    least = min(after.values(), default=np.inf)
    if step[0] < 0:
        assert least >= before - GAIN - 1e-5 * case.ranks
        return
    assert found < before
    assert found == pytest.approx(least, rel=1e-5)
    assert after[tuple(step)] == pytest.approx(least, rel=1e-5)


@SETTINGS
@given(cases(most_ranks=5, most_slots=3), SEEDS)
def test_a_patient_search_ends_where_no_swap_helps(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    phy2log_RS, share_RS = layer.phy2log_RS.copy(), layer.share_RS.astype(np.float32)
    before = ratio(layer, phy2log_RS, layer.share_RS)
    found = peak_search(phy2log_RS, share_RS, layer.scaled_EN, layer.share_N, case.ranks, 10_000)
    check_layer(phy2log_RS, case.experts)
    np.testing.assert_allclose(share_RS, heat.even_shares(phy2log_RS), rtol=1e-6)
    assert found == pytest.approx(ratio(layer, phy2log_RS, share_RS), rel=1e-4)
    assert found <= before + 1e-5
    if layer.share_N.sum() > 0:
        for rank in range(case.ranks):
            after = swap_ratios(layer, phy2log_RS, share_RS.astype(float), rank)
            assert min(after.values(), default=np.inf) >= found - GAIN - 1e-4


@settings(max_examples=40)
@given(cases(most_ranks=6, most_slots=3), SEEDS, st.integers(0, 3))
def test_kicks_never_lose(case: Case, seed: int, rounds: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    arguments = layer.demand, layer.scaled_EN, layer.share_N, 1.0, 2, 200, rounds, seed
    given_RS = layer.phy2log_RS.copy()
    found_RS, found = kicked(given_RS, *arguments)
    np.testing.assert_array_equal(given_RS, layer.phy2log_RS)
    check_layer(found_RS, case.experts)
    assert found <= ratio(layer, layer.phy2log_RS, layer.share_RS) + 1e-5
    assert found == pytest.approx(ratio(layer, found_RS, heat.even_shares(found_RS)), rel=1e-4)
    again_RS, again = kicked(layer.phy2log_RS, *arguments)
    np.testing.assert_array_equal(again_RS, found_RS)
    assert again == found


def test_kicks_find_counts_that_swaps_cannot() -> None:
    layer = PlacedLayer(Case(6, 2, np.array([[60.0, 50.0, 9.0, 5.0, 3.0, 2.0]])), 1.0, 5)
    ratios = [
        kicked(layer.phy2log_RS, layer.demand, layer.scaled_EN, layer.share_N, 1.0, 6, 500, rounds, 1)[1]
        for rounds in (0, 40)
    ]
    assert ratios[1] < ratios[0] - 0.05


def splitmix(state: int) -> tuple[int, int]:
    """The published generator in whole numbers: next state and its number."""
    word = 2**64 - 1
    state = state + 0x9E3779B97F4A7C15 & word
    mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & word
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & word
    return state, mixed ^ mixed >> 31


@SETTINGS
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(1, 2**31), min_size=1, max_size=5))
def test_chance_is_the_published_generator(seed: int, bounds: list[int]) -> None:
    state_1, state = np.array([seed], dtype=np.uint64), seed
    for below in bounds:
        state, number = splitmix(state)
        assert draw(state_1, below) == number % below
        assert int(state_1[0]) == state


def test_chance_gives_the_known_first_number() -> None:
    assert splitmix(0)[1] == 0xE220A8397B1DCDAF
