"""Annealing leaves a placement that can be served, reports its true ratio, and is never worse than where it began."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver.model import SearchParams
from eplb_service.solver.search import annealing as module
from eplb_service.solver.search.annealing import anneal, draw
from eplb_service.solver.search.annealing_state import AnnealingState, Move, apply_move, start
from eplb_service.solver.search.local_search import local_search
from tests.solver.layers_of import Case, cases, heat_of_kind
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import annealing as slow
from tests.solver.slow import heat
from tests.solver.slow.rng import Draws, splitmix

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**31)


def true_ratio(layer: PlacedLayer, phy2log_RS: np.ndarray) -> float:
    return heat.mean_of_max(*layer.heat, phy2log_RS, heat.even_shares(phy2log_RS))


def annealed(layer: PlacedLayer, tries: int, seed: int) -> tuple[np.ndarray, float]:
    """What annealing finds, once all is checked that must hold of any answer."""
    before_RS = layer.phy2log_RS.copy()
    found_RS, ratio = anneal(layer.phy2log_RS, layer.scaled_EN, layer.share_N, tries, seed)
    check_layer(found_RS, layer.case.experts)
    np.testing.assert_array_equal(layer.phy2log_RS, before_RS, "the placement given is left alone")
    assert not np.shares_memory(found_RS, layer.phy2log_RS)
    assert ratio == pytest.approx(true_ratio(layer, found_RS), rel=2e-5)
    assert ratio <= true_ratio(layer, before_RS) * (1 + 1e-5)
    return found_RS, ratio


def bursty_layer(seed: int, ranks: int = 16, slots: int = 2, experts: int = 24) -> PlacedLayer:
    heat_NE = heat_of_kind("bursty", 8, experts, np.random.default_rng(seed))
    return PlacedLayer(Case(ranks, slots, heat_NE), 1.0, seed)


@SETTINGS
@given(cases(), SEEDS, st.sampled_from((0, 1, 50, 2000)))
def test_never_worse_and_reported_truly(case: Case, seed: int, tries: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    found_RS, ratio = annealed(layer, tries, seed)
    again_RS, again = annealed(layer, tries, seed)
    np.testing.assert_array_equal(found_RS, again_RS)
    assert again == ratio
    if tries == 0 or case.ranks == 1:
        np.testing.assert_array_equal(found_RS, layer.phy2log_RS)


def test_another_seed_takes_another_way() -> None:
    layer = bursty_layer(1)
    ways = {annealed(layer, 500, seed)[0].tobytes() for seed in range(4)}
    assert len(ways) == 4


@pytest.mark.parametrize("tries", [0, 1, 300])
@pytest.mark.parametrize("heat_NE", [np.zeros((3, 6)), np.zeros((1, 4))])
def test_without_tokens_nothing_changes(heat_NE: np.ndarray, tries: int) -> None:
    layer = PlacedLayer(Case(4, 2, heat_NE), 1.0)
    found_RS, ratio = annealed(layer, tries, 5)
    np.testing.assert_array_equal(found_RS, layer.phy2log_RS)
    assert ratio == 1.0


NARROW = {
    "one rank": (1, 5, 5),
    "one slot per rank": (6, 1, 3),
    "no spare replica": (4, 3, 12),
    "one slot per rank and no spare replica": (4, 1, 4),
    "every expert on every rank": (5, 3, 3),
    "two ranks": (2, 2, 3),
}


@pytest.mark.parametrize("shape", NARROW.values(), ids=NARROW.keys())
def test_narrow_layers_are_served_whatever_is_tried(shape: tuple[int, int, int]) -> None:
    for seed in range(5):
        annealed(bursty_layer(seed, *shape), 3_000, seed)


def layers_apart(seeds: int) -> Iterator[tuple[int, PlacedLayer]]:
    """Layers whose ranks are never equally hot."""
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        ranks, slots, spare = generator.integers((3, 2, 1), (6, 4, 5))
        heat_NE = generator.gamma(0.5, 100, (generator.integers(1, 5), ranks * slots - spare))
        yield seed, PlacedLayer(Case(int(ranks), int(slots), heat_NE), 1.0, seed)


def test_each_try_is_judged_by_what_it_would_make() -> None:
    compared = changed = 0
    for seed, layer in layers_apart(200):
        wanted_RS, margin = slow.anneal(layer.phy2log_RS, *layer.heat, 40, seed)
        if margin > 1e-5:
            found_RS, _ = annealed(layer, 40, seed)
            np.testing.assert_array_equal(found_RS, wanted_RS)
            compared += 1
            changed += not np.array_equal(wanted_RS, layer.phy2log_RS)
    assert compared > 60
    assert changed > 60


def tries_of(layer: PlacedLayer, seed: int, count: int) -> Iterator[tuple[int, Move, np.ndarray]]:
    """Tries drawn where the layer is: episode looked at, change, and the ranks' loads in that episode."""
    top = start(layer.phy2log_RS, layer.scaled_EN).top_ranks
    state_1 = np.array([seed], dtype=np.uint64)
    for k in range(count):
        episode = k % layer.scaled_EN.shape[1]
        attempt = module._drawn(layer.phy2log_RS, top.load_NR, top.rank_KN, episode, state_1)
        yield episode, attempt, top.load_NR[episode]


