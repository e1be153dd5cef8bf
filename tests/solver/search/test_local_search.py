"""A search never ends worse than it began, pays for every slot, and stops only where no legal step helps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver.model import SearchParams
from eplb_service.solver.search.local_search import SMALLEST_RELIEF, local_search, slots_away
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer, random_placement
from tests.solver.search.test_construction import assert_sums_hold
from tests.solver.slow import heat, steps
from tests.solver.slow import local_search as slow_search

SEEDS = st.integers(0, 2**32 - 1)


def of_effort(z: float, patience: int, most_steps: int) -> SearchParams:
    return SearchParams(z=z, local_search_patience=patience, local_search_steps=most_steps)


def homes(phy2log_RS: np.ndarray, experts: int) -> np.ndarray:
    home_ER = np.zeros((experts, len(phy2log_RS)), dtype=bool)
    for r, row in enumerate(phy2log_RS):
        home_ER[row, r] = True
    return home_ER


def cost(phy2log_RS: np.ndarray, layer: PlacedLayer, home_ER: np.ndarray, price: float) -> float:
    risk_R = heat.rank_risks(phy2log_RS, heat.even_shares(phy2log_RS), *layer.heat, layer.z)
    return steps.smooth_peak(risk_R) + price * steps.slots_away(phy2log_RS, home_ER)


@settings(max_examples=80)
@given(
    cases(most_ranks=6, most_slots=4),
    st.sampled_from((0.0, 1.0)),
    SEEDS,
    st.booleans(),
    st.sampled_from((0, 3, 400)),
)
def test_no_search_ends_dearer_than_it_began(
    case: Case, z: float, seed: int, priced: bool, most: int
) -> None:
    layer = PlacedLayer(case, z, seed)
    elsewhere_RS = random_placement(case.ranks, case.slots, case.experts, layer.generator)
    home_ER = homes(layer.phy2log_RS if seed % 2 else elsewhere_RS, case.experts)
    price_K = np.array([0.3, 0.02, 0.0] if priced else [0.0])
    found_KRS, risk_K = local_search(
        layer.assignment(), layer.demand, home_ER, of_effort(z, 2, most), price_K
    )
    for found_RS, risk, price in zip(found_KRS, risk_K, price_K, strict=True):
        check_layer(found_RS, case.experts)
        assert slots_away(found_RS, home_ER) == steps.slots_away(found_RS, home_ER)
        before = cost(layer.phy2log_RS, layer, home_ER, price)
        assert cost(found_RS, layer, home_ER, price) <= before + 2 * layer.rounding
        risk_R = heat.rank_risks(found_RS, heat.even_shares(found_RS), *layer.heat, z)
        assert risk == pytest.approx(risk_R.max(), abs=layer.rounding)


def test_each_step_is_the_best_there_is() -> None:
    compared = 0
    for seed in range(30):
        generator = np.random.default_rng(seed)
        ranks, slots, spare = generator.integers((3, 2, 0), (6, 4, 3))
        heat_NE = generator.gamma(1.0, 100, (generator.integers(1, 5), ranks * slots - spare))
        layer = PlacedLayer(Case(int(ranks), int(slots), heat_NE), 0.0, seed)
        home_ER = homes(layer.phy2log_RS, layer.case.experts)
        price_K = np.array(((0.0,), (0.1, 0.01), (0.02,))[seed % 3])
        patience = 1 + seed % 2
        wanted_KRS, margin = slow_search.search(
            layer.phy2log_RS, *layer.heat, home_ER, 0.0, price_K, patience, 12
        )
        found_KRS, _ = local_search(
            layer.assignment(), layer.demand, home_ER, of_effort(0.0, patience, 12), price_K
        )
        # Where two steps are worth the same, rounding chooses.
        if margin > 3e-5:
            np.testing.assert_array_equal(found_KRS, wanted_KRS)
            compared += (wanted_KRS != layer.phy2log_RS).any()
    assert compared >= 8


def test_a_found_way_out_frees_the_ranks_that_were_stuck() -> None:
    generator = np.random.default_rng(2)
    for _ in range(6):
        layer = PlacedLayer(Case(10, 3, generator.gamma(0.6, 100, (1, 27))), 0.0, 3)
        assignment = layer.assignment()
        nowhere_ER = np.zeros((27, 10), dtype=bool)
        local_search(assignment, layer.demand, nowhere_ER, of_effort(0.0, 10, 10_000), np.zeros(1))
        end_RS = assignment.phy2log_RS
        share_RS = heat.even_shares(end_RS)
        for rank in range(10):
            gains = steps.swap_gains(end_RS, share_RS, rank, *layer.heat, 0.0)
            assert max(gains.values(), default=0.0) <= SMALLEST_RELIEF + 2e-4


@settings(max_examples=60)
@given(cases(most_ranks=5, most_slots=3), SEEDS)
def test_a_patient_search_ends_where_no_step_helps(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 0.0, seed)
    assignment = layer.assignment()
    nowhere_ER = np.zeros((case.experts, case.ranks), dtype=bool)
    local_search(assignment, layer.demand, nowhere_ER, of_effort(0.0, case.ranks, 10_000), np.zeros(1))
    end_RS, share_RS = assignment.phy2log_RS, heat.even_shares(assignment.phy2log_RS)
    check_layer(end_RS, case.experts)
    assert_sums_hold(assignment, layer)
    _, span = steps.scale_of(heat.rank_risks(end_RS, share_RS, *layer.heat, 0.0))
    if layer.rounding / span > 1e-2:
        return
    most = SMALLEST_RELIEF + 1e-3 + 16 * layer.rounding / span
    for rank in range(case.ranks):
        gains = steps.swap_gains(end_RS, share_RS, rank, *layer.heat, 0.0)
        assert max(gains.values(), default=0.0) <= most
        gains = steps.exchange_gains(end_RS, rank, *layer.heat, 0.0, relief_over=most)
        assert max(gains.values(), default=0.0) <= most


@settings(max_examples=30)
@given(cases(most_ranks=6, most_slots=4), SEEDS)
def test_a_price_that_nothing_pays_moves_nothing(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    home_ER = homes(layer.phy2log_RS, case.experts)
    found_KRS, _ = local_search(
        layer.assignment(), layer.demand, home_ER, of_effort(1.0, 2, 200), np.array([1e6, 0.0])
    )
    np.testing.assert_array_equal(found_KRS[0], layer.phy2log_RS)


def test_one_search_serves_all_prices_as_single_searches_would() -> None:
    generator = np.random.default_rng(1)
    layer = PlacedLayer(Case(6, 4, generator.gamma(0.5, 100, (4, 18))), 1.0)
    home_ER = homes(layer.phy2log_RS, 18)
    price_K = np.array([0.2, 0.05, 0.01])
    together_KRS, _ = local_search(layer.assignment(), layer.demand, home_ER, of_effort(1.0, 2, 500), price_K)
    away_K = [slots_away(found_RS, home_ER) for found_RS in together_KRS]
    assert away_K == sorted(away_K)
    assert away_K[-1] > 0
    for price, found_RS in zip(price_K, together_KRS, strict=True):
        alone_KRS, _ = local_search(
            layer.assignment(), layer.demand, home_ER, of_effort(1.0, 2, 500), np.array([price])
        )
        together, alone = (cost(placed_RS, layer, home_ER, price) for placed_RS in (found_RS, alone_KRS[0]))
        assert together <= alone + 1e-3
