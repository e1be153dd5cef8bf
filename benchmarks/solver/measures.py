"""Measurements of the solver and its peers; each yields rows, in the order in which they are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.heats import (
    KINDS,
    SHAPES,
    WINDOW,
    Shape,
    generate,
    generated_courses,
    generated_scene,
    shape_name,
    source_mix,
)
from eplb_service.bench.closed_loop import DEFAULT, FULL, LEFT_ALONE, Course, Entrant, loops
from eplb_service.bench.contest import NONE, OURS, OURS_EVEN, Contest, first_scene
from eplb_service.bench.decision import Decision, Float64, Int32, Scene
from eplb_service.bench.peers.balancers import FLASHLB
from eplb_service.bench.scoring import (
    arrivals,
    even_par,
    peak_to_average,
    realised_par,
    rule_tables,
    sampled_loads,
    summed,
)
from eplb_service.replay.policy import ABLATIONS


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
        if name == NONE:
            decision: Decision | None = Decision(scene.placement_LRS, None, None, 0, 0.0, 0.0)
        else:
            decision = contest.decide_from_scratch(name, scene)
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


def _par(heat_TLE: np.ndarray, placed_LRS: Int32, tables_RLE: Int32 | None) -> float:
    """Mean over the layers, through tables or else by even shares."""
    if tables_RLE is None:
        return float(even_par(heat_TLE, placed_LRS).mean())
    return float(realised_par(heat_TLE, placed_LRS.shape[2], tables_RLE).mean())


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
        scene = Scene(heat_TLE[WINDOW:].copy(), placed.placement_LRS, _tables(placed, shape[1]))
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


HEAT = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.int32)
RANKS, SLOTS = 8, 2
MEAN = HEAT.sum() / RANKS
BEST_EVEN, BEST_8_SOURCES = 196.67, 200.0
"""Tokens on the hottest rank: proven optimum with even shares; what tables of so many sources can reach."""

EVEN_SPLIT = "ours, for a host that splits evenly"


def known_example(contest: Contest) -> Iterator[dict[str, Any]]:
    """A row for each policy: the hottest rank with even shares, and through the tables of 8 source ranks."""
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
        tables_RLE = _tables(decision, HEAT.size)
        yield {
            "policy": label,
            "even": float(even_par(scene.heat_TLE, decision.placement_LRS)[0] * MEAN),
            "sources_8": float(realised_par(scene.heat_TLE, SLOTS, tables_RLE)[0] * MEAN),
        }


FEW_SLOTS: tuple[Shape, ...] = ((2, 256, 256, 2),)
"""Shapes where annealing lasts; on 512 experts and 320 ranks x 2 what it wins on the window the next one loses."""


def few_slots(contest: Contest, long_seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each shape and kind; ratios over the episodes that the solver sees, mean of two layers.

    The long search goes on annealing for ``long_seconds`` a layer. Ours balances what the window holds: without means
    of what is left between bursts.
    """
    ours = {"split": "even", "trimmed_mean": False}
    for shape in FEW_SLOTS:
        for kind in KINDS:
            scene, _ = generated_scene(kind, shape, 1, seed)
            budget = {"budget_ms": 1e3 * long_seconds * shape[0]}
            answers = {
                OURS_EVEN: contest.decide(OURS, scene, afresh=True, options=ours),
                "best": contest.decide(OURS, scene, afresh=True, options={**ours, **budget}),
            }
            if FLASHLB in contest.peers:
                answers[FLASHLB] = contest.decide_from_scratch(FLASHLB, scene)
            heat_NLE = summed(scene.heat_TLE, 64)
            yield {
                "shape": shape_name(shape),
                "kind": kind,
                "long_seconds": long_seconds,
                **{
                    name: float(even_par(heat_NLE, made.placement_LRS).mean())
                    for name, made in answers.items()
                    if made is not None
                },
            }


PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Beside the planner's own: peak-to-average ratio that moving every slot of a layer must win."""
PRICED = "ours, move_price 0.3"
"""The price at which few moves are to win nearly all."""


THRESHOLDS = ((0.8, 0.65), (0.7, 0.55))
"""Beside FlashLB's own: parts of its past and of perfect balance below which it places a layer from scratch."""


def priced(contest: Contest) -> list[Entrant]:
    """Ours at several prices, FlashLB with lower thresholds, the other peers, nothing at all."""
    ours = [
        Entrant(f"ours, move_price {price:g}", OURS, {"options": {"move_price": price}}) for price in PRICES
    ]
    peers = [Entrant(name, name) for name in contest.peers]
    if FLASHLB in contest.peers:
        peers += [
            Entrant(f"{FLASHLB}, thresholds {ratio:g} and {value:g}", FLASHLB, {"thresholds": (ratio, value)})
            for ratio, value in THRESHOLDS
        ]
    return [LEFT_ALONE, DEFAULT, FULL, *ours, *peers]


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
        for name, options in ABLATIONS.items()
    ]
