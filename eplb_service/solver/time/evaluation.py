"""What placements and tables take under a cost curve: the slowest rank's time, averaged over a window's steps.

``t_rank = floor + sum over slots with n > 0 tokens of max(read, launch + slope * n)``. Unlike tokens, time is not
shared out: a replica that gets tokens adds the reading of its weights, one that gets none costs nothing. And it is no
function of sums: steps are judged one by one, never several summed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Float32, Float64, Int32


class Curve(NamedTuple):
    """Numbers of a cost curve, microseconds."""

    floor: float
    read: float
    launch: float
    slope: float


class Steps(NamedTuple):
    """Some steps of one layer's heat, and what each of them counts."""

    tokens_EN: Float32
    """float32 ``[E, N]``, tokens of each expert in each step."""
    weight_N: Float32
    """float32 ``[N]``, summing to 1 where any step has tokens; 0 for steps without any."""


def steps_of(heat_NE: Float64) -> Steps:
    """Steps ``[N, E]``, all that have tokens of the same weight."""
    busy_N = heat_NE.sum(axis=1) > 0
    weight_N = (busy_N / max(1, np.count_nonzero(busy_N))).astype(np.float32)
    return Steps(np.ascontiguousarray(heat_NE.T, dtype=np.float32), weight_N)


@part
def slot_us(tokens: float, read: float, launch: float, slope: float) -> float:
    """Microseconds of one slot with so many tokens."""
    us: float = np.float32(0.0)
    if tokens > 0:
        us = max(read, launch + slope * tokens)
    return us


@kernel
def rank_us(steps: Steps, phy2log_RS: Int32, share_RS: Float32, curve: Curve) -> Float32:
    """Microseconds of each rank in each step, float32 ``[R, N]``, the floor left out.

    ``share_RS`` float32 ``[R, S]`` is the part of its expert's tokens that each slot receives.
    """
    ranks, slots = phy2log_RS.shape
    read, launch, slope = np.float32(curve.read), np.float32(curve.launch), np.float32(curve.slope)
    us_RN = np.zeros((ranks, steps.weight_N.shape[0]), dtype=np.float32)
    for r in range(ranks):
        for s in range(slots):
            share = share_RS[r, s]
            if share > 0:
                tokens_N = steps.tokens_EN[phy2log_RS[r, s]]
                for n in range(tokens_N.shape[0]):
                    us_RN[r, n] += slot_us(share * tokens_N[n], read, launch, slope)
    return us_RN


@kernel
def mean_slowest(steps: Steps, phy2log_RS: Int32, share_RS: Float32, curve: Curve) -> float:
    """Microseconds of the slowest rank, mean over the steps by their weights, the floor included."""
    us_RN = rank_us(steps, phy2log_RS, share_RS, curve)
    total = 0.0
    for n in range(us_RN.shape[1]):
        slowest = us_RN[0, n]
        for r in range(1, us_RN.shape[0]):
            slowest = max(slowest, us_RN[r, n])
        total += steps.weight_N[n] * slowest
    mean: float = curve.floor + total
    return mean


@kernel
def split_us(steps: Steps, replicas_E: Int32, curve: Curve) -> Float32:
    """Microseconds of all replicas of each expert together, its tokens split evenly, float32 ``[E, N]``."""
    read, launch, slope = np.float32(curve.read), np.float32(curve.launch), np.float32(curve.slope)
    us_EN = np.empty_like(steps.tokens_EN)
    for e in range(us_EN.shape[0]):
        count = np.float32(replicas_E[e])
        for n in range(us_EN.shape[1]):
            us_EN[e, n] = count * slot_us(steps.tokens_EN[e, n] / count, read, launch, slope)
    return us_EN


def even_us(steps: Steps, curve: Curve, ranks: int) -> float:
    """Microseconds of ranks that are perfectly even without any replica, floor included; the scale of ratios."""
    experts = steps.tokens_EN.shape[0]
    us_EN = split_us(steps, np.ones(experts, dtype=np.int32), curve)
    return curve.floor + float((us_EN.sum(axis=0) * steps.weight_N).sum()) / ranks


@kernel
def slowest_in_steps(heat_NLE: Float64, phy2log_LRS: Int32, share_LP: Float64, curve: Curve) -> Float64:
    """Microseconds of each layer's slowest rank in each step, float64 ``[N, L]``; NaN where a layer has no tokens.

    ``share_LP`` float64 ``[L, R*S]`` is the part of its expert's tokens that each slot receives.
    """
    layers, ranks, slots = phy2log_LRS.shape
    us_NL = np.full((heat_NLE.shape[0], layers), np.nan)
    for n in range(heat_NLE.shape[0]):
        for layer in range(layers):
            heat_E = heat_NLE[n, layer]
            slowest = 0.0
            for r in range(ranks):
                us = 0.0
                for s in range(slots):
                    tokens = heat_E[phy2log_LRS[layer, r, s]] * share_LP[layer, r * slots + s]
                    if tokens > 0:
                        us += max(curve.read, curve.launch + curve.slope * tokens)
                slowest = max(slowest, us)
            if slowest > 0:
                us_NL[n, layer] = curve.floor + slowest
    return us_NL
