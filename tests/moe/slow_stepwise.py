"""The stepwise split in exact Python arithmetic, so that no rounding depends on the order of summation."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from math import floor

import torch

from worker_agent.stepwise import StepwiseSplit
from worker_agent.stepwise_tables import PENALTIES, rounding_dithers


def product(matrix: torch.Tensor, vector: list[Fraction]) -> list[Fraction]:
    """Return the exact product, as fractions."""
    return [
        sum((Fraction(x) * y for x, y in zip(row, vector, strict=True)), Fraction(0))
        for row in matrix.tolist()
    ]


def ends(split: StepwiseSplit, counts: list[int], rounds: int) -> list[int]:
    """Return the position at which each slot's tokens end."""
    shared, ranks = split.bound_MR.shape
    linear = product(split.from_totals, product(split.totals_YE, [Fraction(count) for count in counts]))
    *starts, constant, uncut, first = _cut(
        linear, [shared] * len(PENALTIES) + [ranks + shared, shared, ranks]
    )
    state = [Fraction(round(x)) for x in starts[0]]
    before = 0
    for number in range(1, rounds + 1):
        level = number * len(PENALTIES) // (rounds + 1)
        kind = 2 * level - (1 if level > before else 0)
        moved = product(split.rounds_CM2[kind], [abs(x) for x in state] + state)
        # Python and torch both round halves to even.
        state = [Fraction(round(x + y)) for x, y in zip(moved, starts[level], strict=True)]
        before = level
    # The positive part of a state is half of the sum of the state and its absolute value.
    slots = product(split.exact_X2[:, :shared], [2 * max(x, Fraction(0)) for x in state])
    exact = [x + y for x, y in zip(constant, slots, strict=True)]
    ways = [_rounded(split, exact, uncut, dithers) for dithers in rounding_dithers(ranks, shared).tolist()]
    # Take the first candidate whose hottest rank has the lowest load.
    later = product(split.later_MM, min(ways, key=lambda way: _hottest(split, way, first)))
    totals = list(accumulate(counts))
    ends_P = [totals[expert] for expert in split.expert_P.tolist()]
    for place, expert, tokens in zip(split.position_M.tolist(), split.expert_M.tolist(), later, strict=True):
        ends_P[place] -= min(int(tokens), counts[expert])
    return ends_P


def _cut(values: list[Fraction], lengths: list[int]) -> list[list[Fraction]]:
    """Split ``values`` into consecutive parts of these lengths."""
    ends = list(accumulate(lengths))
    assert ends[-1] == len(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _rounded(
    split: StepwiseSplit, exact: list[Fraction], uncut: list[Fraction], dithers: list[float]
) -> list[Fraction]:
    """Add the dither to each slot's tokens, round down to whole tokens, and replace negative counts by zero."""
    whole = [Fraction(floor(x + Fraction(d))) for x, d in zip(exact, dithers, strict=True)]
    slots = [x + y for x, y in zip(uncut, product(split.by_sum_XM.t(), whole), strict=True)]
    return [max(x, Fraction(0)) for x in slots]


def _hottest(split: StepwiseSplit, way: list[Fraction], first: list[Fraction]) -> Fraction:
    """Return an upper bound on the ranks' loads, up to a term that is the same for all candidates."""
    return max(x + y for x, y in zip(first, product(split.bound_MR.t(), way), strict=True))
