"""What a decision costs that changes nothing: planned on one window of still heat, asked again on the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.solver.generated import generated_scene
from benchmarks.solver.heat_kinds import SHAPES, WINDOW, shape_name
from eplb_service.bench.contest import OURS, Contest
from eplb_service.bench.decision import Scene
from eplb_service.bench.scoring import rule_tables

CASES = {
    "left alone by the threshold": {"par_threshold": 10.0},
    "in default settings": {},
}
"""What a glance at every layer costs, and what it costs to find out that nothing pays."""


def keeping(contest: Contest, repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows for ours in both cases, and for each peer in default settings, on static heat at 58x256x32x9."""
    shape = SHAPES[1]
    first, heat_TLE = generated_scene("static", shape, 2, seed)
    askings = [(label, OURS, {"options": options}) for label, options in CASES.items()]
    askings += [("in default settings", name, {}) for name in contest.peers]
    for label, name, options in askings:
        placed = contest.decide(name, first)
        if placed is None:
            continue
        tables_RLE = placed.tables_RLE
        if tables_RLE is None:
            tables_RLE = rule_tables(placed.placement_LRS, shape[1])
        scene = Scene(heat_TLE[WINDOW:].copy(), placed.placement_LRS, tables_RLE)
        decisions = [contest.decide(name, scene, fresh=name == OURS, **options) for _ in range(repeats)]
        done = [decision for decision in decisions if decision is not None]
        if done:
            yield {
                "shape": shape_name(shape),
                "policy": name,
                "case": label,
                "changed_layers": done[0].changed_layers,
                "cpu_seconds": [decision.cpu_seconds for decision in done],
                "wall_seconds": [decision.wall_seconds for decision in done],
            }
