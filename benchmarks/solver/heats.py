"""Generated heat of four kinds that imitate recorded heat: static, drift, phased and bursty.

Each step draws its choices from a multinomial distribution over the experts. No expert's share exceeds
``1 / choices``. The initial popularity follows Zipf's law in odd layers (exponent 0.5 to 0.9) and a lognormal
distribution in even layers (standard deviation 0.6 to 1.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.contest import first_scene
from eplb_lab.bench.decision import Float64, Scene
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import read_heat

Shape = tuple[int, int, int, int]
"""Layers, experts, ranks, slots per rank."""
KINDS = ("static", "drift", "phased", "bursty")
JITTER = 0.1
"""Standard deviation of the step-to-step noise in an expert's log-popularity. Not used for drift."""
WINDOW = 256
"""Steps per window."""
SHAPES: tuple[Shape, ...] = (
    (58, 256, 16, 17),
    (58, 256, 32, 9),
    (58, 256, 64, 5),
    (94, 128, 16, 9),
    (60, 384, 64, 7),
    (48, 128, 8, 17),
)
"""Three deployments of DeepSeek-V3, one of Qwen3-235B, one of Kimi-K2, and a small one."""


def shape_name(shape: Shape) -> str:
    """Return the shape in the notation of tables and options.

    Examples
    --------
    >>> shape_name((58, 256, 32, 9))
    '58x256x32x9'
    """
    return "x".join(map(str, shape))


@lru_cache(maxsize=1)
def generate(
    kind: str,
    layers: int,
    experts: int,
    steps: int,
    seed: int = 0,
    tokens: int = 4096,
    choices: int = 8,
    jitter: float = JITTER,
) -> npt.NDArray[np.int32]:
    """Generate heat of one kind, int32 ``[steps, layers, experts]``, read-only.

    The last result is cached because generating it takes about a second.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    layers
        Number of layers.
    experts
        Experts per layer.
    steps
        Number of steps.
    seed
        Seed for the random draws.
    tokens
        Tokens per step.
    choices
        Experts chosen per token.
    jitter
        Standard deviation of the noise in log-popularity; see ``JITTER``.
    """
    heat_TLE = np.empty((steps, layers, experts), dtype=np.int32)
    for layer in range(layers):
        generator = np.random.default_rng([seed, layer, KINDS.index(kind)])
        log_TE = _log_popularity(kind, layer, experts, steps, generator, jitter)
        share_TE = np.exp(log_TE - log_TE.max(axis=1, keepdims=True))
        share_TE /= share_TE.sum(axis=1, keepdims=True)
        for _ in range(8):
            share_TE = np.minimum(share_TE, 1.0 / choices)
            share_TE /= share_TE.sum(axis=1, keepdims=True)
        heat_TLE[:, layer] = generator.multinomial(tokens * choices, share_TE)
    heat_TLE.setflags(write=False)
    return heat_TLE


def source_mix(layers: int, experts: int, ranks: int, spread: float, seed: int = 0) -> Float64:
    """Draw each expert's split over the source ranks, which does not change over time.

    Parameters
    ----------
    layers
        Number of layers.
    experts
        Experts per layer.
    ranks
        Number of source ranks.
    spread
        Standard deviation of the logarithm of a source's weight; 0 for an even split.
    seed
        Seed for the random draws.

    Returns
    -------
    Float64
        float64 ``[ranks, layers, experts]``, which sums to 1 over the ranks.
    """
    generator = np.random.default_rng([seed, ranks])
    mix_RLE: Float64 = np.exp(generator.normal(0, spread, (ranks, layers, experts)))
    mix_RLE /= mix_RLE.sum(axis=0)
    return mix_RLE


def _log_popularity(
    kind: str, layer: int, experts: int, steps: int, generator: np.random.Generator, jitter: float
) -> Float64:
    """Return the unnormalised log-popularity of each expert in each step, float64 ``[steps, experts]``."""
    base_E = _start(layer, experts, generator)
    jitter_TE: Float64 = generator.normal(0, jitter, (steps, experts))
    if kind == "drift":
        return _walk(base_E, steps, generator)
    if kind == "phased":
        jitter_TE += _alternation(base_E, steps)
    else:
        jitter_TE += base_E
    if kind == "bursty":
        jitter_TE += _bursts(experts, steps, generator)
    return jitter_TE


