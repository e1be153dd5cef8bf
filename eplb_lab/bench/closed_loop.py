"""Closed-loop evaluation of policies on a trace: each decision uses one window and is scored on the steps after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from eplb_core.placement import Placement, mean_par
from eplb_core.planner.policies import NAMES, options_of
from eplb_core.planner.score import sampling_floor, split_steps
from eplb_core.planner.settings import TABLES
from eplb_lab.bench.contest import NONE, OURS, Contest, first_scene
from eplb_lab.bench.decision import Decision, Float64, Scene
from eplb_lab.bench.peers.balancers import PEERS
from eplb_lab.bench.scoring import realised_par, rule_tables, stale_par, stepwise_par
from eplb_service.replay.moves import arrivals


@dataclass(frozen=True)
class Entrant:
    """One policy in a closed-loop comparison.

    Parameters
    ----------
    label
        Name in tables and JSON.
    policy
        ``ours``, a peer's name, or ``none``.
    options
        Keyword arguments of ``Contest.decide`` for a policy of ours.
    by_step
        True if the host splits each step's tokens optimally over the replicas.
    stale
        True if that split is computed from the previous step's counts.
    """

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    by_step: bool = False
    stale: bool = False


@dataclass(frozen=True)
class Scenario:
    """Heat for the decisions and for the steps after them, with the numbers of ranks and slots.

    Parameters
    ----------
    name
        Name in tables.
    heat_TLE
        ``[T, L, E]``, tokens per step, layer and expert.
    ranks
        R, the number of ranks.
    slots
        S, the number of slots per rank.
    window
        Number of steps that a decision uses.
    mix_RLE
        float64 ``[R, L, E]``, fraction of each expert's tokens that comes from each source rank, the same in every
        step. ``None`` if every expert's tokens come equally from all ranks.
    interval
        Number of steps between decisions; the window length by default.

    Examples
    --------
    >>> scenario = Scenario("toy", np.arange(10).reshape(10, 1, 1), ranks=1, slots=1, window=4, interval=3)
    >>> scenario.decisions
    2
    >>> scenario.heat(1).ravel()
    array([3, 4, 5, 6])
    >>> scenario.served(1).ravel()
    array([7, 8, 9])
    """

    name: str
    heat_TLE: np.ndarray
    ranks: int
    slots: int
    window: int
    mix_RLE: Float64 | None = None
    interval: int | None = None

    @property
    def decisions(self) -> int:
        """Number of decisions that are followed by a full interval of heat."""
        return (len(self.heat_TLE) - self.window) // (self.interval or self.window)

    def heat(self, decision: int) -> np.ndarray:
        """Return the window of a decision, ``[T, L, E]``."""
        begin = decision * (self.interval or self.window)
        return np.ascontiguousarray(self.heat_TLE[begin : begin + self.window])

    def served(self, decision: int) -> np.ndarray:
        """Return the heat of the interval that follows a decision, ``[T, L, E]``."""
        interval = self.interval or self.window
        begin = self.window + decision * interval
        return np.ascontiguousarray(self.heat_TLE[begin : begin + interval])

    def sources(self, decision: int) -> Float64 | None:
        """Return the number of tokens by source rank in a decision's window, float64 ``[R, L, E]``."""
        return None if self.mix_RLE is None else self.mix_RLE * self.heat(decision).sum(axis=0)


FULL = Entrant("ours, full re-solve", OURS, {"afresh": True})
DEFAULT = Entrant("ours", OURS)
LEFT_ALONE = Entrant("left alone", NONE)
LPLB = Entrant("LPLB (LP)", "SGLang deepseek", by_step=True)
"""DeepSeek's LPLB. It places experts as DeepSeek's EPLB does and solves a linear program on the device in each step.

The score uses the program's optimum and does not include the time that the device takes to solve it.
"""
OURS_BY_STEP = Entrant("ours, by step", OURS, {"options": {"split": "step"}}, by_step=True)
STALE = Entrant(
    "shares one step old (model)", OURS, {"options": {"policy": "deepseek"}}, by_step=True, stale=True
)
"""Model of a balancer like LPLB that computes shares from the previous step's counts, on DeepSeek's EPLB placements."""
OWN = ("flashlb", "deepseek")
"""This project's policies that ``eplb bench`` compares by default."""


def entrants(contest: Contest) -> list[Entrant]:
    """Return all policies as entrants with default settings."""
    peers = [Entrant(name, name) for name in contest.peers]
    return [LEFT_ALONE, DEFAULT, FULL, *peers, *_by_step(contest)]


