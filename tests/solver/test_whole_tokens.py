"""Loads in whole tokens have the same distribution as in the slow twin, and are reproducible."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.solver.whole_tokens import HostSplit, serve_steps, thinned
from tests.solver.slow import whole

RANKS = 4
SLOTS = 4
EXPERTS = 10
CURVE = np.array([3.0, 4.0, 1.0, 0.5])
# Expert 0 has four replicas. Experts 1, 2 and 3 have two each, and one replica of expert 3 is unused.
EXPERT_P = np.array([0, 1, 2, 4, 0, 1, 3, 5, 0, 2, 6, 7, 0, 3, 8, 9])
SHARE_P = np.array([0.1, 0.7, 0.5, 1, 0.2, 0.3, 1, 1, 0.3, 0.5, 1, 1, 0.4, 0, 1, 1])
PHY2LOG = EXPERT_P.reshape(1, RANKS, SLOTS).astype(np.int32)


def without_tables(share_P: np.ndarray = SHARE_P, spread: float = 1.0) -> HostSplit:
    no_tables = np.zeros((1, 0, EXPERTS, 1), dtype=np.int32)
    return HostSplit(share_P[None], no_tables, np.zeros((1, 0, EXPERTS)), np.full((1, EXPERTS), spread))


def dealing() -> HostSplit:
    """Return the split for four sources with unequal shares, and dealing tables of three entries."""
    table_RED = np.zeros((4, EXPERTS, 3), dtype=np.int32)
    generator = np.random.default_rng(3)
    for expert in range(EXPERTS):
        table_RED[:, expert] = generator.choice(np.flatnonzero(expert == EXPERT_P), (4, 3))
    source_RE = generator.dirichlet(np.ones(4), EXPERTS).T
    return HostSplit(SHARE_P[None], table_RED[None], source_RE[None], np.ones((1, EXPERTS)))


def served(heat_TE: np.ndarray, split: HostSplit, first_step: int = 0, curve: np.ndarray = CURVE):
    heat_TLE = np.ascontiguousarray(heat_TE[:, None])
    return serve_steps(heat_TLE, np.zeros(1, dtype=np.int64), PHY2LOG, split, curve, first_step, True)


@pytest.mark.parametrize("tokens", [1, 3, 8, 30, 200])
@pytest.mark.parametrize("deals", [False, True])
def test_peaks_and_loads_have_the_distribution_of_the_slow_twin(tokens: int, deals: bool) -> None:
    if deals and tokens > 30:
        pytest.skip("many tokens are dealt by a normal approximation, which is tested separately")
    steps = 1500
    generator = np.random.default_rng(tokens)
    odds_E = np.array([0.4, 0.15, 0.1, 0.05, *[0.05] * 6])
    heat_TE = generator.multinomial(tokens, odds_E, steps)
    split = dealing() if deals else without_tables()
    result = served(heat_TE, split)
    tables = (split.table_KRED[0], split.source_KRE[0]) if deals else ()
    slow_TP = np.array([whole.draw(heat_E, EXPERT_P, SHARE_P, generator, *tables) for heat_E in heat_TE])
    slow_TR = slow_TP.reshape(steps, RANKS, SLOTS).sum(axis=2)
    assert (result.loads_TKR[:, 0] == np.round(result.loads_TKR[:, 0])).all()
    assert (result.loads_TKR[:, 0].sum(axis=1) == tokens).all()
    error = 4 * slow_TR.std(axis=0) / np.sqrt(steps / 2)
    assert (np.abs(result.loads_TKR[:, 0].mean(axis=0) - slow_TR.mean(axis=0)) < error).all()
    np.testing.assert_allclose(result.loads_TKR[:, 0].std(axis=0), slow_TR.std(axis=0), rtol=0.12)
    assert result.peak_TK.mean() == pytest.approx(slow_TR.max(axis=1).mean(), rel=0.02)
    slow_us = np.mean([whole.slowest_us(tokens_P, RANKS, CURVE) for tokens_P in slow_TP])
    assert result.us_TK.mean() == pytest.approx(slow_us, rel=0.02)


def test_the_loads_determine_the_peaks_the_tokens_and_the_jumps() -> None:
    heat_TE = np.random.default_rng(0).poisson(3.0, (50, EXPERTS))
    heat_TE[7] = 0
    result = served(heat_TE, without_tables())
    loads_TR = result.loads_TKR[:, 0]
    np.testing.assert_array_equal(result.peak_TK[:, 0], loads_TR.max(axis=1))
    np.testing.assert_array_equal(result.tokens_TK[:, 0], heat_TE.sum(axis=1))
    assert np.isnan(result.us_TK[7, 0])
    busy_TR = loads_TR[loads_TR.sum(axis=1) > 0]
    fraction_TR = busy_TR / busy_TR.sum(axis=1, keepdims=True)
    assert result.variance_K[0] == pytest.approx((np.diff(fraction_TR, axis=0) ** 2).mean(axis=0).sum() / 2)


def test_draws_of_a_step_do_not_depend_on_the_steps_around_it() -> None:
    heat_TE = np.random.default_rng(1).poisson(9.0, (40, EXPERTS)).astype(np.int32)
    together = served(heat_TE, without_tables(), 100).loads_TKR
    for begin, end in ((0, 1), (1, 17), (17, 40)):
        separate = served(heat_TE[begin:end], without_tables(), 100 + begin).loads_TKR
        np.testing.assert_array_equal(separate, together[begin:end])
    assert not np.array_equal(served(heat_TE, without_tables(), 101).loads_TKR, together)
    np.testing.assert_array_equal(served(heat_TE.astype(float), without_tables(), 100).loads_TKR, together)


def test_equal_steps_are_drawn_differently() -> None:
    heat_TE = np.tile(np.array([4, 1, 1, 0, 0, 1, 0, 0, 0, 0]), (400, 1))
    loads_TR = served(heat_TE, without_tables()).loads_TKR[:, 0]
    assert loads_TR[:, 0].mean() == pytest.approx(4 * 0.1 + 0.7 + 0.5, abs=0.15)
    assert len(np.unique(loads_TR, axis=0)) > 20


def test_fractions_of_a_token_are_split_as_expected() -> None:
    heat_TE = np.full((5, EXPERTS), 0.5)
    expected_R = (0.5 * SHARE_P).reshape(RANKS, SLOTS).sum(axis=1)
    np.testing.assert_allclose(served(heat_TE, without_tables()).loads_TKR[:, 0], np.tile(expected_R, (5, 1)))


def test_the_spread_scales_the_variance_of_many_tokens() -> None:
    heat_TE = np.tile(np.array([4000, *[0] * 9]), (3000, 1))
    for spread in (1.0, 0.25, 0.0):
        load_T = served(heat_TE, without_tables(spread=spread)).loads_TKR[:, 0, 0]
        assert load_T.mean() == pytest.approx(400, rel=0.01)
        assert load_T.var() == pytest.approx(spread * 4000 * 0.1 * 0.9, rel=0.1, abs=0.3)


def test_thinning_keeps_each_token_with_probability_one_half() -> None:
    heat_TLE = np.random.default_rng(2).poisson(20.0, (200, 2, EXPERTS)).astype(np.int32)
    kept_TLE = thinned(heat_TLE, 0)
    assert ((kept_TLE >= 0) & (kept_TLE <= heat_TLE)).all()
    assert kept_TLE.sum() == pytest.approx(heat_TLE.sum() / 2, rel=0.02)
    assert np.var(kept_TLE - heat_TLE / 2) == pytest.approx(heat_TLE.mean() / 4, rel=0.1)
    assert (thinned(heat_TLE, 0) == kept_TLE).all()
    assert (thinned(heat_TLE, 1) != kept_TLE).any()
