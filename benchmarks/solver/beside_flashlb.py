"""Ours beside FlashLB: every cell of the balance table judged, and how many times our CPU time it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_service.bench.contest import OURS
from eplb_service.bench.peers.balancers import FLASHLB

Rows = Sequence[Mapping[str, Any]]

NOISE = 0.003
"""Ratio by which a cell may be worse for noise alone."""
MOVING_NOISE = 0.02
"""The same on the next window of drift and bursts, which nobody has seen."""
BURSTY_GAIN = 0.02
"""Ratio by which bursts must be balanced better at 32 and 64 ranks, on the next window: in sample a placement may
follow bursts that do not come again."""


@dataclass(frozen=True)
class Cell:
    """Ours beside FlashLB on one shape and kind of heat: differences of the ratio, one for each seed."""

    shape: str
    kind: str
    ours_in_sample: float
    flashlb_in_sample: float
    ours_next: float
    flashlb_next: float
    in_sample_worst: float
    next_worst: float
    failings: tuple[str, ...]


def compared_cells(rows: Rows, mine: str = OURS) -> list[Cell]:
    """Every shape and kind that ``mine`` and FlashLB were measured on; a cell fails by its worst seed."""
    found = []
    names = (dict.fromkeys(row[field] for row in rows) for field in ("shape", "kind"))
    for shape, kind in itertools.product(*names):
        here = [row for row in rows if (row["shape"], row["kind"]) == (shape, kind)]
        ours = {row["seed"]: row for row in here if row["policy"] == mine}
        theirs = {row["seed"]: row for row in here if row["policy"] == FLASHLB}
        seeds = [seed for seed in ours if seed in theirs]
        if seeds:
            found.append(_cell(shape, kind, [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]))
    return found


def _cell(shape: str, kind: str, ours: Rows, theirs: Rows) -> Cell:
    worst = {
        field: max(mine[field] - other[field] for mine, other in zip(ours, theirs, strict=True))
        for field in ("in_sample", "next_window")
    }
    ranks = shape.split("x")[2]
    most_next = MOVING_NOISE if kind in ("drift", "bursty") else NOISE
    if kind == "bursty" and ranks in ("32", "64"):
        most_next = -BURSTY_GAIN
    failings = []
    if worst["in_sample"] > NOISE:
        failings.append(f"in sample by {worst['in_sample'] - NOISE:.4f}")
    if worst["next_window"] > most_next:
        failings.append(f"next window by {worst['next_window'] - most_next:.4f}")

    def mean(rows: Rows, field: str) -> float:
        return float(np.mean([row[field] for row in rows]))

    return Cell(
        shape,
        kind,
        mean(ours, "in_sample"),
        mean(theirs, "in_sample"),
        mean(ours, "next_window"),
        mean(theirs, "next_window"),
        worst["in_sample"],
        worst["next_window"],
        tuple(failings),
    )


def time_ratio(
    rows: Rows, shape: str, kinds: Sequence[str], measure: Callable[..., Any] = min, mine: str = OURS
) -> float:
    """FlashLB's CPU time over that of ``mine`` on one shape, summed over ``kinds``.

    ``measure`` picks among the repeats.
    """
    spent = {
        policy: sum(
            float(measure(row["cpu_seconds"]))
            for row in rows
            if (row["shape"], row["policy"]) == (shape, policy) and row["kind"] in kinds
        )
        for policy in (mine, FLASHLB)
    }
    return spent[FLASHLB] / spent[mine]
