"""Episodes separate steps that differ, and a warm decision never raises its window's PAR."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.planner.episodes import similar_steps_together
from eplb_service import solve

EXPERTS = 64
RANKS = 8
SLOTS = 10


def alternating(every: int, steps: int, workloads: int = 2, seed: int = 0, tokens: int = 8192) -> np.ndarray:
    """Draw heat ``[T, 2, E]`` from workloads that alternate every ``every`` steps."""
    generator = np.random.default_rng(seed)
    popularity_WLE = generator.dirichlet(np.full(EXPERTS, 0.4), (workloads, 2))
    served_T = np.arange(steps) // every % workloads
    return np.stack([[generator.multinomial(tokens, row_E) for row_E in popularity_WLE[w]] for w in served_T])


@pytest.mark.parametrize(("every", "workloads"), [(1, 2), (2, 2), (3, 2), (1, 3)])
def test_workloads_that_alternate_within_an_episode_are_balanced(every: int, workloads: int) -> None:
    heat_TLE = alternating(every, 512, workloads)
    seen_TLE = heat_TLE[:256]
    next_TLE = heat_TLE[256:]
    solution = solve(seen_TLE, RANKS, SLOTS)
    kept = solve(next_TLE, RANKS, SLOTS, placement=solution.phy2log, log2phy=solution.log2phy, policy="none")
    assert kept.par_after < 1.2
    # A warm start from a placement that was solved for one workload alone reaches the same balance.
    alone = solve(seen_TLE[np.arange(256) // every % workloads == 0][:64], RANKS, SLOTS)
    warm = solve(seen_TLE, RANKS, SLOTS, placement=alone.phy2log, log2phy=alone.log2phy, move_price=0.0)
    assert warm.par_after < 1.2 < warm.par_before


@pytest.mark.parametrize("kind", ["constant", "batches", "drift"])
def test_steps_that_differ_only_by_sampling_stay_in_order(kind: str) -> None:
    generator = np.random.default_rng(1)
    popularity_E = generator.dirichlet(np.full(EXPERTS, 0.6))
    walk_TE = np.cumsum(0.03 * generator.standard_normal((256, EXPERTS)), axis=0) if kind == "drift" else 0
    share_TE = popularity_E * np.exp(walk_TE + np.zeros((256, 1)))
    share_TE /= share_TE.sum(axis=1, keepdims=True)
    tokens_T = np.full(256, 4096)
    if kind == "batches":
        tokens_T = np.exp(generator.uniform(0, np.log(8192), 256)).astype(int) + 1
    heat_TLE = np.stack([[generator.multinomial(*draw)] for draw in zip(tokens_T, share_TE, strict=True)])
    assert similar_steps_together(heat_TLE, 64) is None


def test_steps_are_reordered_only_within_blocks_of_sixteen() -> None:
    order_T = similar_steps_together(alternating(1, 256), 64)
    assert order_T is not None
    assert sorted(order_T.tolist()) == list(range(256))
    np.testing.assert_array_equal(order_T // 16, np.arange(256) // 16)
    # The two workloads alternate step by step, yet each episode of four steps contains only one of them.
    assert all(len({int(step) % 2 for step in four}) == 1 for four in order_T.reshape(64, 4))


def test_short_and_empty_windows_keep_their_order() -> None:
    assert similar_steps_together(alternating(1, 64), 64) is None
    assert similar_steps_together(np.zeros((256, 2, EXPERTS), dtype=np.int64), 64) is None


def test_a_warm_decision_never_raises_the_par_of_its_window() -> None:
    for seed in range(12):
        generator = np.random.default_rng(seed)
        heat_TLE = alternating(1 + seed % 3, 256, 2 + seed % 2, seed, tokens=(64, 512, 8192)[seed % 3])
        heat_TLE[:: 2 + seed % 4] //= 16
        start = solve(alternating(4, 128, 2, seed + 100), RANKS, SLOTS)
        solution = solve(
            heat_TLE,
            RANKS,
            SLOTS,
            placement=start.phy2log,
            log2phy=start.log2phy,
            move_price=float(generator.choice([0.0, 0.1])),
        )
        assert (solution.par_after_L <= solution.par_before_L + 1e-9).all()
