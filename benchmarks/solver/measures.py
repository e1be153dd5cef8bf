"""Measurements of the solver and its peers; each yields rows, in the order in which they are found."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.solver.heats import (
    KINDS,
    SHAPES,
    WINDOW,
    Shape,
    generate,
    generated_scenarios,
    generated_scene,
    shape_name,
    source_mix,
)
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan, plan_afresh
from eplb_core.planner.plan import Layout
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver.model import Recommendation
from eplb_lab.bench.closed_loop import DEFAULT, Entrant, Scenario, entrants, loops
from eplb_lab.bench.contest import OURS, OURS_EVEN, Contest, first_scene
from eplb_lab.bench.decision import Decision, Float64, Int32, Scene
from eplb_lab.bench.peers.balancers import FLASHLB
from eplb_lab.bench.scoring import (
    even_par,
    peak_to_average,
    realised_par,
    rule_tables,
    sampled_loads,
)
from eplb_service.replay.policy import ABLATIONS


def cells(contest: Contest, shapes: Sequence[Shape], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each seed, kind, shape, and ours or FlashLB, placed from scratch."""
    names = [OURS, OURS_EVEN, *(name for name in contest.peers if name == FLASHLB)]
    for shape in shapes:
        warm, _ = generated_scene(KINDS[0], shape, 1, seeds[0])
        contest.warm_up([OURS, *names[2:]], warm)
    # Shapes that differ in ranks alone are next to each other and share their heat.
    for seed, kind, shape, name in product(seeds, KINDS, shapes, names):
        scene, heat_TLE = generated_scene(kind, shape, 2, seed)
        decision = contest.decide_from_scratch(name, scene)
        if decision is not None:
            tables_RLE = decision.tables_RLE if name == OURS else None
            yield _row(shape, kind, seed, name, heat_TLE, decision.placement_LRS, tables_RLE)


def _row(
    shape: Shape,
    kind: str,
    seed: int,
    policy: str,
    heat_TLE: np.ndarray,
    placed_LRS: Int32,
    tables_RLE: Int32 | None = None,
) -> dict[str, Any]:
    """One policy's ratios on the window that it saw and on the next."""
    seen, after = (_par(part_TLE, placed_LRS, tables_RLE) for part_TLE in np.split(heat_TLE, [WINDOW]))
    named = {"shape": shape_name(shape), "kind": kind, "seed": seed, "policy": policy}
    return {**named, "in_sample": seen, "next_window": after}


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


LOOKS_BACK, DECIDES_EVERY = 128, 24
"""Steps that a decision of ``following`` sees, and steps between two."""


FOLLOWED = ("drift", "bursty")
"""Kinds of heat for ``following``: those that make the planner search."""


def following(seeds: Sequence[int], decisions: int = 32) -> Iterator[dict[str, Any]]:
    """Yield a row per kind and seed: CPU time of repeated decisions and of placements from scratch, on 58x256x32x9.

    The planner decides every 24 steps. ``warm`` and ``afresh`` are the CPU seconds of each decision.
    """
    for kind, seed in product(FOLLOWED, seeds):
        heat_TLE = generate(kind, *SHAPES[1][:2], LOOKS_BACK + decisions * DECIDES_EVERY, seed)
        warm, afresh = _followed(heat_TLE, decisions)
        # The first decision is from scratch in both cases, so it is no comparison.
        yield {
            "shape": shape_name(SHAPES[1]),
            "kind": kind,
            "seed": seed,
            "warm": warm[1:],
            "afresh": afresh[1:],
        }