def policy_entrant(policy: str) -> Entrant:
    """Return a built-in policy or a user's ``module:function`` as an entrant with default settings."""
    if policy in NAMES:
        return Entrant(f"{policy} (ours)", OURS, {"options": options_of(policy)})
    return Entrant(policy, OURS, {"external": policy})


def entrants_of(contest: Contest, policies: Sequence[str] = OWN) -> list[Entrant]:
    """Return the entrants of ``eplb bench``: the initial layout, ``policies``, and the peers.

    Each peer is labelled with its engine.
    """
    return [
        LEFT_ALONE,
        *(policy_entrant(policy) for policy in policies),
        *(Entrant(_peer_label(name), name) for name in contest.peers),
        *_by_step(contest),
    ]


def _by_step(contest: Contest) -> list[Entrant]:
    """Return the policies that split tokens per step, or an empty list if LPLB's placements are not available."""
    return [OURS_BY_STEP, LPLB] if LPLB.policy in contest.peers else []


def _peer_label(name: str) -> str:
    """Return a peer's name followed by its engine in parentheses."""
    engine = {"vllm-ascend": "vLLM-Ascend", "vllm": "vLLM", "sglang": "SGLang"}[PEERS[name][0].name]
    short_name = name.removeprefix(engine).removeprefix("Ascend").strip()
    return f"{short_name} ({engine})"


def compare(
    contest: Contest,
    scenario: Scenario,
    taking_part: Sequence[Entrant],
    models: Mapping[str, Callable[[Scenario], Iterator[tuple[float, int]]]] | None = None,
) -> dict[str, Any]:
    """Run all entrants over the scenario, one after another, and return the document of ``eplb bench --json``.

    An entrant that fails is omitted and listed under ``failures``. Lists in the document have one entry per decision.
    Means exclude the first decision, in which every policy places all experts from scratch, unless it is the only one.

    Parameters
    ----------
    contest
        Processes that run the policies.
    scenario
        Heat, ranks and slots.
    taking_part
        Entrants to compare, in order.
    models
        Additional balancers, by name. Each yields the PAR and the experts fetched for each decision.
    """
    healthy = contest.warm_up(
        [entrant.policy for entrant in taking_part if entrant.policy != NONE],
        first_scene(scenario.heat(0), scenario.ranks, scenario.slots),
    )
    taking_part = [entrant for entrant in taking_part if entrant.policy in (NONE, *healthy)]
    policies = {
        row["policy"]: {
            "source": row["source"],
            "par_realised": realised_mean(row),
            "par_realised_per_window": row["realised"],
            "moves_per_decision": fmean(row["moves"][1:] or row["moves"]),
            "moves": row["moves"],
            "layers_changed": row["changed_layers"],
            "solve_ms_mean": fmean(row["wall_seconds"][1:] or row["wall_seconds"]) * 1e3,
            "cpu_ms_mean": cpu_after_first(row) * 1e3,
        }
        for row in chain(
            loops(contest, [scenario], taking_part),
            (_modelled(name, model, scenario) for name, model in (models or {}).items()),
        )
    }
    # The floor is only an estimate, so cap it at the lowest PAR realised with tables. Entrants that split per step are
    # excluded, because they can go below the floor.
    table_labels = [entrant.label for entrant in taking_part if not entrant.by_step]
    table_pars = [policy["par_realised"] for label, policy in policies.items() if label in table_labels]
    return {
        "layers": scenario.heat_TLE.shape[1],
        "experts": scenario.heat_TLE.shape[2],
        "ranks": scenario.ranks,
        "slots": scenario.slots,
        "window_steps": scenario.window,
        "decisions": scenario.decisions,
        "noise_floor": min([_floor(scenario), *table_pars]),
        "policies": policies,
        "failures": contest.failures,
    }


def _floor(scenario: Scenario) -> float:
    """Return the noise floor of the served steps, estimated from step-to-step changes in rank loads.

    The loads are those under the engines' initial layout.
    """
    initial = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    placement = Placement(initial.placement_LRS, scenario.heat_TLE.shape[2])
    loads = (
        split_steps(scenario.served(number), placement, initial.tables_RLE, None, TABLES)
        for number in range(scenario.decisions)
    )
    return float(mean_par(np.array([sampling_floor(interval_loads) for interval_loads in loads])))


