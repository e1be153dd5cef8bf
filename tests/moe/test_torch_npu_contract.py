"""Every operator must be called as torch_npu declares it, so that what runs here on a CPU runs on an NPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.moe.cases import Case, alone
from worker_agent.moe import DenseMoE, seeded_experts
from worker_agent.moe.dispatch import build_dispatcher
from worker_agent.moe.dispatch.selection import DISPATCHER_NAMES
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.operators import Operators, reference

SCHEMAS = [
    line
    for line in Path(__file__).with_name("torch_npu_2_13_0.schemas").read_text().splitlines()
    if not line.startswith("#")
]
NAMES = [schema.partition("(")[0] for schema in SCHEMAS]


def grouped_matmul_of_codes(*args: Any, output_dtype: int | None = None, **kwargs: Any) -> list[torch.Tensor]:
    """torch_npu declares types as integers, which is how they arrive behind a schema."""
    types = {6: torch.float32, 15: torch.bfloat16}
    return reference.npu_grouped_matmul(*args, output_dtype=types.get(output_dtype), **kwargs)


@pytest.fixture(scope="module")
def declared() -> Iterator[SimpleNamespace]:
    """The operators with torch_npu's own schemas, which check every argument and return, over the reference."""
    library = torch.library.Library("torch_npu_contract", "DEF")
    behind = {name: getattr(reference, name) for name in NAMES} | {
        "npu_grouped_matmul": grouped_matmul_of_codes
    }
    for schema, name in zip(SCHEMAS, NAMES, strict=True):
        library.define(schema)
        library.impl(name, behind[name], "CPU")
    namespace = torch.ops.torch_npu_contract
    yield SimpleNamespace(**{name: getattr(namespace, name) for name in NAMES})
    library._destroy()


def test_every_operator_of_the_contract_is_declared():
    used = {name for name in vars(Operators) if name.startswith("npu_")}
    assert used == set(NAMES) == set(reference.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_contract_and_reference_agree(name: str):
    promised = list(inspect.signature(getattr(Operators, name)).parameters.values())[1:]
    assert list(inspect.signature(getattr(reference, name)).parameters.values()) == promised


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
@pytest.mark.parametrize("quantized", [False, True])
def test_the_layer_calls_operators_as_declared(declared: SimpleNamespace, dispatcher: str, quantized: bool):
    case = Case(dispatcher, experts=8, slots=8, top_k=3, tokens=(6,), quantized=quantized)
    layer = alone(case)
    layer._operators = declared
    layer._dispatcher = build_dispatcher(dispatcher, EpGroup(None), case.slots, declared)
    tokens = case.step(0)
    expected = alone(case) if quantized else DenseMoE(case.shape, seeded_experts(case.shape))
    torch.testing.assert_close(layer(*tokens), expected(*tokens))


def test_an_argument_that_is_not_declared_fails(declared: SimpleNamespace):
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'active_rows'"):
        declared.npu_swiglu(torch.zeros(2, 4), active_rows=3)