def _walk(base_E: Float64, steps: int, generator: np.random.Generator) -> Float64:
    """Return ``base_E`` plus an independent random walk per expert, with a weak pull back to the start."""
    walk_TE = np.empty((steps, base_E.size))
    offset_E = np.zeros(base_E.size)
    for step in range(steps):
        offset_E = 0.999 * offset_E + generator.normal(0, 0.04, base_E.size)
        walk_TE[step] = base_E + offset_E
    return walk_TE


def _alternation(base_E: Float64, steps: int) -> Float64:
    """Mix two domains with opposite popularity, alternating between 9:1 and 1:9 every 50 steps."""
    first_T1 = np.where((np.arange(steps) // 50) % 2 == 0, 0.9, 0.1)[:, None]
    direct_E = np.exp(base_E)
    reverse_E = np.exp(base_E.max() + base_E.min() - base_E)
    mixed_TE: Float64 = first_T1 * (direct_E / direct_E.sum()) + (1 - first_T1) * (
        reverse_E / reverse_E.sum()
    )
    return np.log(mixed_TE)


def _bursts(experts: int, steps: int, generator: np.random.Generator) -> Float64:
    """Switch groups of 8 experts on for about 10 steps and off for about 50."""
    groups_E = generator.permutation(experts) // 8
    on_TG = np.zeros((steps, groups_E.max() + 1))
    state_G = generator.random(on_TG.shape[1]) < 10 / 60
    for step in range(steps):
        leave_G = generator.random(on_TG.shape[1])
        state_G = np.where(state_G, leave_G > 1 / 10, leave_G < 1 / 50)
        on_TG[step] = state_G
    return 1.3 * on_TG[:, groups_E]


def _start(layer: int, experts: int, generator: np.random.Generator) -> Float64:
    if layer % 2:
        ranks_E = generator.permutation(experts) + 1
        return -generator.uniform(0.5, 0.9) * np.log(ranks_E)
    return generator.normal(0, generator.uniform(0.6, 1.2), experts)


def generated_scene(kind: str, shape: Shape, windows: int, seed: int) -> tuple[Scene, np.ndarray]:
    """Return the first window of generated heat as a scene, and the heat of all ``windows`` windows, ``[T, L, E]``."""
    layers, experts, ranks, slots = shape
    heat_TLE = generate(kind, layers, experts, windows * WINDOW, seed)
    return first_scene(heat_TLE[:WINDOW], ranks, slots), heat_TLE


def generated_scenarios(
    kinds: Sequence[str], shape: Shape, windows: int, seed: int, spread: float = 0.0
) -> list[Scenario]:
    """Return one scenario per kind. ``spread`` has the same meaning as in ``source_mix``."""
    layers, experts, ranks, slots = shape
    mix_RLE = source_mix(layers, experts, ranks, spread, seed) if spread else None
    return [
        Scenario(kind, generate(kind, layers, experts, windows * WINDOW, seed), ranks, slots, WINDOW, mix_RLE)
        for kind in kinds
    ]


def recorded_scenario(path: Path, ranks: int, slots: int | None, window: int) -> Scenario:
    """Read a trace of any supported format as a scenario. Raises ``HeatError`` if the trace cannot be read.

    Token routes are decoded 64 requests at a time.

    Parameters
    ----------
    path
        Trace to read.
    ranks
        Number of ranks.
    slots
        Slots per rank; ``None`` for one slot more than the experts need.
    window
        Steps per window. It is reduced if the trace has fewer than three such windows.
    """
    heat_TLE = read_heat(path, ReadAs(batch=64))
    needed = -(-heat_TLE.shape[2] // ranks)
    window = min(window, heat_TLE.shape[0] // 3)
    name = f"{path.parent.name}/{path.stem}"
    return Scenario(name, np.ascontiguousarray(heat_TLE), ranks, slots or needed + 1, window)
