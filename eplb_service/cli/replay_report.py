"""A replay as a table for people and as a document for machines."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eplb_service.placement import Placement
from eplb_service.replay.result import PolicyReplay, Replay

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 16


def print_replay(console: Console, result: Replay, placement: Placement) -> None:
    """A table with one row a policy; the curves of all policies share one scale."""
    curves = [curve(policy) for policy in result.policies]
    low, high = min(map(min, curves)), max(map(max, curves))
    table = Table()
    table.add_column("policy")
    for heading in ("PAR", "worst layer", "moves each", "solve ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("along the trace", no_wrap=True)
    for policy, values in zip(result.policies, curves, strict=True):
        share = policy.moves_per_decision / placement.phy2log_LRS.size
        table.add_row(
            policy.policy,
            f"{policy.par_realised:.3f}",
            f"{policy.par_realised_L.max():.3f}",
            f"{policy.moves_per_decision:.1f} ({share:.0%})",
            f"{policy.seconds_mean * 1e3:.1f}",
            "".join(_block(value, low, high) for value in values),
        )
    decisions = len(result.policies[0].decisions)
    console.print(
        f"{placement.layers} layers x {placement.experts} experts on {placement.ranks} ranks x "
        f"{placement.slots} slots; steps scored {result.steps}, decisions {decisions}"
    )
    console.print(table)
    console.print(
        f"PAR: hottest rank over mean rank in each step; curves from {low:.2f} to {high:.2f}. "
        f"Each decision sees {result.window} steps and serves {result.interval}."
    )


def replay_document(result: Replay, placement: Placement) -> dict[str, Any]:
    """Everything that a replay found, with plain names and units in them."""
    return {
        "layers": placement.layers,
        "experts": placement.experts,
        "ranks": placement.ranks,
        "slots": placement.slots,
        "window_steps": result.window,
        "interval_steps": result.interval,
        "steps_scored": result.steps,
        "policies": {policy.policy: _policy_document(policy) for policy in result.policies},
    }


def curve(policy: PolicyReplay) -> list[float]:
    """Realised PAR along the trace in at most ``_CURVE_WIDTH`` stretches of decisions."""
    values = [decision.par_realised for decision in policy.decisions]
    stretches = np.array_split(values, min(_CURVE_WIDTH, len(values)))
    return [float(stretch.mean()) for stretch in stretches]


def _block(value: float, low: float, high: float) -> str:
    height = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[round(height * (len(_BLOCKS) - 1))]


def _policy_document(policy: PolicyReplay) -> dict[str, Any]:
    return {
        "par_realised": policy.par_realised,
        "par_realised_per_layer": policy.par_realised_L,
        "par_planned": policy.par_planned,
        "moves": policy.moves,
        "solve_ms_mean": policy.seconds_mean * 1e3,
        "solve_ms_max": policy.seconds_max * 1e3,
        "decisions": [
            {
                "step": decision.step,
                "steps": decision.steps,
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
