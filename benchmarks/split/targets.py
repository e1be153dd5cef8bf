"""What splits of tokens over replicas are meant to reach, and whether a run of the benchmark reached it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.known_example import HEAT, MEAN, RANKS, SLOTS
from benchmarks.solver.targets import Target
from benchmarks.split.by_source import DEALT, SOLVED
from benchmarks.split.cost import WITHIN_A_TOKEN
from benchmarks.split.exactness import Exactness
from benchmarks.split.floor import EvenFloor
from benchmarks.split.quality import EVEN_SHARES, FOR_EVEN, FOR_STEPS, STEPWISE
from eplb_service.offline import solve
from worker_agent.moe.stepwise import ROUNDS

Rows = Sequence[Mapping[str, Any]]

_KNOWN_ENTRIES = 16
_MOST_OF_KNOWN = 182.0
_MOST_MICROSECONDS = 200.0
RECORDED = {SOLVED: 1.225, DEALT: 1.20, STEPWISE: 1.03}
"""Of gpt-oss-20b decoding 64 requests on 8 ranks x 5 slots: ratio on the next window."""
DRAWN = {EVEN_SHARES: 1.11, STEPWISE: 1.04}
"""Of 256 experts on 32 ranks x 9 slots, 1,024 tokens x 8 choices per step: the same."""


def of_recorded(by_source: Mapping[str, Sequence[float]], quality: Rows) -> Iterator[Target]:
    """Recorded decoding under one replica per source, dealt, and split by step."""
    found = {name: float(np.mean(by_source[name])) for name in (SOLVED, DEALT)}
    found[STEPWISE] = _ratio(quality, FOR_STEPS, STEPWISE)
    labels = {SOLVED: "one replica per source rank", DEALT: "dealt", STEPWISE: "stepwise"}
    for name, wanted in RECORDED.items():
        yield _most(f"gpt-oss-20b, 8 ranks x 5 slots, next window: {labels[name]}", wanted, found[name])


def of_drawn(heat: str, quality: Rows, floor: EvenFloor) -> Iterator[Target]:
    """Drawn steps; ``floor`` is what their noise leaves of even shares."""
    found = {
        EVEN_SHARES: _ratio(quality, FOR_EVEN, EVEN_SHARES),
        STEPWISE: _ratio(quality, FOR_STEPS, STEPWISE),
    }
    for name, wanted in DRAWN.items():
        what = f"256 experts, 32 ranks x 9 slots, {heat}, next window: {name}"
        if name == EVEN_SHARES:
            reach = "below the floor" if wanted < floor.estimate else "above the floor"
            what += f" (aimed at is {reach}: {floor})"
        yield _most(what, wanted, found[name])


def of_cost(cost: Rows) -> Iterator[Target]:
    """The stepwise split at its default rounds."""
    row = next(row for row in cost if row["rounds"] == ROUNDS)
    quiet, median, slow = row["us"]
    what = f"stepwise split of a layer, one core, {ROUNDS} rounds"
    yield Target(
        f"{what}: microseconds of CPU, half of the calls",
        f"at most {_MOST_MICROSECONDS:g}",
        f"{median:.0f} (5 %: {quiet:.0f}, 95 %: {slow:.0f})",
        median <= _MOST_MICROSECONDS,
    )
    most = row["most"]
    yield Target(
        f"{what}: tokens above the optimum",
        "within one",
        f"{row['mean']:.2f}, at most {most:.1f}; {row[WITHIN_A_TOKEN]:.1%} of steps within one",
        most <= 1 + 1e-6,
    )


def of_exactness(found: Sequence[Exactness]) -> Iterator[Target]:
    """Steps of every size at their default rounds, by ranks and popularity."""
    kinds = dict.fromkeys((one.ranks, one.slots, one.popularity) for one in found)
    for ranks, slots, popularity in kinds:
        above_N = np.concatenate(
            [
                one.above
                for one in found
                if (one.ranks, one.slots, one.popularity) == (ranks, slots, popularity)
            ]
        )
        within = float(np.mean(above_N <= 1 + 1e-6))
        yield Target(
            f"stepwise split, {ranks} ranks x {slots}, steps of all sizes, {popularity}: tokens above the optimum",
            "within one",
            f"{above_N.mean():.2f}, at most {above_N.max():.1f}; {within:.1%} of steps within one",
            within == 1.0,
        )


def of_known_example() -> Iterator[Target]:
    """Eight experts on 8 ranks x 2 slots, dealt from 8 source ranks."""
    heat_TLE = HEAT[None, None]
    solved = solve(heat_TLE, RANKS, SLOTS, split="deal", deal_width=_KNOWN_ENTRIES, threads=1)
    hottest = float(solved.hottest_after_L[0])
    yield Target(
        f"known example, {_KNOWN_ENTRIES} entries: hottest rank (mean {MEAN:g})",
        f"at most {_MOST_OF_KNOWN:g}",
        f"{hottest:.2f}",
        hottest <= _MOST_OF_KNOWN,
    )


def _ratio(quality: Rows, placement: str, split: str) -> float:
    return float(next(row[split] for row in quality if row["placement"] == placement))


def _most(what: str, wanted: float, found: float) -> Target:
    return Target(what, f"at most {wanted:g}", f"{found:.3f}", round(found, 3) <= wanted)
