"""Heat to replay: as many steps as one likes, written a piece at a time, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eplb_service.io.native.writer import TraceWriter
from eplb_service.io.trace import TraceFacts

LAYERS, EXPERTS = 58, 256
CHOICES = 4096 * 8
"""Tokens of a step times experts that each chooses."""

_PIECE = 64
_SKEW = 0.9
_DRIFT, _PULL = 0.04, 0.97
"""Log-popularity walks once a piece, and is pulled back to where it began."""


def write_heat(path: Path, steps: int, seed: int = 0) -> None:
    """Write a native trace of ``steps`` steps whose popularities drift, each count a Poisson draw."""
    rng = np.random.default_rng(seed)
    base_LE = _SKEW * rng.standard_normal((LAYERS, EXPERTS))
    walk_LE = np.zeros_like(base_LE)
    with TraceWriter(
        path, TraceFacts(origin=f"synthetic, slow drift, seed {seed}"), LAYERS, EXPERTS
    ) as writer:
        for first in range(0, steps, _PIECE):
            walk_LE = _PULL * walk_LE + _DRIFT * np.sqrt(_PIECE) * rng.standard_normal(walk_LE.shape)
            popularity_LE = np.exp(base_LE + walk_LE)
            share_LE = popularity_LE / popularity_LE.sum(axis=1, keepdims=True)
            count = min(_PIECE, steps - first)
            writer.append(rng.poisson(CHOICES * share_LE, (count, LAYERS, EXPERTS)).astype(np.uint32))
