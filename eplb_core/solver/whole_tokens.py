"""Rank loads of single steps in whole tokens: a step cannot send half a token to each of two replicas.

A host splits an expert's tokens over its replicas in known shares. If a step has ``n`` tokens for an expert, a replica
with the share ``p`` receives a binomially distributed number of them, with mean ``n * p``. In steps with few tokens,
the variance of this number determines the load of the hottest rank. For example, one token for an expert with two
replicas gives one rank a load of 1; it never gives two ranks a load of 0.5.

Draws depend only on a hash of the step number, the layer's heat in that step, the expert and the token. The same
arguments therefore give the same loads, two placements are compared on the same draws, and a layer's loads do not
depend on the other layers of the call. Few tokens are drawn one by one. Many tokens are drawn from the normal
approximation of the binomial distribution and rounded.

References
----------
J. Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011 (counter-based generators).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Float64, Int32, Int64, UInt64

_FEW_PER_REPLICA = 16
"""Maximum number of tokens per replica for which tokens are drawn one by one. With more tokens, the normal
approximation is close."""
_UNIFORM = 65_536.0
"""Range of a uniform number: 16 bits of a hash. One hash provides four such numbers."""
_MEAN_OF_SUM = 131_070.0
"""Mean of the sum of four uniform numbers, which is approximately normal."""
_DEVIATION_OF_SUM = 37_837.227
"""Standard deviation of the sum of four uniform numbers."""


class HostSplit(NamedTuple):
    """Split of the experts' tokens over their slots, for K layers.

    ``table_KRED``, ``source_KRE`` and ``spread_KE`` describe a host with dealing tables. For other hosts, the first two
    have no sources (R is 0) and the spread is 1.
    """

    share_KP: Float64
    """float64 ``[K, R*S]``, expected fraction of its expert's tokens that each slot receives."""
    table_KRED: Int32
    """int32 ``[K, R, E, D]``, slots to which a source sends its tokens of an expert in turn."""
    source_KRE: Float64
    """float64 ``[K, R, E]``, each source's share of an expert's tokens."""
    spread_KE: Float64
    """float64 ``[K, E]``, variance of many dealt tokens, as a fraction of the multinomial variance."""


class ServedSteps(NamedTuple):
    """Loads of T steps in K layers."""

    peak_TK: Float64
    """float64 ``[T, K]``, tokens of the most loaded rank."""
    tokens_TK: Float64
    """float64 ``[T, K]``, tokens of all ranks."""
    us_TK: Float64
    """float64 ``[T, K]``, microseconds of the slowest rank; NaN for a step without tokens.

    It has no rows if there is no cost curve.
    """
    loads_TKR: Float64
    """float64 ``[T, K, R]``, tokens of each rank. It has no rows unless ``keep_loads`` is True."""
    variance_K: Float64
    """float64 ``[K]``, variance of the ranks' jumps between consecutive steps, summed over the ranks.

    ``window.EpisodeLoads`` defines jumps.
    """


