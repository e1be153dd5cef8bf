"""CPU time of one decision: ours beside the peers' on the same heat, asked in turn, several times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import KINDS, SHAPES, Shape, shape_name
from eplb_service.bench.contest import OURS, OURS_EVEN, Contest

COMPARED: tuple[Shape, ...] = (SHAPES[1], SHAPES[2])
LARGE: Shape = (61, 512, 320, 2)


def cpu_times(contest: Contest, shapes: Sequence[Shape], repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each shape, kind and policy, with the seconds of all repeats; every placement is made from scratch."""
    for shape in shapes:
        names = [OURS, OURS_EVEN] if shape == LARGE else [OURS, OURS_EVEN, *contest.peers]
        for kind in KINDS:
            scene, _ = generated_scene(kind, shape, 1, seed)
            if kind == KINDS[0]:
                contest.warm_up([OURS, *contest.peers], scene)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            # The first round only brings everybody's memory back: one who waits long is paged out.
            for number in range(repeats + 1):
                for name in names:
                    decision = contest.decide_from_scratch(name, scene)
                    if decision is not None and number > 0:
                        seconds[name].append(decision.cpu_seconds)
            for name in names:
                if seconds[name]:
                    yield {
                        "shape": shape_name(shape),
                        "kind": kind,
                        "policy": name,
                        "cpu_seconds": seconds[name],
                    }
