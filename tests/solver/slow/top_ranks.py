"""The hottest ranks of each episode, sorted afresh, and what they make of the ratio."""

from __future__ import annotations

import numpy as np


def hottest(load_RN):
    """Three hottest ranks of each episode and their loads, none below 0; rank ``R`` with 0 where there are fewer."""
    ranks, episodes = load_RN.shape
    padded_RN = np.vstack([np.maximum(load_RN, 0), np.zeros((1, episodes))])
    rank_KN = np.argsort(-load_RN, axis=0, kind="stable")[:3]
    rank_KN = np.vstack([rank_KN, np.full((3, episodes), ranks)])[:3]
    return rank_KN, np.take_along_axis(padded_RN, rank_KN, axis=0)


def ratio(load_RN, share_N):
    return float(sum(share * max(load_R) for share, load_R in zip(share_N, load_RN.T, strict=True)))


def shifted(load_RN, one, other, shift_N):
    """The loads once ``one`` carries so much more, and ``other`` so much less."""
    load_RN = load_RN.copy()
    load_RN[one] += shift_N
    load_RN[other] -= shift_N
    return load_RN
