"""The stepwise split in whole numbers of Python: no rounding can differ, whatever is summed first."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import torch

from worker_agent.moe.stepwise import StepwiseSplit
from worker_agent.moe.stepwise_tables import UNITS, ways_to_round


def product(matrix: torch.Tensor, vector: list[Fraction]) -> list[Fraction]:
    """The product in fractions."""
    return [
        sum((Fraction(x) * y for x, y in zip(row, vector, strict=True)), Fraction(0))
        for row in matrix.tolist()
    ]


def ends(split: StepwiseSplit, counts: list[int], rounds: int) -> list[Fraction]:
    """Where the tokens of each shared slot end."""
    shared, ranks = split.own_MM.shape[0], split.rank_sums_RM.shape[0]
    known = product(split.from_counts, [Fraction(count) for count in counts])
    start, tokens, alone = known[:shared], known[shared : 2 * shared], known[2 * shared :]
    state = [Fraction(round(x)) for x in start]
    for _ in range(rounds):
        moved = product(split.round_M2, [abs(x) for x in state] + state)
        # Python and torch both round halves to even.
        state = [Fraction(round(x + y)) for x, y in zip(moved, start, strict=True)]
    positive = [max(x, Fraction(0)) for x in state]
    sums = [x + 1 for x in product(split.own_MM, positive)]
    flow = [Fraction(floor(x * t / s)) for x, t, s in zip(positive, tokens, sums, strict=True)]
    left = [t - x for t, x in zip(tokens, product(split.own_MM, flow), strict=True)]
    flow = [x + y * Fraction(f) for x, y, f in zip(flow, left, split.first_M.tolist(), strict=True)]
    running = [x + y for x, y in zip(alone, product(split.rank_sums_RM, flow), strict=True)]
    assert len(running) == ranks
    ways = [_rounded(split, running, flow, dithers) for dithers in ways_to_round(ranks, shared).tolist()]
    # The first of those that leave the fewest tokens below zero.
    best = min(ways, key=sum)
    return product(split.running_MM, best)


def _rounded(
    split: StepwiseSplit, running: list[Fraction], flow: list[Fraction], dithers: list[float]
) -> list[Fraction]:
    """Whole tokens of each slot where so much is added before rounding down, in units; none below zero."""
    units = int(UNITS)
    cut = [x - units * floor((x + int(d)) / units) for x, d in zip(running + flow, dithers, strict=True)]
    whole = [x - y for x, y in zip(flow, product(split.by_cut_MX, cut), strict=True)]
    return [max(x / units, Fraction(0)) for x in whole]
