"""Weights must be applied once, and choices without a row must add nothing, whatever memory holds in their place."""

from __future__ import annotations

import pytest
import torch

from worker_agent.moe.dispatch.interface import DispatchRequest, WeightAndReduce, Weights
from worker_agent.moe.operators import reference

ROWS_NH = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
ROW_OF_CHOICE = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
WEIGHTS_TK = torch.tensor([[0.5, 0.25], [2.0, 4.0]])
LAST_ABSENT_TK = torch.tensor([[False, False], [False, True]])


@pytest.mark.parametrize(
    ("weights_TK", "expected"),
    [(WEIGHTS_TK, [[50.25, 100.5], [20.0, 40.0]]), (None, [[101.0, 202.0], [10.0, 20.0]])],
)
def test_a_choice_without_a_row_adds_nothing(weights_TK: torch.Tensor | None, expected: list[list[float]]):
    reduce = WeightAndReduce(ROW_OF_CHOICE, 2, weights_TK, LAST_ABSENT_TK)
    assert reduce(reference, ROWS_NH.clone()).tolist() == expected


def test_memory_that_nobody_wrote_is_not_read():
    nobody_TK = torch.ones(2, 2, dtype=torch.bool)
    reduce = WeightAndReduce(torch.full((4,), -1, dtype=torch.int32), 2, WEIGHTS_TK, nobody_TK)
    assert reduce(reference, torch.full((3, 2), torch.nan)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert reduce(reference, torch.empty(0, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("experts_weigh", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_go_to_one_place(experts_weigh: bool, masked: bool):
    ids_TK = torch.tensor([[0, 1], [1, -1 if masked else 0]])
    request = DispatchRequest(
        torch.zeros(2, 2), ids_TK, WEIGHTS_TK, torch.arange(2), masked=masked, experts_weigh=experts_weigh
    )
    weights = Weights.of(request)
    there, absent = weights.by_experts_TK, weights.by_combine_TK
    if not experts_weigh:
        there, absent = absent, there
    assert absent is None
    assert there is not None
    assert there.tolist() == [[0.5, 0.25], [2.0, 0.0 if masked else 4.0]]
