"""Balance of one placement made from scratch, per shape and kind of heat: on its window and on the next.

Whoever makes tables is judged by what they realise, all source ranks alike; who makes none by even shares, which is
more than the engines' fixed rule would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import KINDS, WINDOW, Shape, shape_name
from eplb_service.bench.contest import NONE, OURS, OURS_EVEN, Contest
from eplb_service.bench.decision import Decision, Int32, Scene
from eplb_service.bench.peers.balancers import FLASHLB
from eplb_service.bench.scoring import arrivals, even_par, realised_par


def cells(contest: Contest, shapes: Sequence[Shape], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each seed, kind, shape and policy; peers beside FlashLB see the first seed alone."""
    for shape in shapes:
        warm, _ = generated_scene(KINDS[0], shape, 1, seeds[0])
        contest.warm_up([OURS, *contest.peers], warm)
    for seed in seeds:
        peers = [name for name in contest.peers if name == FLASHLB or seed == seeds[0]]
        for kind in KINDS:
            # Shapes that differ in ranks alone are next to each other and share their heat.
            for shape in shapes:
                for row in _cell(contest, shape, kind, seed, peers):
                    yield {"shape": shape_name(shape), "kind": kind, "seed": seed, **row}


def _cell(
    contest: Contest, shape: Shape, kind: str, seed: int, peers: Sequence[str]
) -> Iterator[dict[str, Any]]:
    scene, heat_TLE = generated_scene(kind, shape, 2, seed)
    for name in [NONE, OURS, OURS_EVEN, *peers]:
        decision = _as_it_is(scene) if name == NONE else contest.decide_from_scratch(name, scene)
        if decision is None:
            continue
        placed_LRS = decision.placement_LRS
        tables_RLE = decision.tables_RLE if name == OURS else None
        yield {
            "policy": name,
            "in_sample": _par(heat_TLE[:WINDOW], placed_LRS, tables_RLE),
            "next_window": _par(heat_TLE[WINDOW:], placed_LRS, tables_RLE),
            "moved": arrivals(scene.placement_LRS, placed_LRS) / placed_LRS.size,
            "cpu_seconds": decision.cpu_seconds,
        }


def _as_it_is(scene: Scene) -> Decision:
    return Decision(scene.placement_LRS, None, None, 0, 0.0, 0.0)


def _par(heat_TLE: np.ndarray, placed_LRS: Int32, tables_RLE: Int32 | None) -> float:
    """Mean over the layers, through tables or else by even shares."""
    if tables_RLE is None:
        return float(even_par(heat_TLE, placed_LRS).mean())
    return float(realised_par(heat_TLE, placed_LRS.shape[2], tables_RLE).mean())
