"""Policies window after window along one trace: what each realises on the next window, what it moves and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from eplb_lab.bench.scoring import realised_par, rule_tables, stepwise_par
from eplb_service.replay.moves import arrivals


@dataclass(frozen=True)
class Entrant:
    """One policy in a loop: its label, ``ours``, a peer's name or ``none``, and the options of ours.

    Where ``by_step`` its host splits every step's tokens over the replicas as well as can be.
    """

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    by_step: bool = False


@dataclass(frozen=True)
class Scenario:
    """Heat to decide on and serve, with the number of ranks and slots.

    Parameters
    ----------
    name
        Name in tables.
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step.
    ranks, slots
        Number of ranks R, and slots per rank.
    window
        Steps that a decision sees.
    mix_RLE
        float64 ``[R, L, E]``, each expert's split over the source ranks in every step. ``None`` for an even split.
    interval
        Steps between decisions, by default the length of a window.
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
        """Number of decisions that serve a whole interval."""
        return (len(self.heat_TLE) - self.window) // (self.interval or self.window)

    def heat(self, decision: int) -> np.ndarray:
        """Return the heat that a decision sees."""
        begin = decision * (self.interval or self.window)
        return np.ascontiguousarray(self.heat_TLE[begin : begin + self.window])

    def served(self, decision: int) -> np.ndarray:
        """Return the heat that a decision serves, from the end of its window to the next decision."""
        interval = self.interval or self.window
        begin = self.window + decision * interval
        return np.ascontiguousarray(self.heat_TLE[begin : begin + interval])

    def sources(self, decision: int) -> Float64 | None:
        """Return the tokens by source rank that a decision sees, float64 ``[R, L, E]``."""
        return None if self.mix_RLE is None else self.mix_RLE * self.heat(decision).sum(axis=0)


FULL = Entrant("ours, full re-solve", OURS, {"afresh": True})
DEFAULT = Entrant("ours", OURS)
LEFT_ALONE = Entrant("left alone", NONE)
LPLB = Entrant("LPLB (LP)", "SGLang deepseek", by_step=True)
"""LPLB places as DeepSeek's EPLB does and solves a linear program in each step, on the device; here only the program's
optimum is known, without what solving it takes."""
OURS_BY_STEP = Entrant("ours, by step", OURS, {"options": {"split": "step"}}, by_step=True)
OWN = ("flashlb", "deepseek")
"""This project's policies that ``eplb bench`` compares by default."""


def entrants(contest: Contest) -> list[Entrant]:
    """All policies with default settings."""
    peers = [Entrant(name, name) for name in contest.peers]
    return [LEFT_ALONE, DEFAULT, FULL, *peers, *_by_step(contest)]


def policy_entrant(policy: str) -> Entrant:
    """Return a built-in policy, or one of the user's own, as an entrant with default settings."""
    if policy in NAMES:
        return Entrant(f"{policy} (ours)", OURS, {"options": options_of(policy)})
    return Entrant(policy, OURS, {"external": policy})


def entrants_of(contest: Contest, policies: Sequence[str] = OWN) -> list[Entrant]:
    """Return doing nothing, the policies, and the peers that take part, each named with its engine."""
    return [
        LEFT_ALONE,
        *(policy_entrant(policy) for policy in policies),
        *(Entrant(_peer_label(name), name) for name in contest.peers),
        *_by_step(contest),
    ]


def _by_step(contest: Contest) -> list[Entrant]:
    """Policies of hosts that split by step: LPLB, where its placements can be had, and ours beside it."""
    return [OURS_BY_STEP, LPLB] if LPLB.policy in contest.peers else []


def _peer_label(name: str) -> str:
    """A peer's name with its engine behind it."""
    engine = {"vllm-ascend": "vLLM-Ascend", "vllm": "vLLM", "sglang": "SGLang"}[PEERS[name][0].name]
    own = name.removeprefix(engine).removeprefix("Ascend").strip()
    return f"{own} ({engine})"


