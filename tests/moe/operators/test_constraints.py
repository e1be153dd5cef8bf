"""Tests that the layer's operator calls satisfy torch_npu's documented constraints for every pair of options."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_lab.layer import LayerOptions
from eplb_lab.layer import layer as layer_module
from eplb_lab.layer.dispatch import MC2Variant
from eplb_lab.layer.operators import check_dtype, reference
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import MC2_VARIANTS, Case, layer_on
from tests.moe.operators.constraints import CHECKS, checked
from tests.moe.option_rows import ROWS, call, case_of, layer_of, length_of, step_of
from tests.moe.pairwise import Row
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.moe.torch_npu.calls import calls, form_of

BF16_ROWS, FP16_ROWS = (
    [
        row
        | {"dtype": dtype, "kind": "W8A8" if row["kind"] == "W8A8" else "grouped"}
        # MC2 supports at most 16 choices per token, and some of these rows have more.
        | ({"top_k": "some"} if row["dispatcher"] == "mc2" and row["top_k"] == "all" else {})
        for row in ROWS
    ]
    for dtype in (torch.bfloat16, torch.float16)
)


def run_checked(row: Row, monkeypatch: pytest.MonkeyPatch, **changed: int) -> set[tuple[Any, ...]]:
    """Run one step of a modified case with checked operators, and return the recorded call forms."""
    operators, called = checked()
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    monkeypatch.setattr("tests.moe.option_rows.reference", operators)
    case = replace(case_of(row, seed=0), **changed)  # type: ignore[arg-type]

    def one_step(group: SimulatedGroup) -> None:
        call(layer_of(case, row, group), row, step_of(case, row, group.rank), length_of(case, row))

    run_simulated(case.ranks, one_step)
    return called


@pytest.mark.parametrize("rows", [BF16_ROWS, FP16_ROWS[::2]], ids=["bfloat16", "float16"])
def test_every_operator_is_called_within_its_documented_constraints(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
):
    called: set[tuple[Any, ...]] = set()
    for row in rows:
        try:
            called |= run_checked(row, monkeypatch)
        except AssertionError as broken:
            raise AssertionError(f"{broken}: {row}") from broken
    assert {operator for operator, *_ in called} == set(CHECKS)
    # The wheel's schemas and shape functions are checked against these calls.
    contract_forms = {form_of(call.operator, call.args, call.kwargs) for call in calls("cpu").values()}
    assert called - contract_forms == set()


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "moge", "mc2"])
@pytest.mark.parametrize("kind", ["grouped", "W8A8"])
def test_layers_with_one_slot_per_rank_satisfy_the_constraints(
    dispatcher: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """torch_npu does not accept a group list with a single count."""
    row = next(row for row in BF16_ROWS if row["dispatcher"] == dispatcher and row["tokens"] == "different")
    row = row | {"kind": kind, "ranks": 2, "shared": "plain", "weigh_on_input": False, "mask": "none"}
    row["quantize_before_gather"] &= kind == "W8A8"
    called = run_checked(row, monkeypatch, experts=2, slots=1, top_k=2 if dispatcher == "moge" else 1)
    assert "npu_grouped_matmul" in {operator for operator, *_ in called}


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
@pytest.mark.parametrize("length", [None, 8])
def test_mc2_has_its_communication_domain_to_itself(
    variant: MC2Variant, length: int | None, monkeypatch: pytest.MonkeyPatch
):
    """No other exchange may use this domain, because ranks write into each other's memory through its buffers."""
    thread_state = threading.local()
    operators = SimpleNamespace(**{name: getattr(reference, name) for name in CHECKS})

    def fused(operator: Any, *args: Any, **kwargs: Any) -> Any:
        thread_state.fused = True
        result = operator(*args, **kwargs)
        thread_state.fused = False
        return result

    for name in ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"):
        setattr(operators, name, partial(fused, getattr(reference, name)))
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    case = Case("mc2", experts=8, slots=4, top_k=3, tokens=(4, 0, 2))
    exchanges: list[tuple[str, bool]] = []

    def one_step(group: SimulatedGroup) -> None:
        domain = group.twin("mc2")
        for each in (group, domain):
            start = each.start_all_to_all

            def recorded(*args: Any, start: Any = start, name: str = each.name) -> Any:
                exchanges.append((name, getattr(thread_state, "fused", False)))
                return start(*args)

            each.start_all_to_all = recorded  # type: ignore[method-assign]
        layer = layer_on(
            case,
            group,
            dispatcher=("mc2", "all2allv"),
            mc2_group=domain,
            options=LayerOptions(mc2=variant, split="step"),
        )
        tokens = case.step(group.rank)
        layer(*tokens, length=length)
        layer(*tokens, dispatcher="all2allv")

    run_simulated(3, one_step)
    assert set(exchanges) == {("mc2", True), ("simulated", False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_no_npu_operator_supports_are_rejected(dtype: torch.dtype):
    check_dtype(3, "cpu", dtype)
    check_dtype(3, "npu", torch.bfloat16)
    with pytest.raises(ValueError, match=f"layer 3: on an NPU the tokens' dtype must be .*got {dtype}"):
        check_dtype(3, "npu", dtype)


@pytest.mark.parametrize(
    ("backend", "name"), [("hccl", "hccl name"), ("cpu:gloo,npu:hccl", "hccl name"), ("gloo", "torch name")]
)
def test_a_group_with_several_backends_has_its_hccl_name(
    backend: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    communicator = SimpleNamespace(get_hccl_comm_name=lambda rank: "hccl name")
    process_group: Any = SimpleNamespace(group_name="torch name", _get_backend=lambda device: communicator)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: backend)
    monkeypatch.setattr("torch.device", lambda name: name)
    assert RankGroup(process_group).name == name
