"""Generated heat of four kinds, drawn as recorded heat moves: static, drift, phased and bursty.

Each step draws its tokens' choices from a popularity vector (multinomial, no expert above one in ``choices``). Odd
layers start from a Zipf law (exponent 0.5 to 0.9), even layers from a lognormal (sd 0.6 to 1.2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = ("static", "drift", "phased", "bursty")
SHAPES = (
    (58, 256, 16, 17),
    (58, 256, 32, 9),
    (58, 256, 64, 5),
    (94, 128, 16, 9),
    (60, 384, 64, 7),
    (48, 128, 8, 17),
)
"""Layers, experts, ranks, slots: three of DeepSeek-V3, Qwen3-235B, Kimi-K2, and a small deployment."""


def generate(
    kind: str, layers: int, experts: int, steps: int, seed: int = 0, tokens: int = 4096, choices: int = 8
) -> npt.NDArray[np.int32]:
    """Heat int32 ``[steps, layers, experts]`` of one of ``KINDS``."""
    heat_TLE = np.empty((steps, layers, experts), dtype=np.int32)
    for layer in range(layers):
        generator = np.random.default_rng([seed, layer, KINDS.index(kind)])
        log_TE = _log_popularity(kind, layer, experts, steps, generator)
        share_TE = np.exp(log_TE - log_TE.max(axis=1, keepdims=True))
        share_TE /= share_TE.sum(axis=1, keepdims=True)
        for _ in range(8):
            share_TE = np.minimum(share_TE, 1.0 / choices)
            share_TE /= share_TE.sum(axis=1, keepdims=True)
        heat_TLE[:, layer] = generator.multinomial(tokens * choices, share_TE)
    return heat_TLE


def source_mix(
    layers: int, experts: int, ranks: int, spread: float, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Each expert's split over source ranks, a persistent lognormal mix, float64 ``[ranks, layers, experts]``."""
    mix_RLE = np.exp(np.random.default_rng([seed, ranks]).normal(0, spread, (ranks, layers, experts)))
    return mix_RLE / mix_RLE.sum(axis=0)


def _log_popularity(
    kind: str, layer: int, experts: int, steps: int, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    base_E = _start(layer, experts, generator)
    jitter_TE = generator.normal(0, 0.1, (steps, experts))
    if kind == "static":
        return base_E + jitter_TE
    if kind == "drift":
        walk_TE = np.empty((steps, experts))
        at_E = np.zeros(experts)
        for step in range(steps):
            at_E = 0.999 * at_E + generator.normal(0, 0.04, experts)
            walk_TE[step] = at_E
        return base_E + walk_TE
    if kind == "phased":
        other_E = base_E.max() + base_E.min() - base_E
        first_T = np.where((np.arange(steps) // 50) % 2 == 0, 0.9, 0.1)[:, None]
        domains = [np.exp(log_E) / np.exp(log_E).sum() for log_E in (base_E, other_E)]
        return np.log(first_T * domains[0] + (1 - first_T) * domains[1]) + jitter_TE
    groups = generator.permutation(experts) // 8
    on_TG = np.zeros((steps, groups.max() + 1))
    state_G = generator.random(on_TG.shape[1]) < 10 / 60
    for step in range(steps):
        leave_G = generator.random(on_TG.shape[1])
        state_G = np.where(state_G, leave_G > 1 / 10, leave_G < 1 / 50)
        on_TG[step] = state_G
    return base_E + 1.3 * on_TG[:, groups] + jitter_TE


def _start(layer: int, experts: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    if layer % 2:
        ranks_E = generator.permutation(experts) + 1
        return -generator.uniform(0.5, 0.9) * np.log(ranks_E)
    return generator.normal(0, generator.uniform(0.6, 1.2), experts)
