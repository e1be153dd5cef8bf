"""Comparison of the answers that an engine gives with and without moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplb_lab.conformance.engine import Answer


@dataclass(frozen=True)
class Tolerance:
    """Differences between two answers that do not matter.

    Parameters
    ----------
    rounding
        Largest difference between log-probabilities. A moved expert changes the summation order of its outputs.
    ties
        Largest share of tokens that may differ by more, up to ``largest_tie``. If two router scores are nearly equal,
        rounding can change a token's experts.
    largest_tie
        Largest difference between log-probabilities at a tie.
    """

    rounding: float = 1e-4
    ties: float = 1e-3
    largest_tie: float = 0.02


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Parameters
    ----------
    tokens
        Number of compared tokens.
    largest
        Largest difference between the log-probabilities of equal tokens.
    ties
        Number of differences that count as ties.
    difference
        First difference that is not a tie, or None if the answers are equal.
    """

    tokens: int
    largest: float
    ties: int
    difference: str | None


def compare(answers: Sequence[Answer], expected: Sequence[Answer], tolerance: Tolerance) -> Comparison:
    """Compare answers token by token.

    An answer is compared up to its first different token. That token is a tie if its log-probabilities differ only by
    rounding, because then the engine had to choose between two equally likely tokens.

    Examples
    --------
    >>> compare([Answer((1, 2), (-0.5, -0.1))], [Answer((1, 3), (-0.5, -0.9))], Tolerance()).difference
    'answer 0, token 1: id 2 (-0.1) instead of 3 (-0.9); 1 of 1 answers differ'
    """
    if len(answers) != len(expected):
        return Comparison(0, 0.0, 0, f"{len(answers)} answers instead of {len(expected)}")
    tokens = 0
    largest = 0.0
    ties: list[str] = []
    faults: list[str] = []
    for number, (answer, reference) in enumerate(zip(answers, expected, strict=True)):
        if len(answer.ids) != len(reference.ids):
            faults.append(f"answer {number}: {len(answer.ids)} tokens instead of {len(reference.ids)}")
            continue
        for position, (token, reference_token) in enumerate(zip(answer.ids, reference.ids, strict=True)):
            tokens += 1
            logprob = answer.logprobs[position]
            expected_logprob = reference.logprobs[position]
            gap = abs(logprob - expected_logprob)
            if token == reference_token:
                largest = max(largest, gap)
                if gap <= tolerance.rounding:
                    continue
            place = f"answer {number}, token {position}"
            difference = (
                f"{place}: id {token} ({logprob:.3g}) instead of {reference_token} ({expected_logprob:.3g})"
            )
            limit = tolerance.largest_tie if token == reference_token else tolerance.rounding
            if not gap <= limit:  # also true for NaN
                faults.append(difference)
                break
            ties.append(difference)
            if token != reference_token:
                break
    reason = None
    if faults:
        reason = f"{faults[0]}; {len(faults)} of {len(expected)} answers differ"
    elif len(ties) > tolerance.ties * tokens:
        reason = f"{len(ties)} ties in {tokens} tokens, the first in {ties[0]}"
    return Comparison(tokens, largest, len(ties), reason)