def _source(entrant: Entrant) -> str:
    """Return the name of the package that provides an entrant's policy, followed by its version for a peer."""
    package = PEERS[entrant.policy][0] if entrant.policy in PEERS else None
    return "eplb-service" if package is None else f"{package.name} {package.version}"


def loops(
    contest: Contest, scenarios: Sequence[Scenario], taking_part: Sequence[Entrant]
) -> Iterator[dict[str, Any]]:
    """Yield each entrant's result for each scenario. Combinations in which the entrant fails are skipped."""
    for scenario in scenarios:
        for entrant in taking_part:
            row = _loop(contest, scenario, entrant)
            if row is not None:
                yield row


def _loop(contest: Contest, scenario: Scenario, entrant: Entrant) -> dict[str, Any] | None:
    """Run one entrant over a scenario and return its result, or ``None`` if a decision fails.

    All lists in the result have one entry per decision. The first decision starts from the engines' initial layout.
    """
    current = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    realised: list[float] = []
    moves: list[int] = []
    decisions: list[Decision] = []
    for number in range(scenario.decisions):
        scene = Scene(
            scenario.heat(number), current.placement_LRS, current.tables_RLE, scenario.sources(number)
        )
        decision = _decide(contest, entrant, scene, first=number == 0)
        if decision is None:
            return None
        decisions.append(decision)
        tables_RLE = decision.tables_RLE
        if tables_RLE is None:
            tables_RLE = rule_tables(decision.placement_LRS, scene.heat_TLE.shape[2])
        realised.append(_par_served(scenario, number, entrant, decision, tables_RLE))
        moves.append(int(arrivals(current.placement_LRS, decision.placement_LRS).sum()))
        current = Scene(scene.heat_TLE, decision.placement_LRS, tables_RLE)
    return {
        "scenario": scenario.name,
        "policy": entrant.label,
        "source": _source(entrant),
        "realised": realised,
        "moves": moves,
        "changed_layers": [decision.changed_layers for decision in decisions],
        "cpu_seconds": [decision.cpu_seconds for decision in decisions],
        "wall_seconds": [decision.wall_seconds for decision in decisions],
        "slots": int(current.placement_LRS.size),
    }


def _modelled(
    name: str, model: Callable[[Scenario], Iterator[tuple[float, int]]], scenario: Scenario
) -> dict[str, Any]:
    """Run a model over a scenario and return its result in the form that ``_loop`` uses. Times include the scoring."""
    realised, moves, cpu, wall = [], [], [], []
    outcomes = model(scenario)
    for _ in range(scenario.decisions):
        cpu_start = time.process_time()
        wall_start = time.perf_counter()
        par, fetched = next(outcomes)
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
        realised.append(par)
        moves.append(fetched)
    changed = [scenario.heat_TLE.shape[1]] * scenario.decisions
    return {
        "policy": name,
        "source": "eplb-lab, a model",
        "realised": realised,
        "moves": moves,
        "changed_layers": changed,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
    }


def _par_served(
    scenario: Scenario, number: int, entrant: Entrant, decision: Decision, tables_RLE: np.ndarray
) -> float:
    """Return the PAR of the steps after a decision, averaged over layers."""
    served_TLE = scenario.served(number)
    if entrant.stale:
        par_L = stale_par(served_TLE, scenario.heat(number)[-1], decision.placement_LRS)
    elif entrant.by_step:
        par_L = stepwise_par(served_TLE, decision.placement_LRS)
    else:
        par_L = realised_par(served_TLE, scenario.slots, tables_RLE, scenario.mix_RLE)
    return float(mean_par(par_L))


def _decide(contest: Contest, entrant: Entrant, scene: Scene, first: bool) -> Decision | None:
    if entrant.policy == NONE:
        return Decision(scene.placement_LRS, scene.tables_RLE, None, 0, 0.0, 0.0)
    return contest.decide(entrant.policy, scene, fresh=first, **entrant.options)


def realised_mean(row: Mapping[str, Any]) -> float:
    """Return the mean realised PAR per decision, excluding the first decision and intervals without tokens."""
    return float(mean_par(np.array(row["realised"][1:] or row["realised"])))


def moves_after_first(row: Mapping[str, Any]) -> int:
    """Return the total number of slots moved by all decisions except the first."""
    return int(sum(row["moves"][1:]))


def cpu_after_first(row: Mapping[str, Any]) -> float:
    """Return the mean CPU seconds per decision, excluding the first."""
    return float(np.mean(row["cpu_seconds"][1:] or row["cpu_seconds"]))
