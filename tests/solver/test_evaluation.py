"""After any change, the objective and the hottest ranks match their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement, par
from eplb_core.planner.score import expected_loads
from eplb_core.solver.annealing import _par_of_changed
from eplb_core.solver.construction import even_shares
from eplb_core.solver.evaluation import (
    TopRanks,
    expert_heat,
    mean_of_max,
    mean_peak,
    peak_of_two_changed,
    risk,
    top_ranks_of,
    update_loads,
)
from eplb_core.solver.model import _normalise
from eplb_core.solver.window import episode_loads, loads_of_ranks, sum_episodes
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer, random_placement
from tests.solver.slow import heat

SETTINGS = settings(max_examples=100)
SEEDS = st.integers(0, 2**32 - 1)


@SETTINGS
@given(cases(), st.sampled_from((0.0, 0.7, 2.0)))
def test_normalised_heat_has_the_mean_and_covariance_of_the_slow_twin(case: Case, z: float) -> None:
    layer = PlacedLayer(case, z)
    expected = heat.normalise(case.heat_NE, layer.weight_N, case.ranks)
    for value, twin in zip(layer.heat, expected, strict=True):
        np.testing.assert_allclose(value, twin, rtol=1e-6)
    mean_E, gram_EE = heat.demand_of(*layer.heat)
    np.testing.assert_allclose(layer.heat32.mean_E, mean_E, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.heat32.gram_EE, gram_EE, rtol=1e-4, atol=1e-5 * case.ranks**2)
    np.testing.assert_array_equal(layer.heat32.gram_EE, layer.heat32.gram_EE.T)
    expected_E = [heat.risk_of(heat_N, layer.share_N, z) for heat_N in layer.heat[0]]
    np.testing.assert_allclose(expert_heat(layer.heat32, z), expected_E, rtol=1e-4, atol=1e-3 * case.ranks)


def test_risk_treats_a_variance_rounded_below_zero_as_zero() -> None:
    assert risk(np.float32(2.0), np.float32(4.0), 1.5) == 5.0
    assert risk(np.float32(2.0), np.float32(-1e-9), 1.5) == 2.0


@SETTINGS
@given(cases(), SEEDS)
def test_ratio_is_the_mean_of_the_peaks(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    share_RS = layer.generator.random(layer.share_RS.shape).astype(np.float32)
    ratio = mean_of_max(layer.scaled_EN, layer.share_N, layer.phy2log_RS, share_RS)
    assert ratio == pytest.approx(heat.mean_of_max(*layer.heat, layer.phy2log_RS, share_RS), rel=1e-5)


@SETTINGS
@given(cases(), st.integers(0, 10**6))
def test_the_objective_equals_the_peak_to_average_ratio(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    placement = Placement(layer.phy2log_RS[None], case.experts)
    loads_NLR = expected_loads(case.heat_NE[:, None], placement, placement.default_log2phy(), None, "even")
    expected = par(loads_NLR)[0]
    weight_RS = even_shares(layer.phy2log_RS, case.experts)
    seen = _normalise(case.heat_NE, np.ones(len(case.heat_NE)), case.ranks)
    ratio = mean_of_max(*seen, layer.phy2log_RS, weight_RS)
    assert ratio == pytest.approx(1.0 if np.isnan(expected) else expected, rel=1e-4)


@SETTINGS
@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_episodes_match_those_of_the_window(steps: int, episodes: int, whole: bool) -> None:
    heat_TLE = np.random.default_rng(steps).integers(0, 9, (steps, 2, 3))
    heat_TLE = heat_TLE if whole else heat_TLE / 4
    expected_NLE = heat.sum_episodes(heat_TLE, min(episodes, steps))
    actual_KNE = sum_episodes(heat_TLE, np.array([1]), min(episodes, steps))
    np.testing.assert_allclose(actual_KNE, expected_NLE.transpose(1, 0, 2)[[1]], rtol=1e-12)


@SETTINGS
@given(cases(), SEEDS, st.booleans())
def test_rank_loads_are_sums_over_slots(case: Case, seed: int, whole: bool) -> None:
    generator = np.random.default_rng(seed)
    shape = case.ranks, case.slots, case.experts
    phy2log_LRS = np.stack([random_placement(*shape, generator) for _ in range(2)])
    share_LP = generator.random((2, case.ranks * case.slots))
    heat_NLE = np.stack([case.heat_NE, np.floor(case.heat_NE[::-1] / 3)], axis=1)
    heat_NLE = heat_NLE.astype(int if whole else float)
    actual_NLR = loads_of_ranks(heat_NLE, phy2log_LRS, share_LP)
    np.testing.assert_allclose(actual_NLR, heat.loads_of_ranks(heat_NLE, phy2log_LRS, share_LP), rtol=1e-12)


@SETTINGS
@given(cases(), SEEDS, st.integers(1, 20), st.booleans())
def test_episode_loads_match_loads_of_the_summed_steps(
    case: Case, seed: int, steps: int, whole: bool
) -> None:
    generator = np.random.default_rng(seed)
    layer_K = np.array([2, 0])
    shape = case.ranks, case.slots, case.experts
    phy2log_KRS = np.stack([random_placement(*shape, generator) for _ in layer_K])
    share_KP = generator.random((2, case.ranks * case.slots))
    heat_TLE = generator.integers(0, 100, (steps, 3, case.experts)) * generator.integers(0, 2, (steps, 3, 1))
    heat_TLE = heat_TLE.astype(np.int32) if whole else heat_TLE / 4
    episodes = int(generator.integers(1, steps + 1))
    load_TKR = episode_loads(heat_TLE, layer_K, phy2log_KRS, share_KP, episodes)
    alone_KR = np.ones((2, case.ranks), dtype=np.int32)
    heat_NKE = heat.sum_episodes(heat_TLE, episodes)[:, layer_K]
    np.testing.assert_allclose(
        load_TKR.loads_NKR, heat.loads_of_ranks(heat_NKE, phy2log_KRS, share_KP), rtol=1e-12, atol=1e-9
    )
    wanted_K = heat.volatility(load_TKR.loads_NKR, alone_KR)
    np.testing.assert_allclose(load_TKR.rank_variance_K, wanted_K, rtol=1e-9, atol=1e-15)
    wanted_K = heat.volatility(heat_NKE, Placement(phy2log_KRS, case.experts).replicas())
    np.testing.assert_allclose(load_TKR.expert_variance_K, wanted_K, rtol=1e-9, atol=1e-15)


class Loads:
    """Loads of a few ranks and episodes, with many ties and zeros."""

    def __init__(self, ranks: int, episodes: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.ranks = ranks
        self.episodes = episodes
        self.load_RN = self.random_loads()
        self.share_N = self.generator.dirichlet(np.ones(episodes)).astype(np.float32)
        self.top = top_ranks_of(self.load_RN.copy())

    def random_loads(self) -> np.ndarray:
        return self.generator.integers(0, 5, (self.ranks, self.episodes)).astype(np.float32) / 2

    def change(self, ranks: list[int]) -> tuple:
        """Draw new loads for these ranks, as kernel arguments.

        Ranks without a change are NaN, and the arrays have spare room.
        """
        changed_RN = np.full_like(self.load_RN, np.nan)
        changed_RN[ranks] = self.random_loads()[ranks]
        changed_R1 = np.zeros(self.ranks + 1, dtype=bool)
        changed_R1[ranks] = True
        rank_K = np.array([*ranks, *range(self.ranks)], dtype=np.int32)
        return rank_K, len(ranks), changed_R1, changed_RN

    def after(self, change: tuple) -> np.ndarray:
        _, _, changed_R1, changed_RN = change
        return np.where(changed_R1[:-1, None], changed_RN, self.load_RN)

    def peak_after(self, change: tuple) -> float:
        _, load_NR, rank_KN, peak_KN = self.top
        return _par_of_changed(load_NR, rank_KN, peak_KN, self.share_N, *change)


@st.composite
def loads(draw: st.DrawFn, least_ranks: int = 1) -> Loads:
    return Loads(draw(st.integers(least_ranks, 8)), draw(st.integers(1, 6)), draw(st.integers(0, 2**32 - 1)))


def some_ranks(load_case: Loads, data: st.DataObject) -> list[int]:
    return data.draw(st.lists(st.integers(0, load_case.ranks - 1), unique=True, max_size=load_case.ranks))


def assert_consistent(top: TopRanks, load_RN: np.ndarray) -> None:
    """Check both orders of the loads, and that each episode's three ranks have the three largest loads."""
    np.testing.assert_array_equal(top.load_RN, load_RN)
    np.testing.assert_array_equal(top.load_NR, load_RN.T)
    rank_KN, peak_KN = heat.hottest(load_RN)
    np.testing.assert_array_equal(top.peak_KN, peak_KN)
    padded_RN = np.vstack([np.maximum(load_RN, 0), np.zeros_like(load_RN[:1])])
    np.testing.assert_array_equal(np.take_along_axis(padded_RN, top.rank_KN, axis=0), peak_KN)
    for rank_K, expected_K in zip(top.rank_KN.T, rank_KN.T, strict=True):
        valid_ranks = [rank for rank in rank_K if rank < len(load_RN)]
        assert len(set(valid_ranks)) == len(valid_ranks) == min(3, len(load_RN))
        assert rank_K[len(valid_ranks) :].tolist() == expected_K[len(valid_ranks) :].tolist()


