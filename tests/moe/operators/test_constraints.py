"""The layer's own calls, with every pair of its options, must keep to what torch_npu documents of each operator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.moe.operators.constraints import CHECKS, checked
from tests.moe.option_rows import ROWS, call, case_of, layer_of, length_of, step_of
from tests.moe.pairwise import Row
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.moe.torch_npu.calls import calls, form_of
from worker_agent.moe import layer as layer_module
from worker_agent.moe.operators import check_dtype, reference
from worker_agent.moe.rank_group import RankGroup

BF16_ROWS, FP16_ROWS = (
    [row | {"dtype": dtype, "kind": "W8A8" if row["kind"] == "W8A8" else "grouped"} for row in ROWS]
    for dtype in (torch.bfloat16, torch.float16)
)


def run_checked(row: Row, monkeypatch: pytest.MonkeyPatch, **changed: int) -> set[tuple[Any, ...]]:
    """One step with checked operators, of a changed case; the forms in which they were called."""
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
    assert {operator for operator, *_ in called} == set(CHECKS) == set(reference.__all__)
    # These calls are the ones that the wheel's schemas and shape functions are held against.
    known = {form_of(call.operator, call.args, call.kwargs) for call in calls("cpu").values()}
    assert called - known == set()


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "moge", "mc2"])
@pytest.mark.parametrize("kind", ["grouped", "W8A8"])
def test_one_slot_per_rank(dispatcher: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """A list of one count is not allowed."""
    row = next(row for row in BF16_ROWS if row["dispatcher"] == dispatcher and row["tokens"] == "different")
    row = row | {"kind": kind, "ranks": 2, "shared": "plain", "weigh_on_input": False, "mask": "none"}
    row["quantize_before_gather"] &= kind == "W8A8"
    called = run_checked(row, monkeypatch, experts=2, slots=1, top_k=2 if dispatcher == "moge" else 1)
    assert "npu_grouped_matmul" in {operator for operator, *_ in called}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_no_operator_takes_are_refused_at_once(dtype: torch.dtype):
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
