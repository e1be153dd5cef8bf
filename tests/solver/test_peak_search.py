"""The search on the peaks takes the best swap of all, tells the true ratio, and ends where no swap helps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver import peak_search as module
from eplb_service.solver.episode_loads import loads_in_episodes
from eplb_service.solver.peak_search import peak_search
from eplb_service.solver.peaks import peaks_of
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
def test_loads_are_summed_in_each_episode(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    load_RN = loads_in_episodes(layer.phy2log_RS, layer.share_RS.astype(np.float32), layer.scaled_EN)
    wanted_RN = heat.rank_series(layer.phy2log_RS, layer.share_RS, layer.heat[0])
    np.testing.assert_allclose(load_RN, wanted_RN, rtol=1e-5, atol=1e-6)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4, kinds=BUSY), SEEDS)
def test_the_swap_taken_is_the_best_of_all(case: Case, seed: int) -> None:
    assume(case.heat_NE.any())
    layer = PlacedLayer(case, 1.0, seed)
    share_RS = layer.share_RS.astype(np.float32)
    peaks = peaks_of(loads_in_episodes(layer.phy2log_RS, share_RS, layer.scaled_EN))
    hot = seed % case.ranks
    before = ratio(layer, layer.phy2log_RS, layer.share_RS)
    *step, found = module._best_peak_swap(
        layer.phy2log_RS, share_RS, layer.scaled_EN, layer.share_N, peaks, hot, before - GAIN
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
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_the_rank_hottest_in_the_weightiest_episodes_comes_first(
    ranks: int, episodes: int, data: st.DataObject
) -> None:
    hottest_N = data.draw(st.lists(st.integers(0, ranks - 1), min_size=episodes, max_size=episodes))
    weight_N = data.draw(st.lists(st.integers(0, 4), min_size=episodes, max_size=episodes))
    stuck_R = np.array(data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks)))
    found = module._most_often_hottest(
        np.array(hottest_N, dtype=np.int32), np.array(weight_N, dtype=np.float32), stuck_R
    )
    weights = {
        rank: sum(weight for weight, hottest in zip(weight_N, hottest_N, strict=True) if hottest == rank)
        for rank in np.flatnonzero(~stuck_R)
    }
    assert found == max(weights, key=weights.__getitem__, default=-1)


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
