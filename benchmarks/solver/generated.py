"""Generated heat as scenes to decide on and as courses to serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.solver.heat_kinds import WINDOW, Shape, generate, source_mix
from eplb_service.bench.closed_loop import Course
from eplb_service.bench.contest import first_scene
from eplb_service.bench.decision import Scene


def generated_scene(kind: str, shape: Shape, windows: int, seed: int) -> tuple[Scene, np.ndarray]:
    """The first window of generated heat as a scene, and all ``windows`` of it ``[T, L, E]``."""
    layers, experts, ranks, slots = shape
    heat_TLE = generate(kind, layers, experts, windows * WINDOW, seed)
    return first_scene(heat_TLE[:WINDOW], ranks, slots), heat_TLE


def generated_courses(
    kinds: Sequence[str], shape: Shape, windows: int, seed: int, spread: float = 0.0
) -> list[Course]:
    """A course of each kind; ``spread`` is the log-sd of the split over source ranks."""
    layers, experts, ranks, slots = shape
    mix_RLE = source_mix(layers, experts, ranks, spread, seed) if spread else None
    return [
        Course(kind, generate(kind, layers, experts, windows * WINDOW, seed), ranks, slots, WINDOW, mix_RLE)
        for kind in kinds
    ]