@kernel
def serve_steps(
    heat_TLE: Float64 | Int64 | Int32,
    layer_K: Int64,
    phy2log_KRS: Int32,
    split: HostSplit,
    curve_4: Float64,
    first_step: int,
    keep_loads: bool,
) -> ServedSteps:
    """Return the loads of each step in whole tokens.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert. A fractional token (float heat only) is split by the expected shares.
    layer_K
        int64 ``[K]``, layers to serve.
    phy2log_KRS
        int32 ``[K, R, S]``, placement of these layers.
    split
        Split of the tokens of these layers.
    curve_4
        float64 ``[4]``, cost curve: floor, read and launch in microseconds, and slope in microseconds per token. An
        empty array to return no times.
    first_step
        Number of the first step. A step's draws depend on its number and not on the steps around it.
    keep_loads
        True to return all rank loads.
    """
    layers, ranks, slots = phy2log_KRS.shape
    steps, _, experts = heat_TLE.shape
    peak_TK = np.empty((steps, layers))
    tokens_TK = np.empty((steps, layers))
    us_TK = np.full((steps if curve_4.shape[0] else 0, layers), np.nan)
    loads_TKR = np.empty((steps if keep_loads else 0, layers, ranks))
    variance_K = np.zeros(layers)
    tokens_P = np.empty(ranks * slots)
    load_R = np.empty(ranks)
    before_R = np.zeros(ranks)
    jump_R = np.zeros(ranks)
    dealt_R = np.zeros(split.table_KRED.shape[1], dtype=np.int64)
    for k in range(layers):
        layer = layer_K[k]
        expert_P = phy2log_KRS[k].copy().reshape(ranks * slots)
        share_P = split.share_KP[k]
        split_X, first_X, slot_Y = _split_experts(expert_P, experts)
        odds_Y, deviation_Y = _odds(slot_Y, first_X, share_P, split.spread_KE[k][split_X])
        busy = 0
        for r in range(ranks):
            jump_R[r] = 0.0
        for t in range(steps):
            heat_E = heat_TLE[t, layer]
            for p in range(expert_P.shape[0]):
                tokens_P[p] = heat_E[np.uint32(expert_P[p])]
            key = _key_of(heat_E, first_step + t)
            for x in range(split_X.shape[0]):
                e = split_X[x]
                begin = first_X[x]
                end = first_X[x + 1]
                tokens = float(heat_E[e])
                # An expert without tokens needs no draw, because its slots are already zero.
                if tokens > 0:
                    key_of_expert = key + np.uint64(e) * np.uint64(0xBF58476D1CE4E5B9)
                    if tokens > _FEW_PER_REPLICA * (end - begin):
                        _draw_many(tokens, slot_Y, begin, end, odds_Y, deviation_Y, key_of_expert, tokens_P)
                    elif dealt_R.shape[0] > 0:
                        _deal(
                            tokens, slot_Y, begin, end, share_P, split, k, e, key_of_expert, dealt_R, tokens_P
                        )
                    else:
                        _draw_few(tokens, slot_Y, begin, end, share_P, key_of_expert, tokens_P)
            peak = 0.0
            total = 0.0
            slowest = 0.0
            for r in range(ranks):
                load = 0.0
                for p in range(r * slots, (r + 1) * slots):
                    load += tokens_P[p]
                load_R[r] = load
                peak = max(peak, load)
                total += load
            peak_TK[t, k] = peak
            tokens_TK[t, k] = total
            if keep_loads:
                for r in range(ranks):
                    loads_TKR[t, k, r] = load_R[r]
            if total > 0:
                for r in range(ranks):
                    rank_share = load_R[r] / total
                    jump = rank_share - before_R[r] if busy else 0.0
                    jump_R[r] += jump * jump
                    before_R[r] = rank_share
                busy += 1
                if curve_4.shape[0]:
                    for r in range(ranks):
                        us = 0.0
                        for p in range(r * slots, (r + 1) * slots):
                            if tokens_P[p] > 0:
                                us += max(curve_4[1], curve_4[2] + curve_4[3] * tokens_P[p])
                        slowest = max(slowest, us)
                    us_TK[t, k] = curve_4[0] + slowest
        variance_K[k] = jump_R.sum() / (2.0 * max(busy - 1, 1))
    return ServedSteps(peak_TK, tokens_TK, us_TK, loads_TKR, variance_K)