def _followed(heat_TLE: Int32, decisions: int) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of each warm decision and of a decision from scratch on the same window."""
    _, layers, experts = heat_TLE.shape
    ranks, slots = SHAPES[1][2:]
    settings = PlannerSettings(threads=1)
    topology = Topology.flat(ranks)
    placement = Placement.linear(layers, experts, ranks, slots)
    served = Layout(placement, placement.default_log2phy())
    scenarios: Sequence[Recommendation | None] = ()
    warm: list[float] = []
    afresh: list[float] = []
    for begin in range(0, (decisions + 1) * DECIDES_EVERY, DECIDES_EVERY):
        window = Window(np.ascontiguousarray(heat_TLE[begin : begin + LOOKS_BACK]))
        began = time.process_time()
        made = plan(window, served.placement, served.log2phy_RLE, topology, settings, scenarios=scenarios)
        decided = time.process_time()
        plan_afresh(window, served.placement, topology, settings)
        warm.append(decided - began)
        afresh.append(time.process_time() - decided)
        served = served.changed_by(made)
        scenarios = made.scenarios
    return warm, afresh


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

_MANY = 1_000_000

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
        # The example is about expected loads. Of so many tokens, chance moves next to none.
        many_TLE = scene.heat_TLE.astype(np.int64) * _MANY
        yield {
            "policy": label,
            "even": float(even_par(many_TLE, decision.placement_LRS)[0] * MEAN),
            "sources_8": float(realised_par(many_TLE, SLOTS, tables_RLE)[0] * MEAN),
        }


FEW_SLOTS: tuple[Shape, ...] = ((2, 256, 256, 2), (2, 512, 320, 2))
"""Shapes where annealing lasts, and where what it wins on the window the next one often loses."""
UNANNEALED = "ours, never annealed"


def few_slots(contest: Contest, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each shape, kind and seed; ratios by even shares on the window and on the next, mean of two layers."""
    for shape, kind, seed in product(FEW_SLOTS, KINDS, seeds):
        scene, heat_TLE = generated_scene(kind, shape, 2, seed)
        plain = {"split": "even", "annealing": False}
        made = {
            OURS_EVEN: contest.decide_from_scratch(OURS_EVEN, scene),
            UNANNEALED: contest.decide(OURS, scene, afresh=True, options=plain),
            **{name: contest.decide_from_scratch(name, scene) for name in contest.peers if name == FLASHLB},
        }
        for name, way in made.items():
            if way is not None:
                yield _row(shape, kind, seed, name, heat_TLE, way.placement_LRS)


PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Beside the planner's own: peak-to-average ratio that moving every slot of a layer must win."""
PRICED = "ours, move_price 0.3"
"""The price at which few moves are to win nearly all."""


def priced(contest: Contest) -> list[Entrant]:
    """Ours at several prices, the peers, nothing at all."""
    ours = [
        Entrant(f"ours, move_price {price:g}", OURS, {"options": {"move_price": price}}) for price in PRICES
    ]
    return [*entrants(contest), *ours]


SMALL: Mapping[str, Shape] = {"small_layers": (8, 32, 8, 5), "two_slots": (2, 256, 256, 2)}
"""Shapes where replica counts are searched together with the placement: by tree, and by annealing."""
SPREAD = 0.3
"""Log-sd of the split over source ranks: tables are worth nothing where all ranks are alike."""


def ablation(
    contest: Contest, shape: Shape, windows: int, seeds: Sequence[int], traces: Sequence[Scenario]
) -> Iterator[dict[str, Any]]:
    """A row for each seed, kind or trace, and component: placed from scratch, then in the closed loop."""
    for seed in seeds:
        small = {
            kind: {name: generated_scene(kind, shape, 1, seed)[0] for name, shape in SMALL.items()}
            for kind in KINDS
        }
        for scenario in generated_scenarios(KINDS, shape, windows, seed, SPREAD):
            yield from _without_each(contest, scenario, seed, small[scenario.name])
    for scenario in traces:
        yield from _without_each(contest, scenario, None, {})


def _without_each(
    contest: Contest, scenario: Scenario, seed: int | None, small: Mapping[str, Scene]
) -> Iterator[dict[str, Any]]:
    taking_part = [DEFAULT, *_without_one()]
    scene = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    rows = {row["policy"]: row for row in loops(contest, [scenario], taking_part)}
    for entrant in taking_part:
        options = dict(entrant.options.get("options", {}))
        made = contest.decide(OURS, scene, afresh=True, options=options)
        if made is not None and entrant.label in rows:
            yield {
                **rows[entrant.label],
                "seed": seed,
                "in_sample": float(even_par(scene.heat_TLE, made.placement_LRS).mean()),
                "next_window": float(even_par(scenario.heat(1), made.placement_LRS).mean()),
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
