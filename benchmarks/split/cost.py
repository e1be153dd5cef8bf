"""How far from the optimum a stepwise split ends after so many rounds, and how long it takes on one core."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.solver.heat_kinds import generate
from benchmarks.split.quality import stepwise_loads
from eplb_service.offline import solve
from eplb_service.solver.stepwise.split import loads_by_step
from worker_agent.moe.stepwise import StepwiseSplit

ROUNDS = (10, 16, 22, 30, 42, 100)
CALLS = 200
WITHIN_A_TOKEN = "within a token"
AT_BEST = "best in whole tokens"
"""Steps whose hottest rank has as few whole tokens as any split gives it; the linear program may cut tokens."""


def cost(
    experts: int, ranks: int, slots: int, tokens: int, layers: int = 4, steps: int = 64
) -> Iterator[dict[str, object]]:
    """A row for each number of rounds: tokens above the linear program's optimum, and microseconds of CPU of a call.

    ``over`` is the most tokens above the best split in whole ones.

    Placements are made for even shares and for the stepwise split, half of the layers each, on steps of their own.
    """
    heat_TLE = generate("static", layers, experts, 2 * steps, tokens=tokens).astype(np.int64)
    half = layers // 2
    placed_LRS = np.concatenate(
        [
            solve(heat_TLE[:steps, part], ranks, slots, split=split).phy2log
            for part, split in ((slice(half), "even"), (slice(half, None), "step"))
        ]
    )
    above: dict[int, list[float]] = {rounds: [] for rounds in ROUNDS}
    over: dict[int, list[float]] = {rounds: [] for rounds in ROUNDS}
    timed: dict[int, list[float]] = {rounds: [] for rounds in ROUNDS}
    splits = [
        {rounds: StepwiseSplit(placed_RS, experts, rounds=rounds) for rounds in ROUNDS}
        for placed_RS in placed_LRS
    ]
    for layer, placed_RS in enumerate(placed_LRS):
        for heat_E in heat_TLE[steps:, layer]:
            best, whole = (
                loads_by_step(heat_E[None, None], placed_RS[None], cut).max() for cut in (False, True)
            )
            for rounds, split in splits[layer].items():
                hottest = stepwise_loads(split, heat_E, ranks, slots).max()
                above[rounds].append(hottest - best)
                over[rounds].append(hottest - whole)
        # By turns, so that what else the machine does meets all alike.
        counts_E = torch.from_numpy(heat_TLE[-1, layer])
        for rounds, split in splits[layer].items():
            timed[rounds] += microseconds(split, counts_E)
    for rounds in ROUNDS:
        yield {
            "rounds": rounds,
            "mean": float(np.mean(above[rounds])),
            "most": float(np.max(above[rounds])),
            WITHIN_A_TOKEN: float(np.mean(np.array(above[rounds]) <= 1 + 1e-6)),
            AT_BEST: float(np.mean(np.array(over[rounds]) == 0)),
            "over": float(np.max(over[rounds])),
            "us": [float(x) for x in np.percentile(timed[rounds], (5, 50, 95))],
        }


@torch.no_grad()
def microseconds(split: StepwiseSplit, counts_E: torch.Tensor) -> list[float]:
    """CPU time of so many calls, after some to warm up; on one thread, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for call in range(CALLS + 50):
            began = time.thread_time()
            split.ends(counts_E)
            if call >= 50:
                times.append((time.thread_time() - began) * 1e6)
    finally:
        torch.set_num_threads(threads)
    return times
