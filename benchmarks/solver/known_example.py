"""Eight experts on 8 ranks x 2 slots, where the optimum is known: what each policy's hottest rank carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_service.bench.contest import OURS, Contest, first_scene
from eplb_service.bench.decision import Scene
from eplb_service.bench.scoring import even_par, realised_par, rule_tables
from eplb_service.placement import Placement
from eplb_service.planner.search_params import search_params_of
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.engine import solve_many

HEAT = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.int32)
RANKS, SLOTS = 8, 2
MEAN = HEAT.sum() / RANKS
BEST_EVEN, BEST_8_SOURCES, BEST_16_SOURCES = 196.67, 200.0, 185.0
"""Tokens on the hottest rank: proven optimum with even shares; what tables of so many sources can reach."""

EVEN_SPLIT = "ours, for a host that splits evenly"


def known_example(contest: Contest) -> Iterator[dict[str, Any]]:
    """A row for each policy: the hottest rank with even shares, and through the tables of 8 and 16 source ranks."""
    scene = first_scene(HEAT[None, None, :], RANKS, SLOTS)
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("ours", OURS, {"afresh": True}),
        (EVEN_SPLIT, OURS, {"afresh": True, "options": {"split": "even"}}),
        ("ours, fixed tables", OURS, {"afresh": True, "options": {"solve_tables": False}}),
        *((name, name, {}) for name in contest.peers),
    ]
    for label, name, options in asked:
        decision = contest.decide(name, scene, **options)
        if decision is None:
            continue
        tables_RLE = decision.tables_RLE
        if tables_RLE is None:
            tables_RLE = rule_tables(decision.placement_LRS, HEAT.size)
        yield {
            "policy": label,
            "even": float(even_par(scene.heat_TLE, decision.placement_LRS)[0] * MEAN),
            "sources_8": float(realised_par(scene.heat_TLE, SLOTS, tables_RLE)[0] * MEAN),
            "sources_16": _sixteen_sources(scene) if label == "ours" else None,
        }


def _sixteen_sources(scene: Scene) -> float:
    """Ours where the tokens come from sixteen sources, two for each rank."""
    placement = Placement(scene.placement_LRS, HEAT.size)
    tables_LGE = np.repeat(scene.tables_RLE, 2, axis=0).transpose(1, 0, 2)
    (answer,) = solve_many(
        HEAT[None, None, :].astype(np.float64),
        placement.phy2log_LRS,
        tables_LGE,
        np.full((1, 16, HEAT.size), 1 / 16),
        search_params_of(PlannerSettings(move_price=0.0), placement),
        np.array([np.inf]),
        0.0,
        np.array([True]),
        threads=1,
    )
    if isinstance(answer, Exception):
        raise answer
    return float(answer.found.par * MEAN)
