"""Synthetic heat of four kinds, for demos, tests and benchmarks without a recording.

Each step draws ``tokens * top_k`` expert choices from popularities that change over time. As with a real router, no
expert's share exceeds ``1 / top_k``, and a token never chooses an expert twice.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from eplb_core.heat.window import HeatError
from eplb_core.placement import Float64, Int32

Kind = Literal["static", "drift", "phased", "bursty"]
"""Pattern of popularity changes over time.

``static`` popularity only jitters, ``drift`` follows a random walk, ``phased`` alternates between two domains, and
``bursty`` jumps in groups of experts.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

# These values are not fitted to any router. They make each kind difficult for a balancer in a different way.
_JITTER_LOG_SD = 0.1
"""Standard deviation of the step-to-step jitter of a static log-popularity."""
_DRIFT_LOG_SD = 0.04
"""Standard deviation of each step of a drifting log-popularity."""
_DRIFT_PULL = 0.999
"""Fraction of a drifting log-popularity's deviation that carries over to the next step.

It keeps the standard deviation of the walk below 1, however long the trace is.
"""
_PHASE_STEPS = 50
"""Mean length of a phase, in steps. Phases are up to a fifth longer or shorter."""
_PHASE_SHARE = 0.9
"""Fraction of a phase's tokens that come from its own domain."""
_BURST_GROUP = 8
"""Number of experts that burst together."""
_BURST_LOG_GAIN = 1.3
"""Increase in log-popularity during a burst, which multiplies the tokens by 3.7."""
_BURST_STEPS_ON = 10
"""Mean length of a burst, in steps."""
_BURST_STEPS_OFF = 50
"""Mean number of steps between two bursts of a group."""


def synthetic_heat(
    kind: Kind, steps: int, layers: int, experts: int, tokens: int = 4096, top_k: int = 8, seed: int = 0
) -> Int32:
    """Return the heat of a synthetic workload, int32 ``[T, L, E]``. The same arguments give the same heat.

    Each step and layer sums to ``tokens * top_k``, and no count exceeds ``tokens``.

    Parameters
    ----------
    kind
        Pattern of popularity changes, one of ``KINDS``.
    steps
        Number of steps T.
    layers
        Number of layers L.
    experts
        Number of experts E.
    tokens
        Tokens per step.
    top_k
        Distinct experts that each token chooses.
    seed
        Seed of the random numbers.

    Raises
    ------
    HeatError
        If the kind is unknown, or these sizes are impossible for a router.

    Examples
    --------
    >>> heat_TLE = synthetic_heat("static", steps=2, layers=1, experts=4, tokens=8, top_k=2)
    >>> heat_TLE[:, 0]
    array([[0, 8, 7, 1],
           [5, 6, 4, 1]], dtype=int32)
    >>> heat_TLE.sum(axis=2).tolist()
    [[16], [16]]
    """
    if kind not in KINDS:
        raise HeatError(f"unknown kind of heat {kind!r}; choose one of {', '.join(KINDS)}")
    if min(steps, layers, tokens, top_k) < 1 or top_k > experts:
        raise HeatError(
            f"heat needs at least one step, layer and token, and 1..{experts} choices per token; "
            f"got {steps} steps, {layers} layers, {tokens} tokens and {top_k} choices"
        )
    rng = np.random.default_rng(seed)
    log_LE = np.log([_base_popularity(layer, experts, rng) for layer in range(layers)])
    log_TLE = _MOVEMENTS[kind](log_LE, steps, rng)
    popularity_TLE = np.exp(log_TLE - log_TLE.max(axis=-1, keepdims=True))
    capped_NE = _cap_shares(popularity_TLE.reshape(-1, experts), 1 / top_k)
    return _draw_choices(capped_NE, tokens, top_k, rng).reshape(steps, layers, experts)


def _base_popularity(layer: int, experts: int, rng: np.random.Generator) -> Float64:
    """Return initial popularities, float64 ``[E]``: Zipf-distributed in odd layers, lognormal in even layers."""
    if layer % 2:
        return rng.permutation(np.arange(1, experts + 1) ** -rng.uniform(0.5, 0.9))
    return np.exp(rng.uniform(0.6, 1.2) * rng.standard_normal(experts))


def _static(log_LE: Float64, steps: int, rng: np.random.Generator) -> Float64:
    """Return log-popularities that jitter independently in each step."""
    return log_LE + _JITTER_LOG_SD * rng.standard_normal((steps, *log_LE.shape))


