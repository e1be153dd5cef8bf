"""How far above the optimum of the linear program steps of any size end, at the rounds that they take by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.solver.heat_kinds import generate
from benchmarks.split.quality import stepwise_loads
from eplb_service.bench.decision import Float64
from eplb_service.offline import solve
from eplb_service.solver.model import Int64
from eplb_service.solver.stepwise.split import loads_by_step
from worker_agent.moe.stepwise import StepwiseSplit, rounds_for

TOKENS = (256, 1024, 4096, 16384, 65536)
RANKS = ((8, 33), (32, 9), (64, 5))
"""With their slots: a spare one for each rank and 256 experts."""
DRAWN, SKEWED = "drawn", "skewed"
_CHOICES = 8
_EXPERTS = 256


@dataclass(frozen=True)
class Exactness:
    """Of the steps of one kind."""

    ranks: int
    slots: int
    tokens: int
    popularity: str
    rounds: int
    above: Float64
    """float64 ``[N]``: tokens of the hottest rank above the linear program, which may cut tokens."""

    over: Float64
    """float64 ``[N]``: above the best split in whole tokens."""

    share: Float64
    """float64 ``[N]``: the latter as a part of the hottest rank's tokens at best."""

    @property
    def within(self) -> float:
        """The part of the steps within a token of the linear program."""
        return float(np.mean(self.above <= 1 + 1e-6))


def exactness(steps: int = 32) -> Iterator[Exactness]:
    """One for each number of ranks and of tokens, and each popularity; half of the steps by each of two placements.

    One is made for even shares and one for the stepwise split, on as many other steps.
    """
    for ranks, slots in RANKS:
        for tokens in TOKENS:
            for popularity in (DRAWN, SKEWED):
                yield _exactness(ranks, slots, tokens, popularity, steps)


def _exactness(ranks: int, slots: int, tokens: int, popularity: str, steps: int) -> Exactness:
    heat_TLE = _drawn(tokens, 2 * steps) if popularity == DRAWN else _skewed(tokens, 2 * steps)
    hottest: list[tuple[float, float, float]] = []
    for layer, made_for in enumerate(("even", "step")):
        solved = solve(heat_TLE[:steps, layer : layer + 1].astype(np.int32), ranks, slots, split=made_for)
        split = StepwiseSplit(solved.phy2log[0], _EXPERTS)
        for heat_E in heat_TLE[steps:, layer]:
            best, whole = (
                loads_by_step(heat_E[None, None], solved.phy2log, cut).max() for cut in (False, True)
            )
            hottest.append((stepwise_loads(split, heat_E, ranks, slots).max(), best, whole))
    found_N, best_N, whole_N = np.array(hottest).T
    over_N = found_N - whole_N
    rounds = rounds_for(tokens * _CHOICES)
    return Exactness(ranks, slots, tokens, popularity, rounds, found_N - best_N, over_N, over_N / whole_N)


def _drawn(tokens: int, steps: int) -> Int64:
    """As in the other parts, ``[steps, 2, E]``."""
    return generate("static", 2, _EXPERTS, steps, tokens=tokens, choices=_CHOICES).astype(np.int64)


def _skewed(tokens: int, steps: int) -> Int64:
    """Log-popularity of deviation 2, which jumps by 0.7 from step to step; no expert has more tokens than there are."""
    generator = np.random.default_rng(tokens)
    log_TLE = generator.normal(0, 2, (1, 2, _EXPERTS)) + generator.normal(0, 0.7, (steps, 2, _EXPERTS))
    share_TLE = np.exp(log_TLE)
    share_TLE /= share_TLE.sum(axis=2, keepdims=True)
    for _ in range(8):
        share_TLE = np.minimum(share_TLE, 1.0 / _CHOICES)
        share_TLE /= share_TLE.sum(axis=2, keepdims=True)
    return generator.multinomial(tokens * _CHOICES, share_TLE)
