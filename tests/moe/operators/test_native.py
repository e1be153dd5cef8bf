"""Tests that token counting, table lookups and commits only launch operators that torch_npu declares for its device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engines.ascend_layers import EXPERTS, SLOTS, HostLayer, dispatch
from tests.moe.torch_npu.native import NATIVE, Launched
from worker_agent.adapters import engine_host
from worker_agent.adapters.vllm_ascend.host import _HostHeat
from worker_agent.swap.staging import copy_into

EXTRACT = (Path(__file__).parent.parent / "torch_npu" / "2.14.0.native").read_text().splitlines()
DECLARED = {line for line in EXTRACT if not line.startswith("#")}


def test_every_operator_in_use_is_declared() -> None:
    assert set(NATIVE) == DECLARED


@pytest.mark.parametrize("policy", [0, 1, 2, 3])
def test_a_pass_is_counted_with_declared_operators(monkeypatch: pytest.MonkeyPatch, policy: int) -> None:
    # Hide the counters from the host, as on a device.
    monkeypatch.setattr(engine_host, "host_view", lambda _: None)
    layers = [HostLayer(policy) for _ in range(3)]
    heat = _HostHeat(layers, EXPERTS, rows=4)
    with Launched() as launched:
        for layer in layers:
            heat.count_choices(dispatch(layer, [[0, 1]], torch.tensor([True])), gathers=False)
        heat.record(counts=True, own_tokens=True)
        heat.record(counts=False, own_tokens=False)
    assert "scatter_add_" in launched.names
    assert set(launched.names) <= DECLARED


def test_a_layer_is_committed_with_declared_operators() -> None:
    weights = [torch.zeros(SLOTS, 3, 5), torch.zeros(SLOTS, 2)]
    layer = SimpleNamespace(
        expert_map=torch.zeros(EXPERTS, dtype=torch.int32),
        log2phy=torch.zeros(EXPERTS, dtype=torch.int32),
        expert_weights=lambda: weights,
    )
    staged = [torch.ones_like(weight[:1]) for weight in weights]
    table_E = torch.arange(EXPERTS, dtype=torch.int32)
    with Launched() as launched:
        copy_into(layer, staged, [2], table_E, table_E)
    assert set(launched.names) == {"copy_"} <= DECLARED
    assert [weight.sum(dim=tuple(range(1, weight.dim()))).tolist() for weight in weights] == [
        [0, 0, 15, 0],
        [0, 0, 2, 0],
    ]
    assert layer.log2phy.tolist() == table_E.tolist()
