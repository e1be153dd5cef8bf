"""Rank loads of individual steps in whole tokens. A step cannot send half a token to each of two replicas.

A host splits an expert's tokens over its replicas in known shares. If a step has ``n`` tokens for an expert, a replica
with share ``p`` receives a binomially distributed number of them, with mean ``n * p``. In steps with few tokens,
the variance of this number determines the load of the hottest rank. For example, one token for an expert with two
replicas gives one rank a load of 1; it never gives two ranks a load of 0.5.

Draws depend only on a hash of the step number, the layer's heat in that step, the expert and the token. The same
arguments therefore give the same loads, two placements are compared on the same draws, and a layer's loads do not
depend on the other layers in the call. Small numbers of tokens are drawn one token at a time. Large numbers are drawn
from the normal approximation of the binomial distribution and rounded.

References
----------
J. Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011 (counter-based generators).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Float64, Int32, Int64, UInt64, set_row

_FEW_PER_REPLICA = 16
"""Up to this many tokens per replica, an expert's tokens are drawn one at a time. With more tokens, the normal
approximation is accurate."""
_UNIFORM = 65_536.0
"""Range of a uniform random number, which is 16 bits of a hash. One hash yields four such numbers."""
_MEAN_OF_SUM = 131_070.0
"""Mean of the sum of four uniform random numbers. The sum is approximately normal."""
_DEVIATION_OF_SUM = 37_837.227
"""Standard deviation of the sum of four uniform random numbers."""


class HostSplit(NamedTuple):
    """Split of the experts' tokens over their slots, for K layers.

    ``table_KRED``, ``source_KRE`` and ``spread_KE`` describe a host with dealing tables. For other hosts, the first two
    have no sources (R is 0) and the spread is 1.
    """

    share_KP: Float64
    """float64 ``[K, R*S]``, expected fraction of its expert's tokens that each slot receives."""
    table_KRED: Int32
    """int32 ``[K, R, E, D]``, slots that each source uses in turn for its tokens of each expert."""
    source_KRE: Float64
    """float64 ``[K, R, E]``, each source's share of an expert's tokens."""
    spread_KE: Float64
    """float64 ``[K, E]``, variance of token counts when many tokens are dealt, relative to the multinomial variance."""


