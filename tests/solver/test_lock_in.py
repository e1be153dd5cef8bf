"""A layer whose placement has become bad is placed from scratch even if no smaller change improves it."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service import solve


def with_hot_experts(share: float, hot: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Return heat ``[T, 1, E]``: a fraction ``share`` is spread evenly over ``hot`` experts, and the rest unevenly."""
    experts = shape[0]
    generator = np.random.default_rng([experts, hot, seed])
    popularity_E = np.exp(0.7 * generator.standard_normal(experts))
    popularity_E[:hot] = 0
    popularity_E *= (1 - share) / popularity_E.sum()
    popularity_E[:hot] = share / hot
    return generator.multinomial(32768, popularity_E, size=(64, 1))


@pytest.mark.parametrize("split", ["tables", "even"])
@pytest.mark.parametrize("shape", [(32, 8, 5), (60, 12, 6), (128, 16, 9), (256, 32, 9)], ids=str)
@pytest.mark.parametrize(
    ("before", "after", "hot"), [(0.3, 0.7, 1), (0.5, 0.9, 1), (0.4, 0.8, 2), (0.7, 0.1, 1)]
)
def test_after_a_change_in_the_hottest_experts_a_warm_decision_is_as_good_as_a_new_placement(
    shape: tuple[int, int, int], before: float, after: float, hot: int, split: str
) -> None:
    for seed in range(2):
        old, new = (with_hot_experts(share, hot, shape, seed) for share in (before, after))
        arguments = {"ranks": shape[1], "slots": shape[2], "threads": 1, "split": split}
        deployed = solve(old, **arguments)
        warm = solve(new, **arguments, placement=deployed.phy2log, log2phy=deployed.log2phy, move_price=0.0)
        assert warm.par_after < solve(new, **arguments).par_after + 0.03
