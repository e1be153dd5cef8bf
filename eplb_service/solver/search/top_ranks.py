"""The hottest ranks of every episode, kept at hand, so that a change's effect on the peaks costs one pass.

For each episode the three hottest ranks are known. A change touches few ranks, so the hottest of all others is nearly
always among them, and only the touched ranks' own loads have to be worked out.

What is called for every try takes plain arrays and is made part of its caller: counting references to the members of
a tuple would take longer than the work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Float32, Int32

_TOP = 3
"""Ranks kept of each episode: a move changes two, so that the third is the hottest of all others."""


class TopRanks(NamedTuple):
    """Rank loads per episode with their three largest; all arrays change in place."""

    load_RN: Float32
    """float32 ``[R, N]``."""
    load_NR: Float32
    """float32 ``[N, R]``, the same with a whole episode in a row."""
    rank_KN: Int32
    """int32 ``[3, N]``, the hottest ranks of each episode, hottest first; ``R`` where there are fewer ranks."""
    peak_KN: Float32
    """float32 ``[3, N]``, their loads; 0 where there are fewer ranks."""


@kernel
def top_ranks_of(load_RN: Float32) -> TopRanks:
    """``TopRanks`` of rank loads float32 ``[R, N]``, which become part of it."""
    ranks, episodes = load_RN.shape
    load_NR = np.empty((episodes, ranks), dtype=np.float32)
    for r in range(ranks):
        for n in range(episodes):
            load_NR[n, r] = load_RN[r, n]
    rank_KN = np.empty((_TOP, episodes), dtype=np.int32)
    peak_KN = np.empty((_TOP, episodes), dtype=np.float32)
    for n in range(episodes):
        _look(load_NR, rank_KN, peak_KN, n)
    return TopRanks(load_RN, load_NR, rank_KN, peak_KN)


@kernel
def _look(load_NR: Float32, rank_KN: Int32, peak_KN: Float32, n: int) -> None:
    """Find the three hottest ranks of one episode; of equally hot ones the first come first."""
    ranks = load_NR.shape[1]
    first = second = third = ranks
    most = more = much = np.float32(-1.0)
    for r in range(ranks):
        load = load_NR[n, r]
        if load <= much:
            continue
        if load <= more:
            third, much = r, load
        elif load <= most:
            second, third, more, much = r, second, load, more
        else:
            first, second, third, most, more, much = r, first, second, load, most, more
    zero = np.float32(0.0)
    rank_KN[0, n], rank_KN[1, n], rank_KN[2, n] = first, second, third
    peak_KN[0, n], peak_KN[1, n], peak_KN[2, n] = max(most, zero), max(more, zero), max(much, zero)


@kernel
def mean_peak(peak_KN: Float32, share_N: Float32) -> float:
    """Peak-to-average ratio of normalised loads: the episodes' peaks, averaged by their weights."""
    total = 0.0
    for n in range(share_N.shape[0]):
        total += share_N[n] * peak_KN[0, n]
    return total


@part
def peak_of_two(
    load_RN: Float32,
    rank_KN: Int32,
    peak_KN: Float32,
    share_N: Float32,
    one: int,
    other: int,
    out_share: float,
    out_N: Float32,
    come_share: float,
    come_N: Float32,
) -> float:
    """The ratio once ``one`` gives ``out_share`` of heat ``out_N`` for ``come_share`` of ``come_N`` of ``other``.

    Parameters
    ----------
    load_RN
        float32 ``[R, N]``, loads of the ranks.
    rank_KN, peak_KN
        The hottest ranks of each episode and their loads, see ``TopRanks``.
    share_N
        float32 ``[N]``, the episodes' weights.
    one, other
        The two ranks.
    out_share, out_N
        Part of an expert's tokens that leaves ``one``, and its heat, float32 ``[N]``.
    come_share, come_N
        The same of the expert that leaves ``other``.
    """
    total = np.float32(0.0)
    for n in range(share_N.shape[0]):
        shift = come_share * come_N[n] - out_share * out_N[n]
        rest = peak_KN[2, n]
        if rank_KN[1, n] != one and rank_KN[1, n] != other:
            rest = peak_KN[1, n]
        if rank_KN[0, n] != one and rank_KN[0, n] != other:
            rest = peak_KN[0, n]
        total += share_N[n] * max(rest, load_RN[one, n] + shift, load_RN[other, n] - shift)
    return float(total)


@part
def peak_of_changed(
    load_NR: Float32,
    rank_KN: Int32,
    peak_KN: Float32,
    share_N: Float32,
    rank_K: Int32,
    count: int,
    changed_R1: Bool,
    changed_RN: Float32,
) -> float:
    """The ratio once the first ``count`` ranks of ``rank_K`` have their rows of ``changed_RN`` as loads.

    Parameters
    ----------
    load_NR
        float32 ``[N, R]``, loads of the ranks.
    rank_KN, peak_KN
        The hottest ranks of each episode and their loads, see ``TopRanks``.
    share_N
        float32 ``[N]``, the episodes' weights.
    rank_K, count
        int32 ``[K]``, of which so many are ranks that change.
    changed_R1
        bool ``[R + 1]``, marks the same ranks; its last is for ranks that there are not, and never set.
    changed_RN
        float32 ``[R, N]``, the new loads of those ranks.
    """
    peak_N = np.empty(share_N.shape[0], dtype=np.float32)
    for n in range(peak_N.shape[0]):
        if not changed_R1[rank_KN[0, n]]:
            peak_N[n] = peak_KN[0, n]
        elif not changed_R1[rank_KN[1, n]]:
            peak_N[n] = peak_KN[1, n]
        elif not changed_R1[rank_KN[2, n]]:
            peak_N[n] = peak_KN[2, n]
        else:
            hottest = np.float32(0.0)
            for r in range(load_NR.shape[1]):
                if not changed_R1[r]:
                    hottest = max(hottest, load_NR[n, r])
            peak_N[n] = hottest
    for k in range(count):
        rank = rank_K[k]
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], changed_RN[rank, n])
    total = np.float32(0.0)
    for n in range(peak_N.shape[0]):
        total += share_N[n] * peak_N[n]
    return float(total)


@kernel
def update_loads(top: TopRanks, rank_K: Int32, count: int, changed_R1: Bool, changed_RN: Float32) -> None:
    """Make the changed loads, given as for ``peak_of_changed``, those that count."""
    load_RN, load_NR, rank_KN, peak_KN = top
    for n in range(peak_KN.shape[1]):
        stale = changed_R1[rank_KN[0, n]] or changed_R1[rank_KN[1, n]] or changed_R1[rank_KN[2, n]]
        for k in range(count):
            rank = rank_K[k]
            load = changed_RN[rank, n]
            load_RN[rank, n] = load
            load_NR[n, rank] = load
            stale = stale or load > peak_KN[2, n]
        if stale:
            _look(load_NR, rank_KN, peak_KN, n)
