"""Views for balancing must share memory with what the kernels read, one row per slot, and hold expert tensors only."""

from __future__ import annotations

import pytest
import torch

from worker_agent.moe.weights import movable_weights


def test_views_are_rows_of_the_same_memory():
    named = {
        "w13_weight": torch.randn(3, 4, 5),
        "w2_weight": torch.randn(3, 5, 2),
        "w2_weight_scale": torch.randn(3, 7, 5).transpose(1, 2),
        "w13_weight_scale": torch.randn(3),
        "e_score_correction_bias": torch.randn(9),
        "shared_experts.up_proj.weight": torch.randn(3, 4),
        "gate.weight": torch.randn(9, 5),
        "_shared_experts.gate_up_proj.weight": torch.randn(3, 4),
        "_gate.weight": torch.randn(3, 5),
    }
    views = movable_weights(0, 3, named.items())
    assert {name: list(view.shape) for name, view in views.items()} == {
        "w13_weight": [3, 20],
        "w2_weight": [3, 10],
        "w2_weight_scale": [3, 35],
        "w13_weight_scale": [3, 1],
    }
    for name, view in views.items():
        assert view.data_ptr() == named[name].data_ptr()
        view[1] = 42.0
        assert (named[name][1] == 42.0).all()
        assert not (named[name][0] == 42.0).any()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 4), r"layer 6: w2_weight must have the shape \[3, \.\.\.\], got \[2, 4\]"),
        (torch.zeros(()), r"layer 6: w2_weight must have the shape \[3, \.\.\.\], got \[\]"),
        (torch.zeros(3, 8)[:, ::2], "layer 6: w2_weight must be contiguous"),
        (torch.zeros(3, 8, 4)[:, ::2], "layer 6: w2_weight must be contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_moved(tensor: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        movable_weights(6, 3, [("w2_weight", tensor)])