@kernel
def thinned(heat_TLE: Float64 | Int64 | Int32, seed: int) -> Float64:
    """Keep each token with probability 1/2 and return the kept tokens, float64 ``[T, L, E]``.

    Kept and dropped tokens are two samples of the same heat. They are independent if the heat is Poisson distributed.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    seed
        Seed of the draws.
    """
    kept_TLE = np.zeros(heat_TLE.shape)
    # Draw tokens as ``serve_steps`` does, with two slots: one for kept tokens and one for dropped tokens.
    half_P = np.full(2, 0.5)
    slot_Y = np.arange(2)
    kept_P = np.empty(2)
    odds_Y = np.array([0.5, 1.0])
    deviation_Y = np.array([0.5, 0.0])
    for t in range(heat_TLE.shape[0]):
        for layer in range(heat_TLE.shape[1]):
            for e in range(heat_TLE.shape[2]):
                tokens = float(heat_TLE[t, layer, e])
                if tokens > 0:
                    number = (t * heat_TLE.shape[1] + layer) * heat_TLE.shape[2] + e
                    key = _mixed(np.uint64(number) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15))
                    if tokens > 2 * _FEW_PER_REPLICA:
                        _draw_many(tokens, slot_Y, 0, 2, odds_Y, deviation_Y, key, kept_P)
                    else:
                        _draw_few(tokens, slot_Y, 0, 2, half_P, key, kept_P)
                    kept_TLE[t, layer, e] = kept_P[0]
    return kept_TLE


@kernel
def _split_experts(expert_P: Int32, experts: int) -> tuple[Int64, Int64, Int64]:
    """List the experts with several slots, and their slots.

    Returns
    -------
    split_X : Int64
        ``[X]``, experts with several slots.
    first_X : Int64
        ``[X + 1]``, start of each of these experts' slots in ``slot_Y``.
    slot_Y : Int64
        ``[Y]``, slots ordered by expert.
    """
    count_E = np.zeros(experts, dtype=np.int64)
    for p in range(expert_P.shape[0]):
        count_E[expert_P[p]] += 1
    several = 0
    index_E = np.full(experts, -1)
    for e in range(experts):
        if count_E[e] > 1:
            index_E[e] = several
            several += 1
    split_X = np.empty(several, dtype=np.int64)
    first_X = np.zeros(several + 1, dtype=np.int64)
    for e in range(experts):
        if index_E[e] >= 0:
            split_X[index_E[e]] = e
            first_X[index_E[e] + 1] = count_E[e]
    for x in range(several):
        first_X[x + 1] += first_X[x]
    next_X = first_X.copy()
    slot_Y = np.empty(first_X[several], dtype=np.int64)
    for p in range(expert_P.shape[0]):
        x = index_E[expert_P[p]]
        if x >= 0:
            slot_Y[next_X[x]] = p
            next_X[x] += 1
    return split_X, first_X, slot_Y


@part
def _key_of(heat_E: Float64 | Int64 | Int32, step: int) -> UInt64:
    """Hash a layer's heat in a step, together with the step number so that steps with equal heat differ."""
    bits = np.uint64(step) * np.uint64(0xD1342543DE82EF95)
    weight = np.uint64(0x9E3779B97F4A7C15)
    for e in range(heat_E.shape[0]):
        bits += np.uint64(np.int64(heat_E[e])) * weight
        weight += np.uint64(0x3C6EF372FE94F82A)
    return _mixed(bits)


@part
def _mixed(bits: int) -> UInt64:
    """Apply the finalizer of SplitMix64: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = bits ^ (bits >> np.uint64(31))
    return mixed


@part
def _spread_rest(
    tokens: float, slot_Y: Int64, begin: int, end: int, share_P: Float64, tokens_P: Float64
) -> int:
    """Split an expert's fractional token over its slots by their shares and return the number of whole tokens."""
    whole = int(tokens)
    rest = tokens - whole
    for j in range(begin, end):
        tokens_P[slot_Y[j]] = rest * share_P[slot_Y[j]]
    return whole


@part
def _next_draw(bits: UInt64, key: UInt64, i: int) -> tuple[UInt64, float]:
    """Return the remaining random bits and draw ``i``, between 0 and ``_UNIFORM``. Four draws share 64 bits."""
    if i & 3 == 0:
        bits = _mixed(key + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))
    return bits >> np.uint64(16), np.int64(bits & np.uint64(0xFFFF)) + 0.5


