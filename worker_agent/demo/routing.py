"""Routed tokens whose expert choices are exactly those that a heat trace counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def choices_per_token(counts_TLE: npt.NDArray[np.integer], most: int = 8) -> int:
    """The largest top-k, up to ``most``, with which every step of the trace could have been routed.

    That is: the choices of each step and layer divide into tokens of ``k`` distinct experts each. 1 always will do.
    """
    sums_TL = counts_TLE.sum(axis=2)
    hottest_TL = counts_TLE.max(axis=2)
    for top_k in range(most, 1, -1):
        if (sums_TL % top_k == 0).all() and (hottest_TL * top_k <= sums_TL).all():
            return top_k
    return 1


def deal(counts_E: npt.NDArray[np.integer], top_k: int, rng: np.random.Generator) -> Int64:
    """Expert choices ``[tokens, top_k]``, distinct within a token, that count up to ``counts_E``.

    Choices are laid out in order of expert and dealt round the tokens like cards, so that an expert with no more
    choices than there are tokens never meets the same token twice; then the tokens are shuffled.
    """
    choices = np.repeat(np.arange(counts_E.shape[0]), counts_E)
    tokens = choices.shape[0] // top_k
    dealt_TK = choices.reshape(top_k, tokens).T
    return np.ascontiguousarray(rng.permutation(dealt_TK))


def own_part(choices_TK: Int64, rank: int, ranks: int) -> Int64:
    """The tokens that start on ``rank``: a nearly equal, contiguous part."""
    bounds = np.arange(ranks + 1) * choices_TK.shape[0] // ranks
    return choices_TK[bounds[rank] : bounds[rank + 1]]


def longest_part(counts_E: npt.NDArray[np.integer], top_k: int, ranks: int) -> int:
    """The most tokens that start on any of ``ranks``, where ``deal`` has dealt ``counts_E``."""
    return -(-int(counts_E.sum()) // (top_k * ranks))
