"""What the charts show, taken out of a replay: lines, points and maps, with the colour of each policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eplb_service.placement import Float64, mean_par
from eplb_service.replay.policy_replay import PolicyReplay
from eplb_service.replay.result import Replay
from eplb_service.report.charts import Line, Point

_COLOURS = 8
_DASHES = 6
"""Patterns of ``report.css`` that distinguish lines of the same colour."""
_MOST_MAPPED = 64
"""Decisions that a map over time shows; more are averaged."""


def colours_of(replay: Replay) -> dict[str, str]:
    """The classes of each policy's colour and dashes, by its label; doing nothing is grey.

    Up to ``_COLOURS * _DASHES`` policies look different from each other.
    """
    acting = [policy.label for policy in replay.policies if policy.policy != "none"]
    colours = {policy.label: "none" for policy in replay.policies}
    return colours | {
        label: f"s{number % _COLOURS} d{number // _COLOURS % _DASHES}" for number, label in enumerate(acting)
    }


def par_lines(replay: Replay, colours: Mapping[str, str]) -> list[Line]:
    """Realised PAR of each policy along the trace, after what it is measured against."""
    lines = []
    for baseline in replay.baselines:
        same = [policy for policy in replay.policies if policy.setup == baseline.setup]
        steps = [decision.step for decision in same[0].decisions]
        also = "" if len(replay.baselines) == 1 else f"{same[0].label.removeprefix(same[0].policy)}"
        hindsight_DL = replay.hindsight_DL(baseline.setup)
        lines.append(
            Line(f"floor{also}", "floor", steps, drawn(mean_par(baseline.floor_DL, axis=1)).tolist())
        )
        if hindsight_DL is not None:
            lines.append(
                Line(f"hindsight{also}", "hindsight", steps, drawn(mean_par(hindsight_DL, axis=1)).tolist())
            )
        if not any(policy.policy == "none" for policy in same):
            lines.append(
                Line(
                    f"left alone{also}",
                    "none",
                    steps,
                    drawn(mean_par(baseline.left_alone_DL, axis=1)).tolist(),
                )
            )
    for policy in replay.policies:
        steps = [decision.step for decision in policy.decisions]
        values = drawn(np.array([decision.par_realised for decision in policy.decisions])).tolist()
        lines.append(Line(policy.label, colours[policy.label], steps, values))
    return lines


def move_lines(replay: Replay, colours: Mapping[str, str]) -> list[Line]:
    """Slots that received weights at each decision of each policy that may move any, or of all where none may."""
    acting = [policy for policy in replay.policies if policy.policy != "none"]
    return [
        Line(
            policy.label,
            colours[policy.label],
            [decision.step for decision in policy.decisions],
            [decision.moves for decision in policy.decisions],
        )
        for policy in acting or replay.policies
    ]


def pareto_points(replay: Replay, colours: Mapping[str, str]) -> list[Point]:
    """The policies that move something; doing nothing only where there is hardly anything else to see."""
    acting = [policy for policy in replay.policies if policy.policy != "none"]
    return [
        Point(policy.label, colours[policy.label], moved_share(replay, policy), policy.par_realised)
        for policy in (acting if len(acting) > 1 else replay.policies)
    ]


def moved_share(replay: Replay, policy: PolicyReplay) -> float:
    """Slots that receive weights at a decision, as a share of all slots."""
    return policy.moves_per_decision / (replay.layers * replay.ranks * policy.setup.slots)


def maps_of(replay: Replay, best: PolicyReplay) -> dict[str, tuple[str, str, Float64]]:
    """Each map's name: what it shows, what its columns are, and its values."""
    baseline = replay.baseline(best.setup)
    balanced_DL = np.stack([decision.par_realised_L for decision in best.decisions])
    return {
        "before": ("Left alone", "rank", over_mean(baseline.loads_LR)),
        "after": (best.label, "rank", over_mean(best.loads_LR)),
        "alone": ("Left alone", "decision", drawn(_few_columns(baseline.left_alone_DL.T))),
        "balanced": (best.label, "decision", drawn(_few_columns(balanced_DL.T))),
    }


def drawn(par: Float64) -> Float64:
    """Ratios as pictures show them: where nothing was served there is none, and nothing sticks out at 1."""
    return np.nan_to_num(par, nan=1.0)


def over_mean(loads_LR: Float64) -> Float64:
    """Tokens of each rank over its layer's mean rank, float64 ``[L, R]``."""
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    ratio_LR: Float64 = loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)
    return ratio_LR


def _few_columns(values_LD: Float64) -> Float64:
    """The same with at most ``_MOST_MAPPED`` columns, each the mean of neighbours."""
    if values_LD.shape[1] <= _MOST_MAPPED:
        return values_LD
    return np.stack(
        [mean_par(part, axis=1) for part in np.array_split(values_LD, _MOST_MAPPED, axis=1)], axis=1
    )
