"""Measurements of the solver and its peers. Each yields its rows as they are measured."""

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
from eplb_core.planner.decide import plan, plan_from_scratch
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
    """Yield a row per seed, kind and shape for our policy and for FlashLB, which both place experts from scratch."""
    names = [OURS, OURS_EVEN, *(name for name in contest.peers if name == FLASHLB)]
    for shape in shapes:
        warm, _ = generated_scene(KINDS[0], shape, 1, seeds[0])
        contest.warm_up([OURS, *names[2:]], warm)
    # Shapes that differ only in their ranks are adjacent, so that they share the cached heat.
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
    """Return one policy's PAR on the window of its decision and on the next window."""
    in_sample, next_window = (
        _par(window_TLE, placed_LRS, tables_RLE) for window_TLE in np.split(heat_TLE, [WINDOW])
    )
    return {
        "shape": shape_name(shape),
        "kind": kind,
        "seed": seed,
        "policy": policy,
        "in_sample": in_sample,
        "next_window": next_window,
    }


def _par(heat_TLE: np.ndarray, placed_LRS: Int32, tables_RLE: Int32 | None) -> float:
    """Return the mean PAR over the layers, with the tables if they are given, or else with an even split."""
    if tables_RLE is None:
        return float(even_par(heat_TLE, placed_LRS).mean())
    return float(realised_par(heat_TLE, placed_LRS.shape[2], tables_RLE).mean())


CASES = {
    "kept by the threshold": {"par_threshold": 10.0},
    "in default settings": {},
}
"""Two reasons why a decision keeps every layer: the threshold skips the search, or the search finds no gain."""


