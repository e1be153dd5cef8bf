"""The stepwise split in whole numbers of Python: no rounding can differ, whatever is summed first."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from math import floor

import torch

from worker_agent.moe.stepwise import StepwiseSplit
from worker_agent.moe.stepwise_tables import ways_to_round


def product(matrix: torch.Tensor, vector: list[Fraction]) -> list[Fraction]:
    """The product in fractions."""
    return [
        sum((Fraction(x) * y for x, y in zip(row, vector, strict=True)), Fraction(0))
        for row in matrix.tolist()
    ]


def ends(split: StepwiseSplit, counts: list[int], rounds: int) -> list[int]:
    """Where the tokens of each slot end."""
    shared = split.round_M2.shape[0]
    known = product(split.from_counts, [Fraction(count) for count in counts])
    ranks = split.bound_MR.shape[1]
    start, known, first = known[:shared], known[shared:-ranks], known[-ranks:]
    state = [Fraction(round(x)) for x in start]
    for _ in range(rounds):
        moved = product(split.round_M2, [abs(x) for x in state] + state)
        # Python and torch both round halves to even.
        state = [Fraction(round(x + y)) for x, y in zip(moved, start, strict=True)]
    flow = [max(x, Fraction(0)) for x in state]
    exact = [x + y for x, y in zip(known, product(split.exact_XM, flow), strict=True)]
    ways = [_rounded(split, exact, dithers, ranks) for dithers in ways_to_round(ranks, shared).tolist()]
    # The first of those whose hottest rank is the coolest.
    later = product(split.later_MM, min(ways, key=lambda way: _hottest(split, way, first)))
    totals = list(accumulate(counts))
    found = [totals[expert] for expert in split.expert_P.tolist()]
    for place, expert, tokens in zip(split.place_M.tolist(), split.expert_M.tolist(), later, strict=True):
        found[place] -= min(int(tokens), counts[expert])
    return found


def _rounded(split: StepwiseSplit, exact: list[Fraction], dithers: list[float], ranks: int) -> list[Fraction]:
    """Whole tokens of each slot where so much is added before rounding down; none below zero."""
    cut = [floor(x + Fraction(d)) - x for x, d in zip(exact, dithers, strict=True)]
    whole = [x + y for x, y in zip(exact[ranks:], product(split.by_cut_XM.t(), cut), strict=True)]
    return [max(x, Fraction(0)) for x in whole]


def _hottest(split: StepwiseSplit, way: list[Fraction], first: list[Fraction]) -> Fraction:
    """What no rank's load is above, but for the same in all ways."""
    return max(x + y for x, y in zip(first, product(split.bound_MR.t(), way), strict=True))
