"""The benchmark of tables must send every token where its source's table says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.split.by_source import TABLES, by_source, drawn_sources, loads_by_table
from eplb_service.bench.closed_loop import Course
from eplb_service.placement import Placement, even_log2phy, with_entries


@pytest.mark.parametrize("width", [1, 3])
def test_loads_are_those_of_dealing_token_by_token(width: int) -> None:
    generator = np.random.default_rng(width)
    placement = Placement.linear(1, 4, 3, 2)
    table_RED = with_entries(even_log2phy(placement, width), 3)[:, 0]
    source_TRE = generator.poisson(3, (5, 3, 4))
    expected_TR = np.zeros((5, 3))
    for (step, source, expert), tokens in np.ndenumerate(source_TRE):
        for token in range(tokens):
            expected_TR[step, table_RED[source, expert, token % width] // 2] += 1
    found_TR = loads_by_table(placement.phy2log_LRS[0], table_RED, source_TRE)
    np.testing.assert_array_equal(found_TR, expected_TR)


def test_every_table_is_scored_on_the_windows_that_follow() -> None:
    generator = np.random.default_rng(0)
    heat_TLE = generator.multinomial(64, generator.dirichlet(np.full(6, 0.5)), (12, 1))
    course = Course("small", heat_TLE, 4, 2, 4)
    sources_TRLE = drawn_sources(heat_TLE, course, generator)
    np.testing.assert_array_equal(sources_TRLE.sum(axis=1), heat_TLE)
    found = by_source(course, window=4, windows=2, width=2)
    assert list(found) == list(TABLES)
    assert all(len(ratios) == 2 and min(ratios) >= 1.0 for ratios in found.values())
