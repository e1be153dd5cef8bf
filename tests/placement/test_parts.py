"""Tests of the parts that a plan is switched in."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import part_end, parts

RECEIVED = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=12)


@given(RECEIVED, st.integers(0, 12))
def test_parts_cover_the_plan_and_are_as_long_as_the_staging_admits(
    received: list[list[int]], rows: int
) -> None:
    received_LR = np.array(received)
    begin = 0
    while begin < len(received_LR):
        end = part_end(received_LR, begin, rows)
        assert begin < end <= len(received_LR)
        peak = received_LR[begin:end].sum(axis=0).max()
        assert peak <= rows or end == begin + 1
        if end < len(received_LR):
            assert received_LR[begin : end + 1].sum(axis=0).max() > rows
        begin = end


def test_the_example_of_its_docstring_holds() -> None:
    assert doctest.testmod(parts) == (0, 3)