class ServedSteps(NamedTuple):
    """Loads of T steps in K layers."""

    peak_TK: Float64
    """float64 ``[T, K]``, tokens on the most loaded rank."""
    tokens_TK: Float64
    """float64 ``[T, K]``, total tokens on all ranks."""
    us_TK: Float64
    """float64 ``[T, K]``, time of the slowest rank in microseconds; NaN for a step without tokens.

    The array has no rows if there is no cost curve.
    """
    loads_TKR: Float64
    """float64 ``[T, K, R]``, tokens on each rank. The array has no rows unless ``keep_loads`` is True."""
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
        ``[T, L, E]``, tokens of each expert. A fractional token (float heat only) is split according to the expected
        shares.
    layer_K
        int64 ``[K]``, indices of the layers to compute loads for.
    phy2log_KRS
        int32 ``[K, R, S]``, placement of these layers.
    split
        Split of the tokens of these layers.
    curve_4
        float64 ``[4]``, cost curve: floor, read and launch in microseconds, and slope in microseconds per token. Pass
        an empty array to skip the times.
    first_step
        Number of the first step. A step's draws depend on its number but not on the surrounding steps.
    keep_loads
        True to return all rank loads.
    """
    layers, ranks, _ = phy2log_KRS.shape
    steps = heat_TLE.shape[0]
    served = ServedSteps(
        np.empty((steps, layers)),
        np.empty((steps, layers)),
        np.full((steps if curve_4.shape[0] else 0, layers), np.nan),
        np.empty((steps if keep_loads else 0, layers, ranks)),
        np.zeros(layers),
    )
    for k in range(layers):
        _serve_layer(heat_TLE, layer_K[k], k, phy2log_KRS[k], split, curve_4, first_step, served)
    return served


@kernel
def _serve_layer(
    heat_TLE: Float64 | Int64 | Int32,
    layer: int,
    k: int,
    phy2log_RS: Int32,
    split: HostSplit,
    curve_4: Float64,
    first_step: int,
    served: ServedSteps,
) -> None:
    """Write the loads of one layer into ``served``.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer
        Index of the layer in ``heat_TLE``.
    k
        Index of the layer in ``split`` and ``served``.
    phy2log_RS
        int32 ``[R, S]``, placement of the layer.
    split
        Split of the tokens of all served layers.
    curve_4
        float64 ``[4]``, as in ``serve_steps``.
    first_step
        Number of the first step.
    served
        Results, changed in place.
    """
    ranks, slots = phy2log_RS.shape
    expert_P = phy2log_RS.copy().reshape(ranks * slots)
    replicated = _replicated_experts(expert_P, split.share_KP[k], split.spread_KE[k])
    expert_X, first_X, slot_Y, share_Y, odds_Y, deviation_Y = replicated
    dealt_R = np.zeros(split.table_KRED.shape[1], dtype=np.int64)
    dealing = _Dealing(split.table_KRED[k], split.source_KRE[k], dealt_R)
    tokens_P = np.empty(ranks * slots)
    load_R = np.empty(ranks)
    share_R = np.zeros(ranks)
    jump_R = np.zeros(ranks)
    busy = 0
    for t in range(heat_TLE.shape[0]):
        heat_E = heat_TLE[t, layer]
        for p in range(expert_P.shape[0]):
            tokens_P[p] = heat_E[np.uint32(expert_P[p])]
        key = _key_of(heat_E, first_step + t)
        for x in range(expert_X.shape[0]):
            begin = first_X[x]
            end = first_X[x + 1]
            tokens = float(heat_E[expert_X[x]])
            # An expert without tokens needs no draw, because its slots are already zero.
            if tokens > 0:
                expert_key = key + np.uint64(expert_X[x]) * np.uint64(0xBF58476D1CE4E5B9)
                if tokens > _FEW_PER_REPLICA * (end - begin):
                    _draw_many(tokens, slot_Y, begin, end, odds_Y, deviation_Y, expert_key, tokens_P)
                elif dealt_R.shape[0] > 0:
                    _deal(tokens, replicated, x, expert_key, dealing, tokens_P)
                else:
                    _draw_few(tokens, slot_Y, begin, end, share_Y, expert_key, tokens_P)
        peak, total = _sum_ranks(tokens_P, load_R)
        served.peak_TK[t, k] = peak
        served.tokens_TK[t, k] = total
        if served.loads_TKR.shape[0] > 0:
            set_row(served.loads_TKR[t, k], load_R)
        if total > 0:
            _add_jumps(load_R, total, busy == 0, share_R, jump_R)
            busy += 1
            if curve_4.shape[0]:
                served.us_TK[t, k] = _slowest_us(tokens_P, ranks, curve_4)
    served.variance_K[k] = jump_R.sum() / (2.0 * max(busy - 1, 1))


@part
def _sum_ranks(tokens_P: Float64, load_R: Float64) -> tuple[float, float]:
    """Write each rank's tokens into ``load_R``, and return the maximum and the total over the ranks."""
    slots = tokens_P.shape[0] // load_R.shape[0]
    peak = 0.0
    total = 0.0
    for r in range(load_R.shape[0]):
        load = 0.0
        for p in range(r * slots, (r + 1) * slots):
            load += tokens_P[p]
        load_R[r] = load
        peak = max(peak, load)
        total += load
    return peak, total


@part
def _add_jumps(load_R: Float64, total: float, is_first: bool, share_R: Float64, jump_R: Float64) -> None:
    """Add the squared changes of the ranks' shares to ``jump_R``, and write the new shares into ``share_R``."""
    for r in range(load_R.shape[0]):
        share = load_R[r] / total
        jump = 0.0 if is_first else share - share_R[r]
        jump_R[r] += jump * jump
        share_R[r] = share


