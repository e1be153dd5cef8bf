"""Tests that operator calls match torch_npu's declarations, so that code that runs on a CPU also runs on an NPU.

``torch_npu/*.schemas`` and ``*.results.json`` are extracted from torch_npu's wheel. ``tools/torch_npu_contract.py``
describes the extraction and compares the files with the wheel.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_lab.layer import layer as layer_module
from eplb_lab.layer.compose import LayerOptions
from eplb_lab.layer.dispatch import DISPATCHER_NAMES, SHARED_TOKEN_DISPATCHERS, MC2Variant
from eplb_lab.layer.operators import Operators, reference
from tests.moe.cases import MC2_VARIANTS, Case, alone
from tests.moe.operators.constraints import CHECKS
from tests.moe.torch_npu.calls import OPERATORS, calls, results

EXTRACT = Path(__file__).parent.parent / "torch_npu"
SCHEMAS = [line for line in (EXTRACT / "2.14.0.schemas").read_text().splitlines() if not line.startswith("#")]
NAMES = [schema.partition("(")[0] for schema in SCHEMAS]
RESULTS = json.loads((EXTRACT / "2.14.0.results.json").read_text())


def grouped_matmul_of_codes(*args: Any, output_dtype: int | None = None, **kwargs: Any) -> list[torch.Tensor]:
    """Accept output dtypes as integers, as in torch_npu's schemas."""
    types = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
    return reference.npu_grouped_matmul(*args, output_dtype=types.get(output_dtype), **kwargs)


@pytest.fixture(scope="module")
def declared() -> Iterator[SimpleNamespace]:
    """Yield the reference operators behind torch_npu's own schemas, which check all arguments and return values."""
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
    ours = {name for name in vars(Operators) if name.startswith("npu_")}
    assert ours == set(OPERATORS) == set(NAMES) == set(CHECKS)
    assert {call.operator for call in calls("meta").values()} == set(NAMES)


@pytest.mark.parametrize("schema", SCHEMAS, ids=NAMES)
def test_every_argument_and_its_default_match_torch_npu(schema: str):
    schema_arguments = {argument.name: argument for argument in torch._C.parse_schema(schema).arguments}
    parameters = list(inspect.signature(getattr(Operators, schema.partition("(")[0])).parameters.values())
    positional = [argument.name for argument in schema_arguments.values() if not argument.kwarg_only]
    for place, argument in enumerate(parameters):
        if argument.kind is inspect.Parameter.KEYWORD_ONLY:
            assert schema_arguments[argument.name].kwarg_only
        else:
            # torch calls one tensor "self", a name that our Python signatures cannot use.
            assert positional[place] in (argument.name, "self")
        schema_argument = schema_arguments[
            positional[place] if argument.name not in schema_arguments else argument.name
        ]
        if argument.default is not inspect.Parameter.empty:
            assert schema_argument.default_value == argument.default


def test_results_have_the_dtypes_and_shapes_of_torch_npu(declared: SimpleNamespace):
    actual_results = results("cpu", lambda name: getattr(declared, name))
    assert actual_results == {title: expected for title, expected in RESULTS.items() if title != "about"}


@pytest.mark.parametrize(
    ("dispatcher", "mc2"),
    [*((name, None) for name in DISPATCHER_NAMES), *(("mc2", variant) for variant in MC2_VARIANTS)],
    ids=str,
)
@pytest.mark.parametrize("quantized", [False, True])
def test_the_layer_calls_operators_as_declared(
    declared: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    dispatcher: str,
    mc2: MC2Variant | None,
    quantized: bool,
):
    case = Case(dispatcher, experts=8, slots=8, top_k=3, tokens=(6,), quantized=quantized)
    gathers = quantized and dispatcher in SHARED_TOKEN_DISPATCHERS
    expected = alone(case) if quantized else case.dense()
    monkeypatch.setattr(layer_module, "operators_for", lambda device: declared)
    layer = alone(case, LayerOptions(quantize_before_gather=gathers, mc2=mc2))
    tokens = case.step(0)
    active_T = torch.arange(tokens[0].shape[0]) < 4
    expected_TH = expected(*tokens).masked_fill(~active_T.unsqueeze(1), 0.0)
    torch.testing.assert_close(layer(*tokens, active=active_T), expected_TH)
    torch.testing.assert_close(layer(*tokens), expected(*tokens))


def test_an_undeclared_argument_is_rejected(declared: SimpleNamespace):
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'active_rows'"):
        declared.npu_swiglu(torch.zeros(2, 4), active_rows=3)