@SETTINGS
@given(loads(), st.data())
def test_the_three_hottest_ranks_match_a_sort_after_any_changes(
    load_case: Loads, data: st.DataObject
) -> None:
    assert_consistent(load_case.top, load_case.load_RN)
    np.testing.assert_array_equal(load_case.top.rank_KN, heat.hottest(load_case.load_RN)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        change = load_case.change(some_ranks(load_case, data))
        load_case.load_RN = load_case.after(change)
        update_loads(load_case.top, *change)
        assert_consistent(load_case.top, load_case.load_RN)


def test_negative_loads_count_as_zero() -> None:
    top = top_ranks_of(np.array([[-1e-7], [-2e-7]], dtype=np.float32))
    assert top.rank_KN.tolist() == [[0], [1], [2]]
    assert top.peak_KN.tolist() == [[0], [0], [0]]


@SETTINGS
@given(loads(least_ranks=2), st.data())
def test_the_ratio_is_exact_after_two_ranks_change(load_case: Loads, data: st.DataObject) -> None:
    ratio = mean_peak(load_case.top.peak_KN[0], load_case.share_N)
    assert ratio == pytest.approx(heat.ratio(load_case.load_RN, load_case.share_N), rel=1e-6)
    first, second = data.draw(st.permutations(range(load_case.ranks)))[:2]
    changed_RN = load_case.random_loads()
    ratio = peak_of_two_changed(
        load_case.top, load_case.share_N, first, second, changed_RN[first], changed_RN[second]
    )
    load_case.load_RN[[first, second]] = changed_RN[[first, second]]
    assert ratio == pytest.approx(heat.ratio(load_case.load_RN, load_case.share_N), rel=1e-5)


@SETTINGS
@given(loads(), st.data())
def test_the_ratio_is_exact_after_any_ranks_change(load_case: Loads, data: st.DataObject) -> None:
    episode = data.draw(st.integers(0, load_case.episodes - 1))
    hottest = [rank for rank in load_case.top.rank_KN[:, episode].tolist() if rank < load_case.ranks]
    extra_ranks = data.draw(st.sampled_from(([], hottest, range(load_case.ranks))))
    change = load_case.change(sorted({*some_ranks(load_case, data), *extra_ranks}))
    expected = heat.ratio(load_case.after(change), load_case.share_N)
    assert load_case.peak_after(change) == pytest.approx(expected, rel=1e-5)