@part
def _draw_few(
    tokens: float, slot_Y: Int64, begin: int, end: int, share_P: Float64, key: UInt64, tokens_P: Float64
) -> None:
    """Draw the slot of every token and count the tokens in ``tokens_P``."""
    whole = _spread_rest(tokens, slot_Y, begin, end, share_P, tokens_P)
    last = end - 1
    bits = np.uint64(0)
    for i in range(whole):
        bits, drawn = _next_draw(bits, key, i)
        j = begin
        limit = share_P[slot_Y[begin]] * _UNIFORM
        while drawn > limit and j < last:
            j += 1
            limit += share_P[slot_Y[j]] * _UNIFORM
        tokens_P[slot_Y[j]] += 1.0


@part
def _draw_many(
    tokens: float,
    slot_Y: Int64,
    begin: int,
    end: int,
    odds_Y: Float64,
    deviation_Y: Float64,
    key: UInt64,
    tokens_P: Float64,
) -> None:
    """Draw each slot's number of tokens, slot after slot, and write it into ``tokens_P``.

    Given the draws for the earlier slots, a slot's number of tokens is binomially distributed over the remaining
    tokens. It is drawn from the normal approximation and rounded. The last slot receives the remaining tokens.
    """
    remaining = tokens
    for j in range(begin, end - 1):
        bits = _mixed(key + np.uint64(j - begin + 1) * np.uint64(0x9E3779B97F4A7C15))
        sum_of_four = np.int64(
            (bits & np.uint64(0xFFFF))
            + ((bits >> np.uint64(16)) & np.uint64(0xFFFF))
            + ((bits >> np.uint64(32)) & np.uint64(0xFFFF))
            + (bits >> np.uint64(48))
        )
        normal = (sum_of_four - _MEAN_OF_SUM) * (1.0 / _DEVIATION_OF_SUM)
        drawn = np.floor(remaining * odds_Y[j] + normal * deviation_Y[j] * np.sqrt(remaining) + 0.5)
        drawn = min(max(drawn, 0.0), remaining)
        tokens_P[slot_Y[j]] = drawn
        remaining -= drawn
    tokens_P[slot_Y[end - 1]] = remaining


@kernel
def _odds(slot_Y: Int64, first_X: Int64, share_P: Float64, spread_X: Float64) -> tuple[Float64, Float64]:
    """Return each slot's share of the tokens left by the earlier slots, and its standard deviation per token."""
    odds_Y = np.ones(slot_Y.shape[0])
    deviation_Y = np.zeros(slot_Y.shape[0])
    for x in range(first_X.shape[0] - 1):
        remaining = 1.0
        for j in range(first_X[x], first_X[x + 1]):
            share = share_P[slot_Y[j]]
            # Because of rounding, the last share can slightly exceed the remaining sum.
            odds = min(share / remaining, 1.0) if remaining > 0 else 0.0
            odds_Y[j] = odds
            deviation_Y[j] = np.sqrt(odds * (1.0 - odds) * spread_X[x])
            remaining -= share
    return odds_Y, deviation_Y


@part
def _deal(
    tokens: float,
    slot_Y: Int64,
    begin: int,
    end: int,
    share_P: Float64,
    split: HostSplit,
    k: int,
    expert: int,
    key: UInt64,
    dealt_R: Int64,
    tokens_P: Float64,
) -> None:
    """Draw the source of every token, deal the token according to the source's table and count it in ``tokens_P``.

    ``dealt_R``, int64 ``[R]``, is scratch memory.
    """
    whole = _spread_rest(tokens, slot_Y, begin, end, share_P, tokens_P)
    sources = dealt_R.shape[0]
    width = split.table_KRED.shape[3]
    for r in range(sources):
        dealt_R[r] = 0
    bits = np.uint64(0)
    for i in range(whole):
        bits, drawn = _next_draw(bits, key, i)
        r = 0
        limit = split.source_KRE[k, 0, expert] * _UNIFORM
        while drawn > limit and r < sources - 1:
            r += 1
            limit += split.source_KRE[k, r, expert] * _UNIFORM
        tokens_P[split.table_KRED[k, r, expert, dealt_R[r] % width]] += 1.0
        dealt_R[r] += 1
