"""The layer's own calls, with every pair of its options, must keep to what torch_npu documents of each operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.moe.operators.constraints import CHECKS, checked
from tests.moe.pairwise import Row
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.moe.test_option_pairs import MOST_TOKENS, ROWS, case_of, layer_of, step_of
from worker_agent.moe import placed_layer as layer_module
from worker_agent.moe.operators import check_dtype, reference
from worker_agent.moe.rank_group import RankGroup

BF16_ROWS, FP16_ROWS = (
    [row | {"dtype": dtype, "kind": "W8A8" if row["kind"] == "W8A8" else "grouped"} for row in ROWS]
    for dtype in (torch.bfloat16, torch.float16)
)


def run_checked(row: Row, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """One step with checked operators; the operators that were called."""
    operators, called = checked()
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    monkeypatch.setattr("tests.moe.test_option_pairs.reference", operators)
    case = case_of(row, seed=0)
    length = {"asked for": None, "longest": max(case.tokens), "longer": MOST_TOKENS + 3}[row["length"]]

    def one_step(group: RankGroup) -> None:
        step = step_of(case, row, group.rank)
        layer = layer_of(case, row, group)
        layer(*step.tokens, active=step.active, phase=step.phase, length=length)

    run_simulated(case.ranks, one_step)
    return called


@pytest.mark.parametrize("rows", [BF16_ROWS, FP16_ROWS[::2]], ids=["bfloat16", "float16"])
def test_every_operator_is_called_within_its_documented_constraints(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
):
    called: set[str] = set()
    for row in rows:
        try:
            called |= run_checked(row, monkeypatch)
        except AssertionError as broken:
            raise AssertionError(f"{broken}: {row}") from broken
    assert called == set(CHECKS) == set(reference.__all__)


@pytest.mark.parametrize("dispatcher", ["all2allv", "allgather", "moge", "mc2"])
@pytest.mark.parametrize("kind", ["grouped", "W8A8"])
def test_one_slot_per_rank(dispatcher: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """A list of one count is not allowed."""
    row = next(row for row in BF16_ROWS if row["dispatcher"] == dispatcher and row["tokens"] == "different")
    row = row | {"kind": kind, "ranks": 2, "shared": "plain", "weigh_on_input": False}
    operators, called = checked()
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    case = case_of(row, seed=0)
    small = type(case)(**(vars(case) | {"experts": 2, "slots": 1, "top_k": 2 if dispatcher == "moge" else 1}))

    def one_step(group: RankGroup) -> None:
        layer_of(small, row, group)(*small.step(group.rank))

    run_simulated(2, one_step)
    assert "npu_grouped_matmul" in called


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("npu_moe_token_permute", (torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 1).long())),
        ("npu_moe_token_permute", (torch.zeros(0, 2).bfloat16(), torch.zeros(0, 1).long())),
        ("npu_dynamic_quant", (torch.zeros(2, 2),)),
        ("npu_dynamic_quant", (torch.zeros(0, 2).bfloat16(),)),
    ],
)
def test_the_checks_see_a_call_that_is_not_allowed(name: str, arguments: tuple[Any, ...]):
    with pytest.raises(AssertionError):
        CHECKS[name](*arguments)


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
