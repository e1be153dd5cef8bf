"""How CPU time grows with layers, experts and ranks, for ours and the peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import Shape, shape_name
from eplb_service.bench.contest import OURS, Contest

LONGEST_SECONDS = 8.0
"""A policy whose decision took longer is not asked about anything larger."""


def _shape(layers: int = 16, experts: int = 256, ranks: int = 32) -> Shape:
    """One slot per rank beyond what the experts need."""
    return layers, experts, ranks, -(-experts // ranks) + 1


CURVES: Mapping[str, Mapping[int, Shape]] = {
    "layers": {count: _shape(layers=count) for count in (4, 8, 16, 32, 64, 128)},
    "experts": {count: _shape(experts=count) for count in (64, 128, 256, 512, 1024)},
    "ranks": {count: _shape(ranks=count) for count in (8, 16, 32, 64, 128, 256)},
}
"""What grows, and the shape at each size; the others stay at 16 layers, 256 experts and 32 ranks."""


def scaling(
    contest: Contest, repeats: int, seed: int, curves: Mapping[str, Mapping[int, Shape]] = CURVES
) -> Iterator[dict[str, Any]]:
    """A row for each point and policy: the fastest of ``repeats``, every placement made from scratch."""
    for grows, shapes in curves.items():
        taking_part = [OURS, *contest.peers]
        for size, shape in shapes.items():
            scene, _ = generated_scene("phased", shape, 1, seed)
            contest.warm_up(taking_part, scene)
            for name in list(taking_part):
                found = [contest.decide_from_scratch(name, scene) for _ in range(repeats)]
                seconds = [decision.cpu_seconds for decision in found if decision is not None]
                if not seconds or min(seconds) > LONGEST_SECONDS:
                    taking_part.remove(name)
                if seconds:
                    yield {
                        "grows": grows,
                        "size": size,
                        "shape": shape_name(shape),
                        "policy": name,
                        "cpu_seconds": min(seconds),
                    }


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Exponent of the power law that fits best: 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
