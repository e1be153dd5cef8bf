"""What each component of the solver and the planner is worth: one at a time switched off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.solver.generated import generated_courses, generated_scene
from benchmarks.solver.heat_kinds import KINDS, Shape
from eplb_service.bench.closed_loop import DEFAULT, Course, Entrant, loops
from eplb_service.bench.contest import OURS, Contest, first_scene
from eplb_service.bench.decision import Scene
from eplb_service.bench.scoring import even_par
from eplb_service.replay.policy import ABLATIONS

SMALL: Mapping[str, Shape] = {"small_layers": (8, 32, 8, 5), "two_slots": (2, 256, 256, 2)}
"""Shapes where replica counts are searched together with the placement: by tree, and by annealing."""
SPREAD = 0.3
"""Log-sd of the split over source ranks: tables are worth nothing where all ranks are alike."""


def ablation(
    contest: Contest, shape: Shape, windows: int, seeds: Sequence[int], traces: Sequence[Course]
) -> Iterator[dict[str, Any]]:
    """A row for each seed, kind or trace, and component: placed from scratch, then in the closed loop."""
    for seed in seeds:
        small = {
            kind: {name: generated_scene(kind, shape, 1, seed)[0] for name, shape in SMALL.items()}
            for kind in KINDS
        }
        for course in generated_courses(KINDS, shape, windows, seed, SPREAD):
            yield from _without_each(contest, course, seed, small[course.name])
    for course in traces:
        yield from _without_each(contest, course, None, {})


def _without_each(
    contest: Contest, course: Course, seed: int | None, small: Mapping[str, Scene]
) -> Iterator[dict[str, Any]]:
    taking_part = [DEFAULT, *_without_one()]
    scene = first_scene(course.heat(0), course.ranks, course.slots)
    rows = {row["policy"]: row for row in loops(contest, [course], taking_part)}
    for entrant in taking_part:
        options = dict(entrant.options.get("options", {}))
        made = contest.decide(OURS, scene, afresh=True, options=options)
        if made is not None and entrant.label in rows:
            yield {
                **rows[entrant.label],
                "seed": seed,
                "in_sample": float(even_par(scene.heat_TLE, made.placement_LRS).mean()),
                "next_window": float(even_par(course.heat(1), made.placement_LRS).mean()),
                "cpu_from_scratch": made.cpu_seconds,
                **{name: _even_par_of(contest, small[name], options) for name in small},
            }


def _even_par_of(contest: Contest, scene: Scene, options: Mapping[str, Any]) -> float | None:
    """Ratio on its window of a placement made from scratch for a host that splits evenly; ``None`` where it fails."""
    made = contest.decide(OURS, scene, afresh=True, options={**options, "split": "even"})
    return None if made is None else float(even_par(scene.heat_TLE, made.placement_LRS).mean())


def _without_one() -> Sequence[Entrant]:
    return [
        Entrant(name.removeprefix("flashlb-"), OURS, {"options": dict(options)})
        for name, (options, _) in ABLATIONS.items()
    ]