def compare(contest: Contest, scenario: Scenario, taking_part: Sequence[Entrant]) -> dict[str, Any]:
    """Run all entrants along the scenario, one after another, and return the document of ``eplb bench --json``.

    One that fails is left out, which ``contest`` has reported. Means are without the first window where there are
    others: all place it from scratch. Lists have an entry for each decision.
    """
    answering = contest.warm_up(
        [entrant.policy for entrant in taking_part if entrant.policy != NONE],
        first_scene(scenario.heat(0), scenario.ranks, scenario.slots),
    )
    taking_part = [entrant for entrant in taking_part if entrant.policy in (NONE, *answering)]
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
        for row in loops(contest, [scenario], taking_part)
    }
    by_table = [entrant.label for entrant in taking_part if not entrant.by_step]
    reached = [policy["par_realised"] for label, policy in policies.items() if label in by_table]
    return {
        "layers": scenario.heat_TLE.shape[1],
        "experts": scenario.heat_TLE.shape[2],
        "ranks": scenario.ranks,
        "slots": scenario.slots,
        "window_steps": scenario.window,
        "decisions": scenario.decisions,
        "noise_floor": min([_floor(scenario), *reached]),
        "policies": policies,
        "failures": contest.failures,
    }


def _floor(scenario: Scenario) -> float:
    """Ratio that sampling leaves in the windows served, as ranks' jumps from step to step show in the first layout."""
    first = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    placement = Placement(first.placement_LRS, scenario.heat_TLE.shape[2])
    served = (
        split_steps(scenario.served(number), placement, first.tables_RLE, None, TABLES)
        for number in range(scenario.decisions)
    )
    return float(mean_par(np.array([sampling_floor(window) for window in served])))


def _source(entrant: Entrant) -> str:
    package = PEERS[entrant.policy][0] if entrant.policy in PEERS else None
    return "eplb-service" if package is None else f"{package.name} {package.version}"


def loops(
    contest: Contest, scenarios: Sequence[Scenario], taking_part: Sequence[Entrant]
) -> Iterator[dict[str, Any]]:
    """A row for each scenario and entrant; one that fails is left out of that scenario."""
    for scenario in scenarios:
        for entrant in taking_part:
            row = _loop(contest, scenario, entrant)
            if row is not None:
                yield row


def _loop(contest: Contest, scenario: Scenario, entrant: Entrant) -> dict[str, Any] | None:
    """The first decision places the experts; moves are counted from the second on."""
    serving = first_scene(scenario.heat(0), scenario.ranks, scenario.slots)
    realised, moves, cpu, wall, changed = [], [], [], [], []
    for number in range(scenario.decisions):
        scene = Scene(
            scenario.heat(number), serving.placement_LRS, serving.tables_RLE, scenario.sources(number)
        )
        decision = _decide(contest, entrant, scene, first=number == 0)
        if decision is None:
            return None
        experts = scene.heat_TLE.shape[2]
        tables_RLE = decision.tables_RLE
        if tables_RLE is None:
            tables_RLE = rule_tables(decision.placement_LRS, experts)
        following = scenario.served(number)
        if entrant.by_step:
            par_L = stepwise_par(following, decision.placement_LRS)
        else:
            par_L = realised_par(following, scenario.slots, tables_RLE, scenario.mix_RLE)
        realised.append(float(mean_par(par_L)))
        moves.append(int(arrivals(serving.placement_LRS, decision.placement_LRS).sum()))
        cpu.append(decision.cpu_seconds)
        wall.append(decision.wall_seconds)
        changed.append(decision.changed_layers)
        serving = Scene(scene.heat_TLE, decision.placement_LRS, tables_RLE)
    return {
        "scenario": scenario.name,
        "policy": entrant.label,
        "source": _source(entrant),
        "realised": realised,
        "moves": moves,
        "changed_layers": changed,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "slots": int(serving.placement_LRS.size),
    }


def _decide(contest: Contest, entrant: Entrant, scene: Scene, first: bool) -> Decision | None:
    if entrant.policy == NONE:
        return Decision(scene.placement_LRS, scene.tables_RLE, None, 0, 0.0, 0.0)
    return contest.decide(entrant.policy, scene, fresh=first, **entrant.options)


def realised_mean(row: Mapping[str, Any]) -> float:
    """Mean over the windows that had tokens, without the first: all policies place it from scratch."""
    return float(mean_par(np.array(row["realised"][1:] or row["realised"])))


def moves_after_first(row: Mapping[str, Any]) -> int:
    """Slots moved after the first placement."""
    return int(sum(row["moves"][1:]))


def cpu_after_first(row: Mapping[str, Any]) -> float:
    """CPU seconds of a decision in the loop, without the first."""
    return float(np.mean(row["cpu_seconds"][1:] or row["cpu_seconds"]))
