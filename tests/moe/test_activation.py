"""Every activation must be what its model's definition says, value by value."""

from __future__ import annotations

import math

import pytest
import torch

from worker_agent.moe import Activation
from worker_agent.moe.dense import plain_activation


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_definition(activation: Activation, gate: float, up: float) -> float:
    """In Python's own numbers; without a gate ``gate`` is the only input."""
    if activation is Activation.SWIGLUOAI:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return gate * sigmoid(1.702 * gate) * (up + 1)
    kind = activation.value.removesuffix("_no_mul")
    inner = {
        "silu": gate * sigmoid(gate),
        "gelu": gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))),
        "relu2": max(gate, 0.0) ** 2,
    }[kind]
    return inner * up if activation.gated else inner


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_activation_is_its_definition(activation: Activation, dtype: torch.dtype):
    values = [-20.0, -7.5, -1.25, -0.5, 0.0, 0.75, 3.0, 7.25, 20.0]
    gate_N = torch.tensor([gate for gate in values for _ in values], dtype=dtype)
    up_N = torch.tensor(values * len(values), dtype=dtype)
    first = torch.stack([gate_N, up_N], dim=1) if activation.gated else gate_N.unsqueeze(1)
    pairs = zip(gate_N.tolist(), up_N.tolist(), strict=True)
    expected_N1 = torch.tensor([[by_definition(activation, *pair)] for pair in pairs], dtype=dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 2e-3}
    torch.testing.assert_close(plain_activation(activation, first), expected_N1, **tolerance)
    out_N1 = torch.empty_like(expected_N1)
    found_N1 = activation.into(first.clone(), out_N1)
    assert found_N1.data_ptr() == out_N1.data_ptr()
    torch.testing.assert_close(out_N1, expected_N1, **tolerance)
