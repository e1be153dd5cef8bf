"""Tests of the comparison of answers: rounding, ties and differences."""

import math

import pytest

from eplb_lab.conformance.comparison import Tolerance, compare
from eplb_lab.conformance.engine import Answer

TOLERANCE = Tolerance(rounding=1e-4, ties=0.3, largest_tie=0.02)
ANSWER = Answer((5, 6, 7), (-0.1, -0.2, -0.3))


def compared(ids, logprobs, tolerance=TOLERANCE):
    return compare([Answer(ids, logprobs)], [ANSWER], tolerance)


def test_rounding_does_not_count_as_a_difference():
    result = compared((5, 6, 7), (-0.10005, -0.2, -0.3))
    assert result.difference is None
    assert (result.tokens, result.ties) == (3, 0)
    assert result.largest == pytest.approx(5e-5)


def test_a_different_token_is_reported_with_its_position():
    result = compared((5, 9, 9), (-0.1, -0.7, -0.9))
    assert result.difference == "answer 0, token 1: id 9 (-0.7) instead of 6 (-0.2); 1 of 1 answers differ"
    assert result.tokens == 2


def test_equally_likely_tokens_are_a_tie_and_end_the_comparison():
    result = compared((5, 9, 9), (-0.1, -0.20001, -0.9), Tolerance(ties=0.5))
    assert result.difference is None
    assert (result.tokens, result.ties) == (2, 1)


def test_a_difference_in_log_probability_may_count_as_a_tie():
    result = compared((5, 6, 7), (-0.1, -0.21, -0.3), Tolerance(ties=0.5))
    assert (result.difference, result.ties) == (None, 1)


def test_too_many_ties_count_as_a_difference():
    result = compared((5, 6, 7), (-0.11, -0.21, -0.3))
    assert result.difference.startswith("2 ties in 3 tokens, the first in answer 0, token 0: id 5")


@pytest.mark.parametrize("logprob", [-0.25, math.nan])
def test_equal_tokens_with_different_log_probabilities_count_as_a_difference(logprob):
    assert compared((5, 6, 7), (-0.1, logprob, -0.3)).difference.startswith("answer 0, token 1")


def test_missing_tokens_and_answers_count_as_differences():
    assert compared((5, 6), (-0.1, -0.2)).difference.startswith("answer 0: 2 tokens instead of 3")
    assert compare([], [ANSWER], TOLERANCE).difference == "0 answers instead of 1"