def _drift(log_LE: Float64, steps: int, rng: np.random.Generator) -> Float64:
    """Return log-popularities that follow a mean-reverting random walk around their initial values."""
    walk_TLE = _DRIFT_LOG_SD * rng.standard_normal((steps, *log_LE.shape))
    for step in range(1, steps):
        walk_TLE[step] += _DRIFT_PULL * walk_TLE[step - 1]
    return log_LE + walk_TLE


def _phased(log_LE: Float64, steps: int, rng: np.random.Generator) -> Float64:
    """Return the log-popularities of two domains, mixed alternately 9:1 and 1:9 for about 50 steps each.

    The two domains rank the experts in opposite order: the hottest expert of one is the coldest of the other.
    """
    coldness_LE = np.argsort(np.argsort(-log_LE, axis=1), axis=1)
    reversed_LE = np.take_along_axis(np.sort(log_LE, axis=1), coldness_LE, axis=1)
    shortest = _PHASE_STEPS * 4 // 5
    longest = _PHASE_STEPS * 6 // 5
    lengths = rng.integers(shortest, longest + 1, size=steps // shortest + 1)
    phase_T = np.repeat(np.arange(lengths.size), lengths)[:steps] % 2
    share_T11 = np.where(phase_T == 0, _PHASE_SHARE, 1 - _PHASE_SHARE)[:, None, None]
    return np.asarray(np.log(share_T11 * np.exp(log_LE) + (1 - share_T11) * np.exp(reversed_LE)))


def _bursty(log_LE: Float64, steps: int, rng: np.random.Generator) -> Float64:
    """Return log-popularities with bursts: groups of 8 experts are hot for about 10 steps, then normal for about 50.

    Each layer draws its own groups.
    """
    layers, experts = log_LE.shape
    group_LE = np.stack([rng.permutation(experts) // _BURST_GROUP for _ in range(layers)])
    groups = -(-experts // _BURST_GROUP)
    on_TLG = np.empty((steps, layers, groups), dtype=bool)
    on_LG = rng.random((layers, groups)) < _BURST_STEPS_ON / (_BURST_STEPS_ON + _BURST_STEPS_OFF)
    for step in range(steps):
        on_TLG[step] = on_LG
        switch_LG = np.where(on_LG, 1 / _BURST_STEPS_ON, 1 / _BURST_STEPS_OFF)
        on_LG = on_LG ^ (rng.random((layers, groups)) < switch_LG)
    on_TLE = np.take_along_axis(on_TLG, np.broadcast_to(group_LE, (steps, layers, experts)), axis=2)
    return np.asarray(log_LE + _BURST_LOG_GAIN * on_TLE)


_MOVEMENTS = {"static": _static, "drift": _drift, "phased": _phased, "bursty": _bursty}


def _cap_shares(weights_NE: Float64, cap: float) -> Float64:
    """Return shares ``[N, E]`` proportional to the weights and capped at ``cap``.

    The surplus of capped experts goes to the remaining experts in proportion to their weights.
    """
    experts = weights_NE.shape[1]
    if cap * experts <= 1:
        return np.full_like(weights_NE, 1 / experts)
    capped_NE = np.zeros(weights_NE.shape, dtype=bool)
    while True:
        free_N1 = 1 - cap * capped_NE.sum(axis=1, keepdims=True)
        open_NE = np.where(capped_NE, 0.0, weights_NE)
        shares_NE = np.where(capped_NE, cap, open_NE * free_N1 / open_NE.sum(axis=1, keepdims=True))
        exceeding_NE = ~capped_NE & (shares_NE > cap)
        if not exceeding_NE.any():
            return np.asarray(shares_NE / shares_NE.sum(axis=1, keepdims=True))
        capped_NE |= exceeding_NE


def _draw_choices(shares_NE: Float64, tokens: int, top_k: int, rng: np.random.Generator) -> Int32:
    """Draw multinomial counts, int32 ``[N, E]``, with at most ``tokens`` per expert."""
    counts_NE = rng.multinomial(tokens * top_k, shares_NE)
    for counts_E, shares_E in zip(counts_NE, shares_NE, strict=True):
        while (surplus := int(np.maximum(counts_E - tokens, 0).sum())) > 0:
            np.minimum(counts_E, tokens, out=counts_E)
            open_E = np.where(counts_E < tokens, shares_E, 0.0)
            counts_E += rng.multinomial(surplus, open_E / open_E.sum())
    return counts_NE.astype(np.int32)
