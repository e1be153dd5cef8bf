"""Tests that the routing-table benchmark sends every token to the slot given by its source rank's table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.split.__main__ import of_decisions, of_drawn, of_exactness
from benchmarks.split.measures import (
    EVEN_SHARES,
    FOR_EVEN,
    FOR_STEPS,
    STEPWISE,
    TABLES,
    Exactness,
    by_source,
    decision_cpu,
    drawn_sources,
    loads_by_table,
    routed_sources,
)
from eplb_core.placement import Placement, with_entries
from eplb_lab.bench.closed_loop import Scenario
from tests.placement.drawn import dealt_one_by_one


@pytest.mark.parametrize("width", [1, 3])
def test_loads_equal_those_of_dealing_token_by_token(width: int) -> None:
    generator = np.random.default_rng(width)
    placement = Placement.linear(1, 4, 3, 2)
    table_RED = with_entries(placement.default_log2phy(width), 3)[:, 0]
    source_TRE = generator.poisson(3, (5, 3, 4))
    expected_TR = dealt_one_by_one(source_TRE[:, :, None], table_RED[:, None] // 2, 3)[:, 0]
    found_TR = loads_by_table(placement.phy2log_LRS[0], table_RED, source_TRE)
    np.testing.assert_array_equal(found_TR, expected_TR)


def test_every_table_is_scored_on_the_following_windows() -> None:
    generator = np.random.default_rng(0)
    heat_TLE = generator.multinomial(64, generator.dirichlet(np.full(6, 0.5)), (12, 1))
    scenario = Scenario("small", heat_TLE, 4, 2, 4)
    sources_TRLE = drawn_sources(scenario)
    np.testing.assert_array_equal(sources_TRLE.sum(axis=1), heat_TLE)
    ratios_by_table = by_source(sources_TRLE, slots=2, window=4, windows=2, width=2)
    assert list(ratios_by_table) == list(TABLES)
    assert all(len(ratios) == 2 and min(ratios) >= 1.0 for ratios in ratios_by_table.values())


def test_every_recorded_choice_belongs_to_the_rank_of_its_request(tmp_path: Path) -> None:
    # Requests of 2, 3, 1 and 2 tokens, two at a time. The third request starts when the first one ends, and so on.
    bounds = np.array([0, 2, 5, 6, 8])
    ranks = 2
    experts = 4
    routes_KLC = np.random.default_rng(0).permuted(np.tile(np.arange(experts), (8, 3, 1)), axis=2)[..., :2]
    np.savez(tmp_path / "routes.npz", routes=routes_KLC, req_ptr=bounds)
    expected_TRLE = np.zeros((3, ranks, 3, experts), dtype=np.int64)
    for step, tokens in enumerate([[0, 2], [1, 3], [5, 4]]):
        for rank, token in enumerate(tokens):
            for layer in range(3):
                expected_TRLE[step, rank, layer, routes_KLC[token, layer]] += 1
    found_TRLE = routed_sources(tmp_path / "routes.npz", ranks, batch=2)
    np.testing.assert_array_equal(found_TRLE, expected_TRLE)
    order = np.random.default_rng(5).permutation(4)
    tokens = [np.arange(bounds[request], bounds[request + 1]) for request in order]
    shuffled = {"routes": routes_KLC[np.concatenate(tokens)], "req_ptr": np.cumsum([0, *map(len, tokens)])}
    np.savez(tmp_path / "shuffled.npz", **shuffled)
    expected_TRLE = routed_sources(tmp_path / "shuffled.npz", ranks, batch=2)
    found_TRLE = routed_sources(tmp_path / "routes.npz", ranks, batch=2, order_seed=5)
    np.testing.assert_array_equal(found_TRLE, expected_TRLE)


@pytest.mark.parametrize(("even", "stepwise", "met"), [(1.11, 1.04, True), (1.12, 1.05, False)])
def test_ratios_of_drawn_steps_meet_or_miss_their_targets(even: float, stepwise: float, met: bool) -> None:
    rows = [{"placement": name, EVEN_SHARES: even, STEPWISE: stepwise} for name in (FOR_EVEN, FOR_STEPS)]
    assert [target.met for target in of_drawn("steps", rows)] == [met, met]


def test_the_cpu_time_of_decisions_is_compared_over_all_windows() -> None:
    heat_TLE = np.random.default_rng(0).multinomial(64, np.full(6, 1 / 6), (12, 1))
    milliseconds_by_split = decision_cpu(Scenario("small", heat_TLE, 4, 2, 4), window=4, windows=2)
    assert all(
        len(milliseconds) == 2 and min(milliseconds) > 0 for milliseconds in milliseconds_by_split.values()
    )
    within = of_decisions("heat", {"tables": [1.0, 3.0], "step": [4.0, 6.0]})
    assert (within.met, within.found) == (True, "2.50 (2.00 to 4.00)")
    assert not of_decisions("heat", {"tables": [1.0, 3.0], "step": [4.0, 9.0]}).met


def test_a_single_step_more_than_one_token_above_the_optimum_misses_the_target() -> None:
    rows = [
        Exactness(4, 2, 256, "drawn", [0.5, 1.0]),
        Exactness(4, 2, 1024, "drawn", [0.0, 1.5]),
        Exactness(8, 2, 256, "drawn", [0.0, 1.0]),
    ]
    four, eight = of_exactness(rows)
    assert (four.met, eight.met) == (False, True)
    assert four.found == "0.75, at most 1.5; 75.0% of steps within one token"
