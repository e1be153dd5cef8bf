"""Annealing never returns a worse placement, evaluates changes exactly, and matches SplitMix64's published output."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import check_layer
from eplb_core.solver.annealing import anneal, draw
from eplb_core.solver.local_search import local_search
from tests.solver.layers_of import Case, cases, heat_of_kind
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import annealing as slow
from tests.solver.slow import heat

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**31)


def true_ratio(layer: PlacedLayer, phy2log_RS: np.ndarray) -> float:
    return heat.mean_of_max(*layer.heat, phy2log_RS, heat.even_shares(phy2log_RS))


def annealed(layer: PlacedLayer, tries: int, seed: int) -> tuple[np.ndarray, float]:
    """Anneal the layer, check the result, and return the placement and its ratio."""
    before_RS = layer.phy2log_RS.copy()
    actual_RS = anneal(layer.phy2log_RS, layer.scaled_EN, layer.share_N, tries, seed)
    check_layer(actual_RS, layer.case.experts)
    np.testing.assert_array_equal(layer.phy2log_RS, before_RS, "annealing modified its input placement")
    assert not np.shares_memory(actual_RS, layer.phy2log_RS)
    ratio = true_ratio(layer, actual_RS)
    assert ratio <= true_ratio(layer, before_RS) * (1 + 1e-5)
    return actual_RS, ratio


def bursty_layer(seed: int, ranks: int = 16, slots: int = 2, experts: int = 24) -> PlacedLayer:
    heat_NE = heat_of_kind("bursty", 8, experts, np.random.default_rng(seed))
    return PlacedLayer(Case(ranks, slots, heat_NE), 1.0, seed)


@SETTINGS
@given(cases(), SEEDS, st.sampled_from((0, 1, 50, 2000)))
def test_annealing_never_worsens_the_ratio_and_is_deterministic(case: Case, seed: int, tries: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    actual_RS, _ = annealed(layer, tries, seed)
    np.testing.assert_array_equal(actual_RS, annealed(layer, tries, seed)[0])
    if tries == 0 or case.ranks == 1 or not case.heat_NE.any():
        np.testing.assert_array_equal(actual_RS, layer.phy2log_RS)


def test_different_seeds_give_different_placements() -> None:
    layer = bursty_layer(1)
    placements = {annealed(layer, 500, seed)[0].tobytes() for seed in range(4)}
    assert len(placements) == 4


def layers_apart(seeds: int) -> Iterator[tuple[int, PlacedLayer]]:
    """Draw layers with distinct rank loads."""
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        ranks, slots, spare = generator.integers((3, 2, 1), (6, 4, 5))
        heat_NE = generator.gamma(0.5, 100, (generator.integers(1, 5), ranks * slots - spare))
        yield seed, PlacedLayer(Case(int(ranks), int(slots), heat_NE), 1.0, seed)


def test_annealing_matches_the_slow_twin() -> None:
    compared = changed = 0
    for seed, layer in layers_apart(200):
        expected_RS, margin = slow.anneal(layer.phy2log_RS, *layer.heat, 40, seed)
        if margin > 1e-5:
            actual_RS, _ = annealed(layer, 40, seed)
            np.testing.assert_array_equal(actual_RS, expected_RS)
            compared += 1
            changed += not np.array_equal(expected_RS, layer.phy2log_RS)
    assert compared > 60
    assert changed > 60


def searched(layer: PlacedLayer) -> None:
    """Improve the layer by swaps and exchanges until no step brings a gain."""
    nowhere_ER = np.zeros((layer.case.experts, layer.case.ranks), dtype=bool)
    actual_KRS = local_search(layer.assignment(), layer.heat32, nowhere_ER, np.zeros(1), 1.0, 10_000)
    layer.phy2log_RS = actual_KRS[0].copy()


def test_annealing_improves_on_the_local_search() -> None:
    generator = np.random.default_rng(2)
    layer = PlacedLayer(Case(16, 2, generator.gamma(0.5, 100, (8, 16))), 1.0)
    searched(layer)
    _, few = annealed(layer, 100, 1)
    _, many = annealed(layer, 20_000, 1)
    assert many <= few
    assert many < true_ratio(layer, layer.phy2log_RS) - 0.02


def test_a_long_search_accumulates_no_rounding_errors() -> None:
    layer = bursty_layer(6, 8, 3, 16)
    _, ratio = annealed(layer, 1_000_000, 2)
    assert ratio < true_ratio(layer, layer.phy2log_RS) - 0.1


BOUNDS = st.one_of(st.integers(1, 100), st.integers(1, 2**32 - 1))


@SETTINGS
@given(st.integers(0, 2**64 - 1), st.lists(BOUNDS, min_size=1, max_size=5))
def test_draws_follow_the_published_generator(seed: int, bounds: list[int]) -> None:
    state_1 = np.array([seed], dtype=np.uint64)
    draws = slow.Draws(seed)
    for below in bounds:
        number = draw(state_1, below)
        assert 0 <= number < below
        assert number == draws.draw(below)
        assert int(state_1[0]) == draws.state


def test_the_first_draw_is_the_published_number() -> None:
    assert slow.splitmix(0)[1] == 0xE220A8397B1DCDAF
    assert draw(np.zeros(1, dtype=np.uint64), 2**32 - 1) == 0xE220A839 - 1
    assert draw(np.zeros(1, dtype=np.uint64), 100) == 0xE2 * 100 // 256
