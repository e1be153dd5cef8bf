"""Each token from the trace chooses distinct experts, and the choices add up to the trace's counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_lab.ranks.rank import choices_per_token, deal, own_part


@given(
    tokens=st.integers(0, 12),
    experts=st.integers(4, 9),
    top_k=st.integers(1, 4),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_the_choices_of_a_dealt_step_add_up_to_its_heat(tokens, experts, top_k, ranks, seed) -> None:
    rng = np.random.default_rng(seed)
    routed = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    counts_E = np.bincount(np.concatenate([*routed, np.zeros(0, dtype=int)]), minlength=experts)
    choices_TK = deal(counts_E, top_k, rng)
    assert choices_TK.shape == (tokens, top_k)
    assert (np.bincount(choices_TK.ravel(), minlength=experts) == counts_E).all()
    assert all(len(set(row)) == top_k for row in choices_TK.tolist())
    parts = [own_part(choices_TK, rank, ranks) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), choices_TK)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_top_k_is_the_largest_value_that_fits_every_step() -> None:
    counts_TLE = np.array([[[4, 4, 2, 2]], [[3, 3, 3, 3]]])
    assert choices_per_token(counts_TLE) == 3
    assert choices_per_token(np.array([[[7, 0, 0, 0]]])) == 1
