"""Two servers' answers to the same requests: whether they say the same, and how long their tokens took."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.vllm_serving.load import Answer

MOST_ROUNDING = 1e-3
"""Largest difference of two log-probabilities that float32 explains; a wrong expert changes them by tenths and more."""


@dataclass(frozen=True)
class Sameness:
    """How the answers of two servers compare.

    Parameters
    ----------
    requests, identical
        How many there were, and how many were answered alike to the last byte.
    split_draws
        Answers that part where both servers still give the candidates the same log-probabilities within
        ``MOST_ROUNDING``: the draw fell so close between two bytes that float32 decided.
    different
        Answers that part otherwise, or failed.
    worst_difference
        Of the log-probabilities, over all tokens that were drawn after the same text.
    """

    requests: int
    identical: int
    split_draws: int
    different: int
    worst_difference: float


def compare(some: Sequence[Answer], others: Sequence[Answer]) -> Sameness:
    """Compare answers to the same requests."""
    identical = split_draws = different = 0
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        gap = largest_gap(one, other)
        worst = max(worst, gap)
        if one.error or other.error or gap > MOST_ROUNDING:
            different += 1
        elif one.token_ids == other.token_ids:
            identical += 1
        else:
            split_draws += 1
    return Sameness(len(some), identical, split_draws, different, worst)


def largest_gap(one: Answer, other: Answer) -> float:
    """Largest difference of two log-probabilities, up to the token at which the answers part, that one included."""
    largest = 0.0
    for place, (here, there) in enumerate(zip(one.candidates, other.candidates, strict=False)):
        shared = here.keys() & there.keys()
        # Candidates of nearly the same probability may change places; most of them are the same all the same.
        if len(shared) < len(here) // 2:
            return float("inf")
        largest = max(largest, *(abs(here[token] - there[token]) for token in shared))
        if one.token_ids[place] != other.token_ids[place]:
            break
    return largest


@dataclass(frozen=True)
class Latency:
    """Milliseconds, median and 99th percentile: to the first token, and from one token of a request to its next."""

    first_p50: float
    first_p99: float
    token_p50: float
    token_p99: float


def latency(answers: Iterable[Answer]) -> Latency:
    """Of all answers that did not fail; NaN where there are none."""
    good = [answer.times for answer in answers if answer.error is None]
    first = [times[0] for times in good if times]
    gaps = [later - earlier for times in good for earlier, later in itertools.pairwise(times)]
    return Latency(*_quantiles(first), *_quantiles(gaps))


def _quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    p50, p99 = 1e3 * np.quantile(seconds, [0.5, 0.99])
    return float(p50), float(p99)
