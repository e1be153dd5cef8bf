"""Two slots per rank, where everything hangs on the number of replicas: a quick answer beside a long search's best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.solver.annealing import anneal
from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import KINDS, Shape, shape_name
from eplb_service.bench.contest import OURS, OURS_EVEN, Contest
from eplb_service.bench.decision import Decision, Scene
from eplb_service.bench.peers.balancers import FLASHLB
from eplb_service.bench.scoring import even_par, summed

EPISODES = 64
SHAPES: tuple[Shape, ...] = ((2, 256, 256, 2), (2, 512, 320, 2))


def few_slots(contest: Contest, long_seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each shape and kind; ratios over the episodes that the solver sees, mean of two layers.

    The long search begins once from our answer and once from FlashLB's, with half of ``long_seconds`` a layer each. It
    balances what the window holds, and so does ours here: without means of what is left between bursts.
    """
    asked = [name for name in (OURS_EVEN, FLASHLB) if name == OURS_EVEN or name in contest.peers]
    for shape in SHAPES:
        for kind in KINDS:
            scene, _ = generated_scene(kind, shape, 1, seed)
            heat_NLE = summed(scene.heat_TLE, EPISODES)
            answers = {}
            for name in asked:
                decision = _decision(contest, name, scene)
                if decision is not None:
                    answers[name] = decision.placement_LRS
            best_L = np.full(shape[0], np.inf)
            for layer in range(shape[0]):
                for placed_LRS in answers.values():
                    spent = long_seconds / len(answers)
                    found_RS = anneal(heat_NLE[:, layer], placed_LRS[layer], spent, seed)
                    best_L[layer] = min(best_L[layer], *even_par(heat_NLE[:, layer, None], found_RS[None]))
            yield {
                "shape": shape_name(shape),
                "kind": kind,
                "long_seconds": long_seconds,
                "best": float(best_L.mean()),
                **{name: float(even_par(heat_NLE, placed).mean()) for name, placed in answers.items()},
            }


def _decision(contest: Contest, name: str, scene: Scene) -> Decision | None:
    if name != OURS_EVEN:
        return contest.decide_from_scratch(name, scene)
    return contest.decide(OURS, scene, afresh=True, options={"split": "even", "trimmed_mean": False})
