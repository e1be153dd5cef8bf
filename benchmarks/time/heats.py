"""Heat for the cells: made up, or drawn from recorded routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.io.synthetic import KINDS, synthetic_heat

Int32 = npt.NDArray[np.int32]

EXPERTS, TOP_K = 256, 8
"""Of made-up heat: DeepSeek-V3's."""
STEPS = 384
"""Steps of each heat by default: a window to plan on, the next one, and one more."""


@dataclass(frozen=True)
class CellHeat:
    """Heat of one batch size.

    Parameters
    ----------
    name
        The kind of made-up heat, or the folder of recorded routing.
    tokens
        Tokens of a step.
    heat_TLE
        int32 ``[T, L, E]``.
    seed
        That it was drawn with.
    """

    name: str
    tokens: int
    heat_TLE: Int32
    seed: int = 0


def recorded(path: Path, tokens: int, layers: int, seed: int, steps: int = STEPS) -> CellHeat:
    """Steps of so many recorded tokens each, drawn at random from the whole recording, of its first layers.

    Routing is real, batching is not. ``path`` is an ``.npz`` with ``routes`` ``[K, L, C]`` and ``num_experts``.
    """
    with np.load(path) as arrays:
        routes_KLC, experts = arrays["routes"][:, :layers], int(arrays["num_experts"])
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
    """All heats, seed by seed and batch size by batch size."""
    for seed, batch in product(seeds, tokens):
        for kind in KINDS:
            yield CellHeat(
                kind, batch, synthetic_heat(kind, steps, layers, EXPERTS, batch, TOP_K, seed), seed
            )
        for path in paths:
            yield recorded(path, batch, layers, seed, steps)
