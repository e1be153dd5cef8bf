"""The search never raises the cost, charges for every moved slot, and always applies the best legal step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import check_layer
from eplb_core.solver.construction import hottest_rank
from eplb_core.solver.evaluation import smooth_max_of, smooth_peak, smooth_term
from eplb_core.solver.local_search import local_search, slots_away
from eplb_core.solver.model import homes
from eplb_core.solver.swaps import MIN_RELIEF
from tests.solver.assignment_sums import assert_sums_hold
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer, random_placement
from tests.solver.slow import heat
from tests.solver.slow import local_search as slow

SEEDS = st.integers(0, 2**32 - 1)
SETTINGS = settings(max_examples=50)
Z = st.sampled_from((0.0, 1.0))


def cost(phy2log_RS: np.ndarray, layer: PlacedLayer, home_ER: np.ndarray, price: float) -> float:
    risk_R = heat.rank_risks(phy2log_RS, heat.even_shares(phy2log_RS), *layer.heat, layer.z)
    return slow.smooth_peak(risk_R) + price * slow.slots_away(phy2log_RS, home_ER)


@settings(max_examples=80)
@given(
    cases(most_ranks=6, most_slots=4),
    st.sampled_from((0.0, 1.0)),
    SEEDS,
    st.booleans(),
    st.sampled_from((0, 3, 400)),
)
def test_the_search_never_raises_the_cost(
    case: Case, z: float, seed: int, priced: bool, step_limit: int
) -> None:
    layer = PlacedLayer(case, z, seed)
    elsewhere_RS = random_placement(case.ranks, case.slots, case.experts, layer.generator)
    home_ER = homes(layer.phy2log_RS if seed % 2 else elsewhere_RS, case.experts)
    price_K = np.array([0.3, 0.02, 0.0] if priced else [0.0])
    actual_KRS = local_search(layer.assignment(), layer.heat32, home_ER, price_K, z, step_limit)
    for actual_RS, price in zip(actual_KRS, price_K, strict=True):
        check_layer(actual_RS, case.experts)
        assert slots_away(actual_RS, home_ER) == slow.slots_away(actual_RS, home_ER)
        before = cost(layer.phy2log_RS, layer, home_ER, price)
        assert cost(actual_RS, layer, home_ER, price) <= before + 2 * layer.rounding


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_each_step_is_the_best_legal_step(z: float) -> None:
    compared = 0
    for seed in range(30):
        generator = np.random.default_rng(seed)
        ranks, slots, spare = generator.integers((3, 2, 0), (6, 4, 3))
        heat_NE = generator.gamma(1.0, 100, (generator.integers(1, 5), ranks * slots - spare))
        layer = PlacedLayer(Case(int(ranks), int(slots), heat_NE), z, seed)
        home_ER = homes(layer.phy2log_RS, layer.case.experts)
        price_K = np.array(((0.0,), (0.1, 0.01), (0.02,))[seed % 3])
        expected_KRS, margin = slow.search(layer.phy2log_RS, *layer.heat, home_ER, z, price_K, 12)
        actual_KRS = local_search(layer.assignment(), layer.heat32, home_ER, price_K, z, 12)
        # If two steps have nearly the same gain, rounding may decide between them.
        if margin > 3e-5:
            np.testing.assert_array_equal(actual_KRS, expected_KRS)
            compared += (expected_KRS != layer.phy2log_RS).any()
    assert compared >= 8


@settings(max_examples=60)
@given(cases(most_ranks=5, most_slots=3), Z, SEEDS)
def test_the_search_ends_when_no_step_cools_the_hottest_rank(case: Case, z: float, seed: int) -> None:
    layer = PlacedLayer(case, z, seed)
    assignment = layer.assignment()
    nowhere_ER = np.zeros((case.experts, case.ranks), dtype=bool)
    local_search(assignment, layer.heat32, nowhere_ER, np.zeros(1), z, 10_000)
    end_RS = assignment.phy2log_RS
    share_RS = heat.even_shares(assignment.phy2log_RS)
    check_layer(end_RS, case.experts)
    assert_sums_hold(assignment, layer)
    _, span = slow.scale_of(heat.rank_risks(end_RS, share_RS, *layer.heat, z))
    if layer.rounding / span > 1e-2:
        return
    largest_gain = MIN_RELIEF + 1e-3 + 16 * layer.rounding / span
    hot, _ = hottest_rank(assignment, z)
    gains = slow.swap_gains(end_RS, share_RS, hot, *layer.heat, z)
    assert max(gains.values(), default=0.0) <= largest_gain
    gains = slow.exchange_gains(end_RS, hot, *layer.heat, z, relief_over=largest_gain)
    assert max(gains.values(), default=0.0) <= largest_gain


@SETTINGS
@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0, 9)), min_size=1, max_size=9), st.sampled_from((0.0, 1.5))
)
def test_pressures_follow_the_risks(ranks: list[tuple[float, float]], z: float) -> None:
    load_R, variance_R = np.array(ranks, dtype=np.float32).T.copy()
    now = smooth_max_of(load_R, variance_R, z)
    risk_R = load_R.astype(float) + z * np.sqrt(variance_R.astype(float))
    base, span = slow.scale_of(risk_R)
    # The 8-norm of R equal ranks exceeds the base by R**(1/8) times their distance from it.
    assert smooth_peak(now) == pytest.approx(slow.smooth_peak(risk_R), abs=1e-4)
    assert smooth_peak(now) >= risk_R.max() - 1e-5
    if span > 1e-2:
        assert (now.base, 1 / now.scale) == pytest.approx((base, span), rel=1e-3, abs=1e-4)
        expected_R = [slow.pressure_of(np.array([risk]), base, span) for risk in risk_R]
        np.testing.assert_allclose(now.pressure_R, expected_R, atol=4e-3)
        term = smooth_term(np.float32(risk_R[0] + 1), now.base, now.scale)
        assert term == pytest.approx(slow.pressure_of(risk_R[:1] + 1, base, span), rel=4e-3, abs=4e-3)
