"""Tests of the parts into which a plan is split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import part_end, staging_rows

RECEIVED = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=12)


@given(RECEIVED, st.integers(0, 12))
def test_parts_cover_the_plan_and_fill_the_staging_buffers(received: list[list[int]], rows: int) -> None:
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


@pytest.mark.parametrize(
    ("mib", "expert_mib", "rows"), [(512, 44, 11), (512, 1, 36), (100, 44, 2), (0, 44, 0), (512, 0, 36)]
)
def test_staging_is_limited_in_bytes_and_to_four_layers(mib: int, expert_mib: int, rows: int) -> None:
    assert staging_rows(9, expert_mib << 20, mib << 20) == rows