@part
def _slowest_us(tokens_P: Float64, ranks: int, curve_4: Float64) -> float:
    """Return the time of the slowest rank in microseconds, according to a cost curve."""
    slots = tokens_P.shape[0] // ranks
    slowest = 0.0
    for r in range(ranks):
        us = 0.0
        for p in range(r * slots, (r + 1) * slots):
            if tokens_P[p] > 0:
                us += max(curve_4[1], curve_4[2] + curve_4[3] * tokens_P[p])
        slowest = max(slowest, us)
    slowest_us: float = curve_4[0] + slowest
    return slowest_us


@kernel
def thinned(heat_TLE: Float64 | Int64 | Int32, seed: int) -> Float64:
    """Keep each token with probability 1/2 and return the kept tokens, float64 ``[T, L, E]``.

    Kept and dropped tokens are two samples of the same heat. They are independent if the heat is Poisson-distributed.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    seed
        Seed for the draws.
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


class _ReplicatedExperts(NamedTuple):
    """A layer's experts that have several slots, and the probability that each of their slots receives a token."""

    expert_X: Int64
    """int64 ``[X]``, the experts."""
    first_X: Int64
    """int64 ``[X + 1]``, start of each expert's slots in the other arrays."""
    slot_Y: Int64
    """int64 ``[Y]``, slots ordered by expert."""
    share_Y: Float64
    """float64 ``[Y]``, expected fraction of its expert's tokens that each slot receives."""
    odds_Y: Float64
    """float64 ``[Y]``, each slot's share of the tokens left over by the expert's preceding slots."""
    deviation_Y: Float64
    """float64 ``[Y]``, standard deviation when one token is drawn with probability ``odds_Y``, scaled for dealing."""


class _Dealing(NamedTuple):
    """Dealing tables of a layer. If the host does not deal, they have no sources."""

    table_RED: Int32
    """int32 ``[R, E, D]``, slots that each source uses in turn for its tokens of each expert."""
    source_RE: Float64
    """float64 ``[R, E]``, each source's share of an expert's tokens."""
    dealt_R: Int64
    """int64 ``[R]``, scratch memory."""


@kernel
def _replicated_experts(expert_P: Int32, share_P: Float64, spread_E: Float64) -> _ReplicatedExperts:
    """List the experts with several slots.

    Parameters
    ----------
    expert_P
        int32 ``[P]``, expert in each slot.
    share_P
        float64 ``[P]``, expected fraction of its expert's tokens that each slot receives.
    spread_E
        float64 ``[E]``, variance of token counts when many tokens are dealt, relative to the multinomial variance.
    """
    experts = spread_E.shape[0]
    count_E = np.zeros(experts, dtype=np.int64)
    for p in range(expert_P.shape[0]):
        count_E[expert_P[p]] += 1
    several = 0
    index_E = np.full(experts, -1)
    for e in range(experts):
        if count_E[e] > 1:
            index_E[e] = several
            several += 1
    expert_X = np.empty(several, dtype=np.int64)
    first_X = np.zeros(several + 1, dtype=np.int64)
    for e in range(experts):
        if index_E[e] >= 0:
            expert_X[index_E[e]] = e
            first_X[index_E[e] + 1] = count_E[e]
    for x in range(several):
        first_X[x + 1] += first_X[x]
    next_X = first_X.copy()
    slot_Y = np.empty(first_X[several], dtype=np.int64)
    share_Y = np.empty(slot_Y.shape[0])
    for p in range(expert_P.shape[0]):
        x = index_E[expert_P[p]]
        if x >= 0:
            slot_Y[next_X[x]] = p
            share_Y[next_X[x]] = share_P[p]
            next_X[x] += 1
    odds_Y = np.ones(slot_Y.shape[0])
    deviation_Y = np.zeros(slot_Y.shape[0])
    for x in range(several):
        remaining = 1.0
        for j in range(first_X[x], first_X[x + 1]):
            # Because of rounding, the last share can slightly exceed the remaining sum.
            odds = min(share_Y[j] / remaining, 1.0) if remaining > 0 else 0.0
            odds_Y[j] = odds
            deviation_Y[j] = np.sqrt(odds * (1.0 - odds) * spread_E[expert_X[x]])
            remaining -= share_Y[j]
    return _ReplicatedExperts(expert_X, first_X, slot_Y, share_Y, odds_Y, deviation_Y)


