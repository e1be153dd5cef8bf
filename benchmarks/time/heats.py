"""Heat for the cells: synthetic, or drawn from recorded routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.io.synthetic import KINDS, synthetic_heat

Int32 = npt.NDArray[np.int32]

EXPERTS = 256
"""Experts per layer of synthetic heat, as in DeepSeek-V3."""
TOP_K = 8
"""Experts chosen per token of synthetic heat, as in DeepSeek-V3."""
STEPS = 384
"""Default number of steps: three windows. The first is planned on, and the second is measured."""


@dataclass(frozen=True)
class CellHeat:
    """Heat of one batch size.

    Parameters
    ----------
    name
        Kind of synthetic heat, or folder of the recorded routing.
    tokens
        Tokens per step.
    heat_TLE
        int32 ``[T, L, E]``, tokens per step and expert.
    seed
        Seed of the random draws.
    """

    name: str
    tokens: int
    heat_TLE: Int32
    seed: int = 0


def recorded(path: Path, tokens: int, layers: int, seed: int, steps: int = STEPS) -> CellHeat:
    """Draw heat from recorded routing. The routes are real, but the tokens of a step are drawn at random.

    Parameters
    ----------
    path
        An ``.npz`` with ``routes`` ``[K, L, C]`` and ``num_experts``.
    tokens
        Tokens per step.
    layers
        Number of layers, counted from the first.
    seed
        Seed of the random draws.
    steps
        Number of steps.
    """
    with np.load(path) as arrays:
        routes_KLC = arrays["routes"][:, :layers]
        experts = int(arrays["num_experts"])
    rng = np.random.default_rng(seed)
    heat_TLE = np.zeros((steps, routes_KLC.shape[1], experts), dtype=np.int32)
    for step in range(steps):
        chosen_KLC = routes_KLC[rng.integers(0, len(routes_KLC), tokens)]
        for layer in range(heat_TLE.shape[1]):
            heat_TLE[step, layer] = np.bincount(chosen_KLC[:, layer].ravel(), minlength=experts)
    return CellHeat(path.parent.name, tokens, heat_TLE, seed)


def heats(
    paths: Sequence[Path], tokens: Sequence[int], layers: int, seeds: Sequence[int], steps: int = STEPS
) -> Iterator[CellHeat]:
    """Yield all heats, by seed and then by batch size."""
    for seed, batch in product(seeds, tokens):
        for kind in KINDS:
            yield CellHeat(
                kind, batch, synthetic_heat(kind, steps, layers, EXPERTS, batch, TOP_K, seed), seed
            )
        for path in paths:
            yield recorded(path, batch, layers, seed, steps)
