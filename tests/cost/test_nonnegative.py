"""Many problems at a time have the solutions that each has by itself."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.cost.fit import nonnegative
from eplb_service.cost.nonnegative import nonnegative_many


def test_solutions_are_those_of_the_plain_search() -> None:
    rng = np.random.default_rng(0)
    features_BTF = rng.normal(size=(30, 40, 4)) + rng.random((30, 1, 4))
    target_BT = rng.normal(size=(30, 40)) + features_BTF @ np.array([1.0, 0.0, -0.5, 0.2])
    gram_BFF = np.einsum("btf,btg->bfg", features_BTF, features_BTF)
    moment_BF = np.einsum("btf,bt->bf", features_BTF, target_BT)
    found_BF, lowered_B = nonnegative_many(gram_BFF, moment_BF)
    for features_TF, target_T, found_F, lowered in zip(
        features_BTF, target_BT, found_BF, lowered_B, strict=True
    ):
        plain_F = nonnegative(features_TF, target_T)
        np.testing.assert_allclose(found_F, plain_F, atol=1e-6)
        squared = ((target_T - features_TF @ plain_F) ** 2).sum()
        assert lowered == pytest.approx((target_T**2).sum() - squared)


def test_features_that_are_one_and_the_same_or_nothing_are_solved_for() -> None:
    features_TF = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    found_BF, _ = nonnegative_many((features_TF.T @ features_TF)[None], (features_TF.T @ [3.0, 6.0])[None])
    assert features_TF @ found_BF[0] == pytest.approx([3.0, 6.0])
    assert (found_BF >= 0).all()