@part
def _key_of(heat_E: Float64 | Int64 | Int32, step: int) -> UInt64:
    """Hash a layer's heat in a step, together with the step number so that steps with equal heat get different keys."""
    bits = np.uint64(step) * np.uint64(0xD1342543DE82EF95)
    weight = np.uint64(0x9E3779B97F4A7C15)
    for e in range(heat_E.shape[0]):
        bits += np.uint64(np.int64(heat_E[e])) * weight
        weight += np.uint64(0x3C6EF372FE94F82A)
    return _mixed(bits)


@part
def _mixed(bits: int) -> UInt64:
    """Apply the SplitMix64 finalizer, which makes every bit of the result depend on every bit of the argument."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = bits ^ (bits >> np.uint64(31))
    return mixed


@part
def _spread_rest(
    tokens: float, slot_Y: Int64, begin: int, end: int, share_Y: Float64, tokens_P: Float64
) -> int:
    """Split the fractional part of an expert's tokens according to the slots' shares, and return the whole part."""
    whole = int(tokens)
    rest = tokens - whole
    for j in range(begin, end):
        tokens_P[slot_Y[j]] = rest * share_Y[j]
    return whole


@part
def _next_draw(bits: UInt64, key: UInt64, i: int) -> tuple[UInt64, float]:
    """Return the remaining random bits and the draw with index ``i``, a number between 0 and ``_UNIFORM``.

    Four draws share 64 bits.
    """
    if i & 3 == 0:
        bits = _mixed(key + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))
    return bits >> np.uint64(16), np.int64(bits & np.uint64(0xFFFF)) + 0.5


@part
def _draw_few(
    tokens: float, slot_Y: Int64, begin: int, end: int, share_Y: Float64, key: UInt64, tokens_P: Float64
) -> None:
    """Draw a slot for each token, and count the tokens of each slot in ``tokens_P``."""
    whole = _spread_rest(tokens, slot_Y, begin, end, share_Y, tokens_P)
    last = end - 1
    bits = np.uint64(0)
    for i in range(whole):
        bits, drawn = _next_draw(bits, key, i)
        j = begin
        limit = share_Y[begin] * _UNIFORM
        while drawn > limit and j < last:
            j += 1
            limit += share_Y[j] * _UNIFORM
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
    """Draw each slot's number of tokens, slot by slot, and write it into ``tokens_P``.

    Given the draws for the preceding slots, a slot's number of tokens follows a binomial distribution over the
    remaining tokens. It is drawn from the normal approximation and rounded. The last slot receives the rest.
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
def _deal(
    tokens: float,
    replicated: _ReplicatedExperts,
    x: int,
    key: UInt64,
    dealing: _Dealing,
    tokens_P: Float64,
) -> None:
    """Draw a source for each token, deal the token according to that source's table, and count it in ``tokens_P``.

    Parameters
    ----------
    tokens
        Tokens of the expert.
    replicated
        The layer's replicated experts.
    x
        Index of the expert in ``replicated``.
    key
        Hash of the step and the expert.
    dealing
        Dealing tables.
    tokens_P
        float64 ``[P]``, tokens of each slot, changed in place.
    """
    expert_X, first_X, slot_Y, share_Y, _, _ = replicated
    whole = _spread_rest(tokens, slot_Y, first_X[x], first_X[x + 1], share_Y, tokens_P)
    table_RED, source_RE, dealt_R = dealing
    expert = expert_X[x]
    sources = dealt_R.shape[0]
    width = table_RED.shape[2]
    for r in range(sources):
        dealt_R[r] = 0
    bits = np.uint64(0)
    for i in range(whole):
        bits, drawn = _next_draw(bits, key, i)
        r = 0
        limit = source_RE[0, expert] * _UNIFORM
        while drawn > limit and r < sources - 1:
            r += 1
            limit += source_RE[r, expert] * _UNIFORM
        tokens_P[table_RED[r, expert, dealt_R[r] % width]] += 1.0
        dealt_R[r] += 1
