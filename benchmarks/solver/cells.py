"""Balance of one placement made from scratch, per shape and kind of heat: on its window and on the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import KINDS, WINDOW, Shape, shape_name
from eplb_service.bench.contest import NONE, OURS, OURS_EVEN, Contest
from eplb_service.bench.peers.balancers import FLASHLB
from eplb_service.bench.scoring import arrivals, even_par


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
    answers = {NONE: (scene.placement_LRS, 0.0)}
    for name in [OURS, OURS_EVEN, *peers]:
        decision = contest.decide_from_scratch(name, scene)
        if decision is not None:
            answers[name] = (decision.placement_LRS, decision.cpu_seconds)
    for name, (placed_LRS, cpu_seconds) in answers.items():
        yield {
            "policy": name,
            "in_sample": float(even_par(heat_TLE[:WINDOW], placed_LRS).mean()),
            "next_window": float(even_par(heat_TLE[WINDOW:], placed_LRS).mean()),
            "moved": arrivals(scene.placement_LRS, placed_LRS) / placed_LRS.size,
            "cpu_seconds": cpu_seconds,
        }