def keeping(contest: Contest, repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for our policy in each of ``CASES`` and for each peer, on static heat at 58x256x32x9."""
    shape = SHAPES[1]
    first, heat_TLE = generated_scene("static", shape, 2, seed)
    requests = [(label, OURS, {"options": options}) for label, options in CASES.items()]
    requests += [("in default settings", name, {}) for name in contest.peers]
    for label, name, options in requests:
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


LOOKS_BACK = 128
"""Number of steps that a decision in ``following`` uses."""
DECIDES_EVERY = 24
"""Number of steps between two decisions in ``following``."""

FOLLOWED = ("drift", "bursty")
"""Kinds of heat for ``following``: those that make the planner search."""


def following(seeds: Sequence[int], decisions: int = 32) -> Iterator[dict[str, Any]]:
    """Yield a row per kind and seed, with CPU times of repeated and of from-scratch decisions on 58x256x32x9.

    The planner decides every 24 steps. ``warm`` and ``afresh`` are the CPU seconds of each decision.
    """
    for kind, seed in product(FOLLOWED, seeds):
        heat_TLE = generate(kind, *SHAPES[1][:2], LOOKS_BACK + decisions * DECIDES_EVERY, seed)
        warm, afresh = _followed(heat_TLE, decisions)
        # The first decision is made from scratch in both cases, so exclude it.
        yield {
            "shape": shape_name(SHAPES[1]),
            "kind": kind,
            "seed": seed,
            "warm": warm[1:],
            "afresh": afresh[1:],
        }


def _followed(heat_TLE: Int32, decisions: int) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of each warm decision, and of a decision from scratch on the same window."""
    _, layers, experts = heat_TLE.shape
    ranks, slots = SHAPES[1][2:]
    settings = PlannerSettings(threads=1)
    topology = Topology.flat(ranks)
    placement = Placement.linear(layers, experts, ranks, slots)
    current = Layout(placement, placement.default_log2phy())
    scenarios: Sequence[Recommendation | None] = ()
    warm: list[float] = []
    afresh: list[float] = []
    for begin in range(0, (decisions + 1) * DECIDES_EVERY, DECIDES_EVERY):
        window = Window(np.ascontiguousarray(heat_TLE[begin : begin + LOOKS_BACK]))
        began = time.process_time()
        decision = plan(
            window, current.placement, current.log2phy_RLE, topology, settings, scenarios=scenarios
        )
        decided = time.process_time()
        plan_from_scratch(window, current.placement, topology, settings)
        warm.append(decided - began)
        afresh.append(time.process_time() - decided)
        current = current.changed_by(decision)
        scenarios = decision.scenarios
    return warm, afresh


COMPARED: tuple[Shape, ...] = (SHAPES[1], SHAPES[2])
LARGE: Shape = (61, 512, 320, 2)


def cpu_times(contest: Contest, shapes: Sequence[Shape], repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row per shape, kind and policy with the CPU seconds of all repeats.

    Every placement is made from scratch.
    """
    for shape in shapes:
        names = [OURS, OURS_EVEN] if shape == LARGE else [OURS, OURS_EVEN, *contest.peers]
        for kind in KINDS:
            scene, _ = generated_scene(kind, shape, 1, seed)
            if kind == KINDS[0]:
                contest.warm_up([OURS, *contest.peers], scene)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            # The first round is not timed. It only pages the policies' memory back in.
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
    """Yield a row per kind, spread and policy with the PAR that the tables promise and the PAR that they realise.

    Parameters
    ----------
    contest
        Policies to measure.
    shape
        Shape of the deployment.
    seed
        Seed for the heat and for the tokens' sources.
    spreads
        Spreads of ``source_mix``.
    """
    layers, experts, ranks, slots = shape
    for kind in KINDS:
        heat_TLE = generate(kind, layers, experts, 2 * WINDOW, seed)
        for spread in spreads:
            mix_RLE = source_mix(layers, experts, ranks, spread, seed)
            scene = first_scene(heat_TLE[:WINDOW], ranks, slots)
            drawn = list(_draws(scene.heat_TLE, mix_RLE, seed))
            source_RLE = np.stack([drawn_TRE.sum(axis=0, dtype=np.float64) for drawn_TRE in drawn], axis=1)
            scene = Scene(scene.heat_TLE, scene.placement_LRS, scene.tables_RLE, source_RLE)
            # Tokens are drawn one layer at a time, which limits memory.
            decisions: dict[str, Decision] = {}
            for name in [OURS, *contest.peers]:
                decision = contest.decide_from_scratch(name, scene)
                if decision is not None:
                    decisions[name] = decision
            tables = {name: _tables(decision, experts) for name, decision in decisions.items()}
            labels = {name: name for name in decisions}
            if OURS in decisions:
                labels["ours, fixed tables"] = OURS
                tables["ours, fixed tables"] = rule_tables(decisions[OURS].placement_LRS, experts)
            on_window = _realised(drawn, tables, slots)
            on_next = _realised(_draws(heat_TLE[WINDOW:], mix_RLE, seed + 1), tables, slots)
            for label, name in labels.items():
                promised_L = decisions[name].promised_L if label == name else None
                yield {
                    "shape": shape_name(shape),
                    "kind": kind,
                    "spread": spread,
                    "policy": label,
                    "realised_window": float(on_window[label].mean()),
                    "realised_next": float(on_next[label].mean()),
                    "promised_L": None if promised_L is None else promised_L.tolist(),
                }


def _tables(decision: Decision, experts: int) -> Int32:
    if decision.tables_RLE is not None:
        return decision.tables_RLE
    return rule_tables(decision.placement_LRS, experts)


def _draws(heat_TLE: Int32, mix_RLE: Float64, seed: int) -> Iterator[np.ndarray]:
    """Yield each layer's tokens per step, source rank and expert, ``[T, R, E]``, drawing the source of every token."""
    for layer in range(heat_TLE.shape[1]):
        generator = np.random.default_rng([seed, layer])
        drawn_TER = generator.multinomial(heat_TLE[:, layer], mix_RLE[:, layer].T)
        # uint16 is sufficient, because in a step, an expert gets at most one token per choice from a single rank.
        yield drawn_TER.transpose(0, 2, 1).astype(np.uint16)


def _realised(drawn: Iterable[np.ndarray], tables: dict[str, Int32], slots: int) -> dict[str, Float64]:
    """Return the PAR of each table per layer, float64 ``[L]``, averaged over the steps."""
    ratios_by_label: dict[str, list[float]] = {label: [] for label in tables}
    for layer, drawn_TRE in enumerate(drawn):
        for label, tables_RLE in tables.items():
            ratios_by_label[label].append(
                peak_to_average(sampled_loads(drawn_TRE, slots, tables_RLE[:, layer]))
            )
    return {label: np.array(ratios) for label, ratios in ratios_by_label.items()}


HEAT = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.int32)
RANKS = 8
SLOTS = 2
MEAN = HEAT.sum() / RANKS
BEST_EVEN = 196.67
"""Number of tokens on the hottest rank in the proven optimum with even shares."""
BEST_8_SOURCES = 200.0
"""Number of tokens on the hottest rank in the best possible result with the tables of 8 source ranks."""

_MANY = 1_000_000

EVEN_SPLIT = "ours, for a host that splits evenly"


def known_example(contest: Contest) -> Iterator[dict[str, Any]]:
    """Yield a row per policy: tokens on the hottest rank under even shares, and under the tables of 8 source ranks."""
    scene = first_scene(HEAT[None, None, :], RANKS, SLOTS)
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("ours", OURS, {"afresh": True}),
        (EVEN_SPLIT, OURS, {"afresh": True, "options": {"split": "even"}}),
        ("ours, fixed tables", OURS, {"afresh": True, "options": {"solve_tables": False}}),
        *((name, name, {}) for name in contest.peers),
    ]
    for label, name, options in requests:
        decision = contest.decide(name, scene, **options)
        if decision is None:
            continue
        tables_RLE = _tables(decision, HEAT.size)
        # The example is about expected loads. With a million times as many tokens, sampling noise is negligible.
        many_TLE = scene.heat_TLE.astype(np.int64) * _MANY
        yield {
            "policy": label,
            "even": float(even_par(many_TLE, decision.placement_LRS)[0] * MEAN),
            "sources_8": float(realised_par(many_TLE, SLOTS, tables_RLE)[0] * MEAN),
        }


