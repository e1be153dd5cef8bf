"""The benchmark's scores match slow reference implementations, even if a peer places an expert twice on one rank."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_lab.bench.scoring import (
    even_par,
    realised_par,
    rule_tables,
    sampled_loads,
    stepwise_par,
)
from tests.placement.drawn import dealt_one_by_one
from tests.solver.slow.stepwise import optimum


def random_placement(generator, layers, experts, ranks, slots):
    """Draw a placement that contains every expert; some experts appear twice on a rank."""
    rows = []
    for _ in range(layers):
        redundant = generator.integers(0, experts, ranks * slots - experts)
        rows.append(
            generator.permutation(np.concatenate([np.arange(experts), redundant])).reshape(ranks, slots)
        )
    return np.array(rows, dtype=np.int32)


def slow_par(load_TR):
    ratios = [max(load_R) / (sum(load_R) / len(load_R)) for load_R in load_TR.tolist() if sum(load_R) > 0]
    return sum(ratios) / len(ratios) if ratios else np.nan


def slow_even_par(heat_TE, placed_RS, generator):
    load_TR = np.zeros((heat_TE.shape[0], placed_RS.shape[0]))
    for step, heat_E in enumerate(heat_TE):
        for expert, tokens in enumerate(heat_E):
            ranks = np.argwhere(placed_RS == expert)[:, 0]
            for rank in generator.choice(ranks, int(tokens)):
                load_TR[step, rank] += 1
    return slow_par(load_TR)


def slow_realised_par(heat_TE, slots, table_RE, mix_RE, generator):
    load_TR = np.zeros((heat_TE.shape[0], table_RE.shape[0]))
    for step, heat_E in enumerate(heat_TE):
        for expert, tokens in enumerate(heat_E):
            for source in generator.choice(len(mix_RE), int(tokens), p=mix_RE[:, expert]):
                load_TR[step, table_RE[source, expert] // slots] += 1
    return slow_par(load_TR)


@pytest.mark.parametrize("seed", range(4))
def test_ratios_match_the_slow_twins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    placed_LRS = random_placement(generator, 2, 7, 4, 3)
    tables_RLE = rule_tables(placed_LRS, 7)
    # Tokens are split at random, so compare the ratios averaged over many steps.
    heat_TLE = generator.integers(0, 8, (500, 2, 7))
    heat_TLE[1] = 0
    mix_RLE = generator.random((4, 2, 7))
    mix_RLE /= mix_RLE.sum(axis=0)
    even = [slow_even_par(heat_TLE[:, layer], placed_LRS[layer], generator) for layer in range(2)]
    np.testing.assert_allclose(even_par(heat_TLE, placed_LRS), even, rtol=0.03)
    programs = [
        np.mean(
            [optimum(placed_RS, heat_E) * 4 / heat_E.sum() for heat_E in heat_TLE[:9, layer] if heat_E.any()]
        )
        for layer, placed_RS in enumerate(placed_LRS)
    ]
    np.testing.assert_allclose(stepwise_par(heat_TLE[:9], placed_LRS), programs, rtol=1e-6)
    realised = [
        slow_realised_par(heat_TLE[:, layer], 3, tables_RLE[:, layer], mix_RLE[:, layer], generator)
        for layer in range(2)
    ]
    np.testing.assert_allclose(realised_par(heat_TLE, 3, tables_RLE, mix_RLE), realised, rtol=0.03)


def test_tokens_by_source_follow_the_table_of_their_source() -> None:
    generator = np.random.default_rng(0)
    table_RE = generator.integers(0, 12, (4, 7)).astype(np.int32)
    source_TRE = generator.integers(0, 9, (3, 4, 7))
    expected = dealt_one_by_one(source_TRE[:, :, None], table_RE[:, None] // 3, 4)[:, 0]
    np.testing.assert_array_equal(sampled_loads(source_TRE, 3, table_RE), expected)
