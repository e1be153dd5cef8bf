"""A replay as a table for people and as a document for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.console import Console

from eplb_service.cli.output.tables import compact_table
from eplb_service.cost.curve_file import plain_curve
from eplb_service.placement import mean_par
from eplb_service.replay.assumptions import Assumption
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy_replay import PolicyReplay
from eplb_service.replay.result import Replay

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 12


def print_replay(console: Console, result: Replay, rests_on: Sequence[Assumption] = ()) -> None:
    """A table with one row per policy; the curves of all policies share one scale."""
    curves = [curve(policy) for policy in result.policies]
    # Parts of a trace without tokens have no ratio.
    known = [value for values in curves for value in values if not math.isnan(value)]
    low, high = min(known, default=math.nan), max(known, default=math.nan)
    with_regret = result.score(result.policies[0]).regret is not None
    regret = ["regret"] if with_regret else []
    timed = ["MoE ms"] if result.costs.curve is not None else []
    table = compact_table("policy", *timed, "PAR", *regret, "moves each", "solve ms", "along")
    for policy, values in zip(result.policies, curves, strict=True):
        score = result.score(policy)
        slots = result.layers * result.ranks * policy.setup.slots
        table.add_row(
            policy.label,
            *([f"{score.moe_ms:.3f}"] if score.moe_ms is not None else []),
            f"{policy.par_realised:.3f}",
            *([f"{score.regret:.3f}"] if score.regret is not None else []),
            f"{policy.moves_per_decision:.1f} ({policy.moves_per_decision / slots:.0%})",
            f"{policy.seconds_mean * 1e3:.1f}",
            "".join(_block(value, low, high) for value in values),
        )
    console.print(_headline(result))
    console.print(table, soft_wrap=False)
    for line in _footnotes(result, low, high):
        console.print(line)
    if result.costs.step_ms or result.costs.curve is not None:
        console.print(f"This rests on: {'; '.join(map(str, rests_on))}.", markup=False)


def replay_document(result: Replay, rests_on: Sequence[Assumption] = ()) -> dict[str, Any]:
    """Everything that a replay found, with plain names and units in them."""
    setups = [baseline.setup for baseline in result.baselines]
    return {
        "layers": result.layers,
        "experts": result.experts,
        "ranks": result.ranks,
        "slots": setups[0].slots,
        "window_steps": setups[0].schedule.window,
        "interval_steps": setups[0].schedule.interval,
        "first_step_scored": result.first,
        "steps_scored": result.steps,
        "interrupted": result.interrupted,
        "costs": _costs(result.costs),
        "assumptions": [asdict(assumption) for assumption in rests_on],
        "policies": {policy.label: _policy_document(result, policy) for policy in result.policies},
    }


def _costs(costs: Costs) -> dict[str, Any]:
    plain = asdict(replace(costs, curve=None))
    return {**plain, "curve": None if costs.curve is None else plain_curve(costs.curve)}


def curve(policy: PolicyReplay) -> list[float]:
    """Realised PAR along the trace in at most ``_CURVE_WIDTH`` stretches of decisions; NaN of those without tokens."""
    values = [decision.par_realised for decision in policy.decisions]
    stretches = np.array_split(values, min(_CURVE_WIDTH, len(values)))
    return [float(mean_par(stretch)) for stretch in stretches]


def _headline(result: Replay) -> str:
    slots = sorted({policy.setup.slots for policy in result.policies})
    decisions = sorted({len(policy.decisions) for policy in result.policies})
    return (
        f"{result.layers} layers x {result.experts} experts on {result.ranks} ranks x "
        f"{' or '.join(map(str, slots))} slots; steps scored {result.steps}, "
        f"decisions {' or '.join(map(str, decisions))}"
        + ("; stopped early, all policies up to the same decision" if result.interrupted else "")
    )


def _footnotes(result: Replay, low: float, high: float) -> list[str]:
    lines = [
        f"PAR: hottest rank over mean rank in each step; curves from {low:.2f} to {high:.2f}. "
        + _seen_and_served(result),
        f"{_left_alone(result)} Regret: above the best that hindsight knows.",
    ]
    if result.costs.curve is not None:
        best = min(result.policies, key=lambda policy: policy.moe_ms or 0.0)
        fewest = min(result.policies, key=lambda policy: policy.setup.slots)
        left_alone, moe_ms = result.moe_ms_left_alone(fewest) or 0.0, best.moe_ms or 0.0
        lines.append(
            f"MoE ms: the slowest ranks of all layers in a step{_with_split(result)}. "
            f"Left alone on {fewest.setup.slots} slots {left_alone:.3f}; {best.label} saves "
            f"{left_alone - moe_ms:.3f} ms, and its switches cost {result.score(best).stall_ms:.3f} ms."
        )
    elif result.costs.step_ms:
        best = min(result.policies, key=lambda policy: policy.par_realised)
        won = result.score(best)
        lines.append(
            f"{best.label} saves {won.saved_ms:.2f} ms of a step of {result.costs.step_ms:g} ms, against experts "
            f"left alone on as many slots; its switches cost {won.stall_ms:.3f} ms of it."
        )
    return lines


def _seen_and_served(result: Replay) -> str:
    schedules = {policy.setup.schedule for policy in result.policies}
    windows = sorted({(schedule.window, schedule.window > schedule.interval) for schedule in schedules})
    seen = " or ".join(f"{'up to ' * looks_back}{window}" for window, looks_back in windows)
    served = " or ".join(map(str, sorted({schedule.interval for schedule in schedules})))
    return f"Each decision sees {seen} steps and serves {served}."


def _left_alone(result: Replay) -> str:
    """By number of slots, which the placement at the start hangs on."""
    scores = {policy.setup.slots: result.score(policy) for policy in reversed(result.policies)}
    alone = [f"{score.par_left_alone:.3f} on {slots} slots" for slots, score in sorted(scores.items())]
    floors = [f"{score.floor:.3f}" for score in scores.values()]
    floor = min(floors) if min(floors) == max(floors) else f"{min(floors)} to {max(floors)}"
    text = alone[0].partition(" on ")[0] if len(alone) == 1 else ", ".join(alone)
    return f"Left alone it is {text}; token sampling alone leaves about {floor}."


def _with_split(result: Replay) -> str:
    split = result.costs.split
    if split is None:
        return ""
    return f", and where it is split {split.ms_of_step(result.layers):.3f} ms for the split itself"


def _block(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    height = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[round(height * (len(_BLOCKS) - 1))]


def policy_figures(result: Replay, policy: PolicyReplay) -> dict[str, Any]:
    """One policy's figures over all of its decisions."""
    score = result.score(policy)
    return {
        "policy": policy.policy,
        "slots": policy.setup.slots,
        "window_steps": policy.setup.schedule.window,
        "interval_steps": policy.setup.schedule.interval,
        "par_realised": policy.par_realised,
        "par_left_alone": score.par_left_alone,
        "noise_floor": score.floor,
        "par_hindsight": score.hindsight,
        "regret": score.regret,
        "par_planned": policy.par_planned,
        "moves": policy.moves,
        "bytes_moved": score.bytes_moved,
        "moe_ms_per_step": score.moe_ms,
        "moe_ms_per_step_left_alone": score.moe_ms_left_alone,
        "saved_ms_per_step": score.saved_ms,
        "stall_ms_per_step": score.stall_ms,
        "solve_ms_mean": policy.seconds_mean * 1e3,
        "solve_ms_max": policy.seconds_max * 1e3,
    }


def _policy_document(result: Replay, policy: PolicyReplay) -> dict[str, Any]:
    return {
        **policy_figures(result, policy),
        "par_realised_per_layer": policy.par_realised_L,
        "decisions": [
            {
                "step": decision.step,
                "steps": decision.steps,
                "steps_before_it_took_effect": decision.late,
                "layers_changed": decision.layers_changed,
                "moves": decision.moves,
                "par_seen": decision.par_seen,
                "par_planned": decision.par_planned,
                "par_realised": decision.par_realised,
                "solve_ms": decision.seconds * 1e3,
            }
            for decision in policy.decisions
        ],
    }
