"""The three hottest ranks of every episode stay known through any change, and give the ratio that one would make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.search.top_ranks import (
    TopRanks,
    mean_peak,
    peak_of_changed,
    peak_of_two,
    top_ranks_of,
    update_loads,
)
from tests.solver.slow import top_ranks as slow

SETTINGS = settings(max_examples=100)


class Loads:
    """Loads of a few ranks in a few episodes, many of them equal or none at all."""

    def __init__(self, ranks: int, episodes: int, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.ranks, self.episodes = ranks, episodes
        self.load_RN = self.some()
        self.share_N = self.generator.dirichlet(np.ones(episodes)).astype(np.float32)
        self.top = top_ranks_of(self.load_RN.copy())

    def some(self) -> np.ndarray:
        return self.generator.integers(0, 5, (self.ranks, self.episodes)).astype(np.float32) / 2

    def change(self, ranks: list[int]) -> tuple:
        """Other loads for these ranks as kernels take them, NaN for the rest; room for more ranks than come."""
        changed_RN = np.full_like(self.load_RN, np.nan)
        changed_RN[ranks] = self.some()[ranks]
        changed_R1 = np.zeros(self.ranks + 1, dtype=bool)
        changed_R1[ranks] = True
        rank_K = np.array([*ranks, *range(self.ranks)], dtype=np.int32)
        return rank_K, len(ranks), changed_R1, changed_RN

    def peak_after_trade(self, one: int, other: int, *traded: object) -> float:
        load_RN, _, rank_KN, peak_KN = self.top
        return peak_of_two(load_RN, rank_KN, peak_KN, self.share_N, one, other, *traded)

    def after(self, change: tuple) -> np.ndarray:
        _, _, changed_R1, changed_RN = change
        return np.where(changed_R1[:-1, None], changed_RN, self.load_RN)

    def peak_after(self, change: tuple) -> float:
        _, load_NR, rank_KN, peak_KN = self.top
        return peak_of_changed(load_NR, rank_KN, peak_KN, self.share_N, *change)


@st.composite
def loads(draw: st.DrawFn, least_ranks: int = 1) -> Loads:
    return Loads(draw(st.integers(least_ranks, 8)), draw(st.integers(1, 6)), draw(st.integers(0, 2**32 - 1)))


def some_ranks(given_: Loads, data: st.DataObject) -> list[int]:
    return data.draw(st.lists(st.integers(0, given_.ranks - 1), unique=True, max_size=given_.ranks))


def assert_known(top: TopRanks, load_RN: np.ndarray) -> None:
    """Loads both ways round, and of each episode three ranks that carry the three largest."""
    np.testing.assert_array_equal(top.load_RN, load_RN)
    np.testing.assert_array_equal(top.load_NR, load_RN.T)
    rank_KN, peak_KN = slow.hottest(load_RN)
    np.testing.assert_array_equal(top.peak_KN, peak_KN)
    padded_RN = np.vstack([np.maximum(load_RN, 0), np.zeros_like(load_RN[:1])])
    np.testing.assert_array_equal(np.take_along_axis(padded_RN, top.rank_KN, axis=0), peak_KN)
    for found_K, wanted_K in zip(top.rank_KN.T, rank_KN.T, strict=True):
        known = [rank for rank in found_K if rank < len(load_RN)]
        assert len(set(known)) == len(known) == min(3, len(load_RN))
        assert found_K[len(known) :].tolist() == wanted_K[len(known) :].tolist()


@SETTINGS
@given(loads())
def test_the_three_hottest_are_those_of_a_sort(given_: Loads) -> None:
    assert_known(given_.top, given_.load_RN)
    np.testing.assert_array_equal(given_.top.rank_KN, slow.hottest(given_.load_RN)[0])


@SETTINGS
@given(loads(), st.data())
def test_they_stay_known_through_any_changes(given_: Loads, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        change = given_.change(some_ranks(given_, data))
        given_.load_RN = given_.after(change)
        update_loads(given_.top, *change)
        assert_known(given_.top, given_.load_RN)


def test_no_load_is_taken_for_less_than_nothing() -> None:
    top = top_ranks_of(np.array([[-1e-7], [-2e-7]], dtype=np.float32))
    assert top.rank_KN.tolist() == [[0], [1], [2]]
    assert top.peak_KN.tolist() == [[0], [0], [0]]


@SETTINGS
@given(loads())
def test_the_ratio_is_the_mean_of_the_peaks(given_: Loads) -> None:
    found = mean_peak(given_.top.peak_KN, given_.share_N)
    assert found == pytest.approx(slow.ratio(given_.load_RN, given_.share_N), rel=1e-6)


@SETTINGS
@given(loads(least_ranks=2), st.data())
def test_the_ratio_after_two_ranks_trade(given_: Loads, data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(range(given_.ranks)))[:2]
    out_share, come_share = (np.float32(1 / data.draw(st.integers(1, 4))) for _ in range(2))
    out_N, come_N = given_.generator.gamma(1, 1, (2, given_.episodes)).astype(np.float32)
    found = given_.peak_after_trade(one, other, out_share, out_N, come_share, come_N)
    shift_N = (come_share * come_N - out_share * out_N).astype(float)
    wanted = slow.ratio(slow.shifted(given_.load_RN.astype(float), one, other, shift_N), given_.share_N)
    assert found == pytest.approx(wanted, rel=1e-5)


@SETTINGS
@given(loads(), st.data())
def test_the_ratio_after_some_ranks_change(given_: Loads, data: st.DataObject) -> None:
    change = given_.change(some_ranks(given_, data))
    wanted = slow.ratio(given_.after(change), given_.share_N)
    assert given_.peak_after(change) == pytest.approx(wanted, rel=1e-5)


@SETTINGS
@given(loads(least_ranks=4), st.data())
def test_the_ratio_after_an_episodes_three_hottest_change(given_: Loads, data: st.DataObject) -> None:
    episode = data.draw(st.integers(0, given_.episodes - 1))
    rank, *more = given_.top.rank_KN[:, episode].tolist()
    change = given_.change(list({rank, *more, *some_ranks(given_, data)}))
    wanted = slow.ratio(given_.after(change), given_.share_N)
    assert given_.peak_after(change) == pytest.approx(wanted, rel=1e-5)


@SETTINGS
@given(loads())
def test_the_ratio_after_all_ranks_change(given_: Loads) -> None:
    change = given_.change(list(range(given_.ranks)))
    wanted = slow.ratio(given_.after(change), given_.share_N)
    assert given_.peak_after(change) == pytest.approx(wanted, rel=1e-5)
