"""What tables realise where tokens come from source ranks unevenly, and whether a plan keeps what it promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.heat_kinds import KINDS, WINDOW, Shape, generate, shape_name, source_mix
from eplb_service.bench.contest import OURS, Contest, first_scene
from eplb_service.bench.decision import Decision, Float64, Int32, Scene
from eplb_service.bench.scoring import peak_to_average, rule_tables, sampled_loads

SPREADS = (0.0, 0.3, 0.5)


def source_tables(
    contest: Contest, shape: Shape, seed: int, spreads: Sequence[float] = SPREADS
) -> Iterator[dict[str, Any]]:
    """A row for each kind, spread and policy; tokens of each step, source and expert are drawn one layer at a time."""
    layers, experts, ranks, slots = shape
    for kind in KINDS:
        heat_TLE = generate(kind, layers, experts, 2 * WINDOW, seed)
        for spread in spreads:
            mix_RLE = source_mix(layers, experts, ranks, spread, seed)
            scene = first_scene(heat_TLE[:WINDOW], ranks, slots)
            drawn = list(_draws(scene.heat_TLE, mix_RLE, seed))
            source_RLE = np.stack([drawn_TRE.sum(axis=0, dtype=np.float64) for drawn_TRE in drawn], axis=1)
            scene = Scene(scene.heat_TLE, scene.placement_LRS, scene.tables_RLE, source_RLE)
            ways: dict[str, Decision] = {}
            for name in [OURS, *contest.peers]:
                decision = contest.decide_from_scratch(name, scene)
                if decision is not None:
                    ways[name] = decision
            tables = {name: _tables(way, experts) for name, way in ways.items()}
            labels = {name: name for name in ways}
            if OURS in ways:
                labels["ours, fixed tables"] = OURS
                tables["ours, fixed tables"] = rule_tables(ways[OURS].placement_LRS, experts)
            on_window = _realised(drawn, tables, slots)
            on_next = _realised(_draws(heat_TLE[WINDOW:], mix_RLE, seed + 1), tables, slots)
            for label, name in labels.items():
                promised_L = ways[name].promised_L if label == name else None
                yield {
                    "shape": shape_name(shape),
                    "kind": kind,
                    "spread": spread,
                    "policy": label,
                    "realised_window": float(on_window[label].mean()),
                    "realised_next": float(on_next[label].mean()),
                    "promised_L": None if promised_L is None else promised_L.tolist(),
                }


def _tables(way: Decision, experts: int) -> Int32:
    return way.tables_RLE if way.tables_RLE is not None else rule_tables(way.placement_LRS, experts)


def _draws(heat_TLE: Int32, mix_RLE: Float64, seed: int) -> Iterator[np.ndarray]:
    """Each layer's tokens by step, source rank and expert, ``[T, R, E]``: every token draws where it comes from."""
    for layer in range(heat_TLE.shape[1]):
        generator = np.random.default_rng([seed, layer])
        drawn_TER = generator.multinomial(heat_TLE[:, layer], mix_RLE[:, layer].T)
        # No expert gets more tokens of one rank than a step has choices.
        yield drawn_TER.transpose(0, 2, 1).astype(np.uint16)


def _realised(drawn: Iterable[np.ndarray], tables: dict[str, Int32], slots: int) -> dict[str, Float64]:
    """For each table, float64 ``[L]``: the ratio per step."""
    found: dict[str, list[float]] = {label: [] for label in tables}
    for layer, drawn_TRE in enumerate(drawn):
        for label, tables_RLE in tables.items():
            found[label].append(peak_to_average(sampled_loads(drawn_TRE, slots, tables_RLE[:, layer])))
    return {label: np.array(ratios) for label, ratios in found.items()}
