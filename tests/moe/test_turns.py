"""A choice's turn is the number of choices of the same expert before it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.moe.turns import turns


@given(st.lists(st.integers(0, 5), max_size=30))
def test_turns_count_those_before(ids: list[int]) -> None:
    ids_N = torch.tensor(ids, dtype=torch.int64)
    found_N = turns(ids_N, torch.bincount(ids_N, minlength=6))
    assert found_N.tolist() == [ids[:n].count(expert) for n, expert in enumerate(ids)]