FEW_SLOTS: tuple[Shape, ...] = ((2, 256, 256, 2), (2, 512, 320, 2))
"""Shapes on which annealing takes long and often loses its gain on the next window."""
UNANNEALED = "ours, never annealed"


def few_slots(contest: Contest, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per shape, kind, seed and policy, with the PAR under even shares on the window and the next one."""
    for shape, kind, seed in product(FEW_SLOTS, KINDS, seeds):
        scene, heat_TLE = generated_scene(kind, shape, 2, seed)
        unannealed = {"split": "even", "annealing": False}
        decisions = {
            OURS_EVEN: contest.decide_from_scratch(OURS_EVEN, scene),
            UNANNEALED: contest.decide(OURS, scene, afresh=True, options=unannealed),
            **{name: contest.decide_from_scratch(name, scene) for name in contest.peers if name == FLASHLB},
        }
        for name, decision in decisions.items():
            if decision is not None:
                yield _row(shape, kind, seed, name, heat_TLE, decision.placement_LRS)


PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Move prices tried in addition to the planner's default: minimum PAR improvement for moving every slot of a layer."""
PRICED = "ours, move_price 0.3"
"""Entrant whose price should yield almost the whole gain with few moves."""


def priced(contest: Contest) -> list[Entrant]:
    """Return the entrants in the closed loop, and our policy at each of ``PRICES``."""
    ours = [
        Entrant(f"ours, move_price {price:g}", OURS, {"options": {"move_price": price}}) for price in PRICES
    ]
    return [*entrants(contest), *ours]


SMALL: Mapping[str, Shape] = {"small_layers": (8, 32, 8, 5), "two_slots": (2, 256, 256, 2)}
"""Shapes on which replica counts are searched together with the placement: by tree search and by annealing."""
SPREAD = 0.3
"""Spread for ``source_mix``. If all source ranks had the same mix, tables would bring no gain."""


def ablation(
    contest: Contest, shape: Shape, windows: int, seeds: Sequence[int], traces: Sequence[Scenario]
) -> Iterator[dict[str, Any]]:
    """Yield a row per seed, kind or trace, and component, with results from scratch and in the closed loop."""
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
    ablated = [DEFAULT, *_ablations()]
    scene = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    rows = {row["policy"]: row for row in loops(contest, [scenario], ablated)}
    for entrant in ablated:
        options = dict(entrant.options.get("options", {}))
        decision = contest.decide(OURS, scene, afresh=True, options=options)
        if decision is not None and entrant.label in rows:
            yield {
                **rows[entrant.label],
                "seed": seed,
                "in_sample": float(even_par(scene.heat_TLE, decision.placement_LRS).mean()),
                "next_window": float(even_par(scenario.heat(1), decision.placement_LRS).mean()),
                "cpu_from_scratch": decision.cpu_seconds,
                **{name: _even_par_of(contest, small[name], options) for name in small},
            }


def _even_par_of(contest: Contest, scene: Scene, options: Mapping[str, Any]) -> float | None:
    """Return the PAR of a placement made from scratch for an even split, on its own window, or ``None`` if it fails."""
    decision = contest.decide(OURS, scene, afresh=True, options={**options, "split": "even"})
    return None if decision is None else float(even_par(scene.heat_TLE, decision.placement_LRS).mean())


def _ablations() -> Sequence[Entrant]:
    return [
        Entrant(name.removeprefix("flashlb-"), OURS, {"options": dict(options)})
        for name, options in ABLATIONS.items()
    ]
