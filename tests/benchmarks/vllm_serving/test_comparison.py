"""Answers of two servers are the same, drawn apart by rounding, or different; failed ones have no latency."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.vllm_serving.comparison import compare, largest_gap, latency
from tests.benchmarks.vllm_serving.answers import answer_of


def test_a_draw_that_rounding_decided_is_distinguished_from_a_wronganswer_of() -> None:
    pairs = [
        (answer_of("same"), answer_of("same", 1e-6)),
        (answer_of("same"), answer_of("sane", 1e-6)),
        (answer_of("same"), answer_of("same", 0.1)),
        (answer_of("same"), answer_of("same", error="lost")),
    ]
    found = compare(*zip(*pairs, strict=True))
    assert (found.requests, found.identical, found.split_draws, found.different) == (4, 1, 1, 2)
    assert found.worst_difference == pytest.approx(0.1)


def test_differences_count_up_to_the_token_at_which_answers_part_and_no_further() -> None:
    one, other = answer_of("abcd"), answer_of("abXd")
    other.candidates[2]["a"] += 0.25
    other.candidates[3]["a"] += 9.0
    assert largest_gap(one, other) == pytest.approx(0.25)
    other.candidates[1] = {"else": -1.0}
    assert largest_gap(one, other) == float("inf")


def test_latency_is_that_of_answers_that_did_not_fail() -> None:
    found = latency([answer_of("abc"), answer_of("abcdefgh", error="late")])
    assert (found.first_p50, found.token_p50, found.token_p99) == pytest.approx((100.0, 100.0, 100.0))
    assert np.isnan(latency([]).first_p50)