def test_most_tries_relieve_the_hottest_rank_and_burden_the_cooler_of_two() -> None:
    layer = bursty_layer(3, 4, 3, 9)
    guided, swaps, others, chosen = [], [], [], []
    for episode, attempt, load_R in tries_of(layer, 11, 8_000):
        assert attempt.mine == layer.phy2log_RS[attempt.rank, attempt.slot]
        assert attempt.theirs == layer.phy2log_RS[attempt.other, attempt.place]
        assert attempt.episode in (episode, -1)
        guided.append(attempt.episode >= 0)
        swaps.append(attempt.swaps)
        others.append(np.argsort(np.argsort(load_R))[attempt.other])
        if guided[-1]:
            assert load_R[attempt.rank] == load_R.max()
        else:
            chosen.append((attempt.rank, attempt.slot))
    assert np.mean(guided) == pytest.approx(0.95, abs=0.01)
    assert np.mean(swaps) == pytest.approx(0.68, abs=0.02)
    # Of two of four ranks the cooler is the coolest in 7 of 16 cases, the hottest in 1.
    np.testing.assert_allclose(np.bincount(others) / len(others), np.array([7, 5, 3, 1]) / 16, atol=0.03)
    assert len(set(chosen)) == layer.phy2log_RS.size


def test_losses_are_borne_as_often_as_their_temperature_says() -> None:
    state_1 = np.array([3], dtype=np.uint64)
    borne = np.array([module.bearable(1e-3, state_1) for _ in range(20_000)])
    assert borne.min() >= 0
    assert borne.max() <= 12 * 1e-3 * (1 + 1e-6)
    for loss in (2e-4, 1e-3, 3e-3):
        assert (borne > loss).mean() == pytest.approx(np.exp(-loss / 1e-3), abs=0.015)


def searched(layer: PlacedLayer) -> None:
    """Let swaps and exchanges that each must win take the layer as far as they can."""
    nowhere_ER = np.zeros((layer.case.experts, layer.case.ranks), dtype=bool)
    params = SearchParams(z=1.0, local_search_patience=layer.case.ranks, local_search_steps=10_000)
    found_KRS, _ = local_search(layer.assignment(), layer.demand, nowhere_ER, params, np.zeros(1))
    layer.phy2log_RS = found_KRS[0].copy()


def test_it_finds_what_search_alone_does_not() -> None:
    generator = np.random.default_rng(2)
    layer = PlacedLayer(Case(16, 2, generator.gamma(0.5, 100, (8, 16))), 1.0)
    searched(layer)
    _, few = annealed(layer, 100, 1)
    _, many = annealed(layer, 20_000, 1)
    assert many <= few
    assert many < true_ratio(layer, layer.phy2log_RS) - 0.02


def test_a_longer_search_ends_lower_on_average() -> None:
    layer = bursty_layer(5)
    means = [
        np.mean([annealed(layer, tries, seed)[1] for seed in range(8)]) for tries in (300, 3_000, 30_000)
    ]
    assert means[0] > means[1] + 0.005
    assert means[1] > means[2] + 0.001


def test_a_long_search_reports_its_ratio_as_truly() -> None:
    annealed(bursty_layer(6, 8, 3, 16), 1_000_000, 2)


def test_what_piles_up_is_summed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step loses a hundredth of all loads here; every second one has them summed afresh."""

    def lossy_step(state: AnnealingState, attempt: Move, count: int) -> None:
        apply_move(state, attempt, count)
        for load in (state.top_ranks.load_RN, state.top_ranks.load_NR, state.top_ranks.peak_KN):
            load *= np.float32(0.99)

    monkeypatch.setattr(module, "apply_move", lossy_step)
    monkeypatch.setattr(module, "_REFRESH", 2)
    layer = bursty_layer(6, 8, 3, 16)
    plain = getattr(anneal, "py_func", anneal)
    found_RS, ratio = plain(layer.phy2log_RS, layer.scaled_EN, layer.share_N, 300, 2)
    assert ratio == pytest.approx(true_ratio(layer, found_RS), rel=1e-5)
    assert ratio < true_ratio(layer, layer.phy2log_RS) - 0.1


BOUNDS = st.one_of(st.integers(1, 100), st.integers(1, 2**32 - 1))


@SETTINGS
@given(st.integers(0, 2**64 - 1), st.lists(BOUNDS, min_size=1, max_size=5))
def test_draws_is_the_published_generator(seed: int, bounds: list[int]) -> None:
    state_1, draws = np.array([seed], dtype=np.uint64), Draws(seed)
    for below in bounds:
        found = draw(state_1, below)
        assert 0 <= found < below
        assert found == draws.draw(below)
        assert int(state_1[0]) == draws.state


def test_draws_gives_the_known_first_number() -> None:
    assert splitmix(0)[1] == 0xE220A8397B1DCDAF
    assert draw(np.zeros(1, dtype=np.uint64), 2**32 - 1) == 0xE220A839 - 1
    assert draw(np.zeros(1, dtype=np.uint64), 100) == 0xE2 * 100 // 256


def test_every_number_comes_about_as_often() -> None:
    state_1 = np.array([7], dtype=np.uint64)
    often = np.bincount([draw(state_1, 7) for _ in range(14_000)], minlength=7)
    assert len(often) == 7
    np.testing.assert_allclose(often, 2_000, rtol=0.1)
