"""What the first plan of a process costs beside its second, once the package's kernels are in the cache on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import SHAPES, shape_name
from eplb_service.bench.contest import OURS, Contest


def first_plans(contest: Contest, processes: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each of so many fresh processes, with the wall seconds of its first two plans."""
    scene, _ = generated_scene("static", SHAPES[1], 1, seed)
    contest.decide_from_scratch(OURS, scene)
    for _ in range(processes):
        contest.restart(OURS)
        first = contest.decide_from_scratch(OURS, scene)
        second = contest.decide_from_scratch(OURS, scene)
        if first is not None and second is not None:
            yield {
                "shape": shape_name(SHAPES[1]),
                "first_seconds": first.wall_seconds,
                "second_seconds": second.wall_seconds,
            }
