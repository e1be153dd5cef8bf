"""The layer's own calls, with every pair of its options, must keep to what torch_npu documents of each operator."""

from __future__ import annotations

import inspect
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.moe.operators import constraints
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


def run_checked(row: Row, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """One step with checked operators; the forms in which they were called."""
    operators, called = checked()
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    monkeypatch.setattr("tests.moe.option_rows.reference", operators)
    case = case_of(row, seed=0)

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
    row = row | {"kind": kind, "ranks": 2, "shared": "plain", "weigh_on_input": False}
    row["quantize_before_gather"] &= kind == "W8A8"
    operators, called = checked()
    monkeypatch.setattr(layer_module, "operators_for", lambda device: operators)
    case = case_of(row, seed=0)
    small = type(case)(**(vars(case) | {"experts": 2, "slots": 1, "top_k": 2 if dispatcher == "moge" else 1}))

    def one_step(group: SimulatedGroup) -> None:
        layer_of(small, row, group)(*small.step(group.rank))

    run_simulated(2, one_step)
    assert "npu_grouped_matmul" in {operator for operator, *_ in called}


T, K, H, E, G = 3, 2, 4, 6, 2
"""Of the calls that checks are held by."""


def allowed_calls() -> dict[str, dict[str, Any]]:
    """One call of each operator that is allowed, by the names of its check's arguments."""
    rows_NH, ids_TK = torch.zeros(T * K, H).bfloat16(), torch.tensor([[0, 1], [2, 3], [4, 5]])
    routing = {
        "expert_num": E,
        "active_expert_range": [2, 4],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_num": T * K,
        "scale": torch.zeros(T),
    }
    product = {
        "split_item": 2,
        "group_type": 0,
        "group_list": torch.tensor([4, 2]),
        "group_list_type": 1,
        "bias": [torch.zeros(G, 8)],
    }
    exchange = {
        "x": rows_NH[:T],
        "expert_ids": ids_TK.int(),
        "x_active_mask": torch.ones(T, dtype=torch.bool),
    }
    return {
        "permute": {"tokens": rows_NH[:T], "indices": ids_TK},
        "unpermute": {"permuted_tokens": rows_NH, "sorted_indices": torch.arange(T * K), "probs": None},
        "init_routing": {"x": torch.zeros(T, H, dtype=torch.int8), "expert_idx": ids_TK.int()} | routing,
        "grouped_matmul": {"x": [rows_NH], "weight": [torch.zeros(G, H, 8).bfloat16()]} | product,
        "dynamic_quant": {"input": rows_NH},
        "swiglu": {"input": rows_NH},
        "distribute": exchange | {"moe_expert_num": E, "expert_scales": torch.zeros(T, K)},
    }


W8A8 = {
    "x": [torch.zeros(T * K, H, dtype=torch.int8)],
    "weight": [torch.zeros(G, H, 8, dtype=torch.int8)],
    "bias": None,
    "scale": [torch.zeros(G, 8).bfloat16()],
    "per_token_scale": [torch.zeros(T * K)],
    "output_dtype": torch.bfloat16,
}
NARROW, NOTHING = torch.zeros(T, H), torch.zeros(0, H).bfloat16()
DYNAMIC = {"x": torch.zeros(T, H), "quant_mode": 1}
SPOILED: list[tuple[str, dict[str, Any], str]] = [
    ("permute", {"tokens": NARROW.to(torch.int8)}, "bfloat16"),
    ("permute", {"tokens": torch.zeros(T).bfloat16()}, r"\[T, H\]"),
    ("permute", {"tokens": NOTHING}, "not empty"),
    ("permute", {"indices": torch.arange(T)}, r"\[T, K\]"),
    ("permute", {"indices": torch.zeros(T, K).int()}, "int64"),
    ("permute", {"indices": torch.full((T, K), 2**24)}, "24 bits"),
    ("permute", {"indices": torch.full((T, K), -1)}, "24 bits"),
    ("permute", {"indices": torch.zeros(1, 2**24, dtype=torch.int64)}, "24 bits count"),
    ("permute", {"indices": torch.zeros(T, 513, dtype=torch.int64)}, "512 choices"),
    ("unpermute", {"permuted_tokens": NARROW}, "bfloat16"),
    ("unpermute", {"permuted_tokens": torch.zeros(T).bfloat16()}, r"\[N, H\]"),
    ("unpermute", {"permuted_tokens": NOTHING}, "not empty"),
    ("unpermute", {"sorted_indices": torch.zeros(T * K)}, "integers"),
    ("unpermute", {"sorted_indices": torch.zeros(T, K).int()}, r"\[T \* K\]"),
    ("unpermute", {"probs": torch.zeros(T, K)}, "rows' dtype"),
    ("init_routing", {"x": torch.zeros(T, H).double()}, "known dtype"),
    ("init_routing", {"x": torch.zeros(T)}, r"\[T, H\]"),
    ("init_routing", {"x": torch.zeros(0, H)}, "not empty"),
    ("init_routing", {"expert_idx": torch.zeros(T).int()}, r"\[T, K\]"),
    ("init_routing", {"expert_idx": torch.zeros(T, K).long()}, "int32"),
    ("init_routing", {"expert_num": 10241}, "10240"),
    ("init_routing", {"expert_num": 5}, "below expert_num"),
    ("init_routing", {"active_expert_range": [2, 7]}, "within expert_num"),
    ("init_routing", {"expert_tokens_num_type": 0}, "no cumulative"),
    ("init_routing", {"expert_tokens_num_flag": False}, "always returned"),
    ("init_routing", {"quant_mode": 0}, "dynamic quantization"),
    ("init_routing", {"active_num": -2}, "at least -1"),
    ("init_routing", {"quant_mode": 1}, "not quantized again"),
    ("init_routing", {"scale": torch.zeros(T).bfloat16()}, "float32"),
    ("init_routing", {"scale": torch.zeros(T, 1)}, "a scale for each token"),
    ("init_routing", DYNAMIC, "a scale for each token"),
    ("grouped_matmul", {"x": [NOTHING]}, "not empty"),
    ("grouped_matmul", {"x": [torch.zeros(H, T * K).bfloat16().t()]}, "not transposed"),
    ("grouped_matmul", {"x": [torch.zeros(T, K, H).bfloat16()]}, r"\[N, K\]"),
    ("grouped_matmul", {"weight": [torch.zeros(H, 8).bfloat16()]}, r"\[G, K, M\]"),
    ("grouped_matmul", {"weight": [torch.empty(G, 1, 65536).bfloat16()]}, "65536"),
    ("grouped_matmul", {"split_item": 0}, "one result"),
    ("grouped_matmul", {"group_type": -1}, "rows are grouped"),
    ("grouped_matmul", {"group_list": torch.tensor([4, 2]).int()}, "int64"),
    ("grouped_matmul", {"group_list": torch.tensor([4, 2, 0])}, "for each group"),
    ("grouped_matmul", {"group_list": torch.tensor([6]), "weight": [torch.zeros(1, H, 8).bfloat16()]}, "one"),
    ("grouped_matmul", {"group_list": torch.tensor([7, -1])}, "less than no rows"),
    ("grouped_matmul", {"group_list": torch.tensor([4, 2]), "group_list_type": 0}, "less than no rows"),
    ("grouped_matmul", {"group_list": torch.tensor([4, 3])}, "more rows"),
    ("grouped_matmul", {"weight": [torch.zeros(G, H, 8).half()]}, "one dtype"),
    (
        "grouped_matmul",
        {"x": [NARROW], "weight": [torch.zeros(G, H, 8)], "group_list": torch.ones(2).long()},
        "16",
    ),
    ("grouped_matmul", {"bias": [torch.zeros(8)]}, "each column"),
    ("grouped_matmul", {"bias": [torch.zeros(G, 8).bfloat16()]}, "fit the rows"),
    ("grouped_matmul", W8A8 | {"weight": [torch.zeros(G, H, 8).bfloat16()]}, "are int8"),
    ("grouped_matmul", W8A8 | {"output_dtype": torch.float32}, "16 bits"),
    ("grouped_matmul", W8A8 | {"scale": [torch.zeros(G, 8)]}, "fit the output"),
    ("grouped_matmul", W8A8 | {"per_token_scale": [torch.zeros(T * K).bfloat16()]}, "float32"),
    ("grouped_matmul", W8A8 | {"per_token_scale": [torch.zeros(T)]}, "each row"),
    ("grouped_matmul", W8A8 | {"bias": [torch.zeros(G, 8)]}, "before scaling"),
    ("dynamic_quant", {"input": NARROW}, "float16 or bfloat16"),
    ("dynamic_quant", {"input": torch.zeros(H).bfloat16()}, "2-D"),
    ("dynamic_quant", {"input": NOTHING}, "not empty"),
    ("swiglu", {"input": torch.zeros(T, H, dtype=torch.int8)}, "floating-point"),
    ("swiglu", {"input": torch.zeros([2] * 9)}, "dimensions"),
    ("swiglu", {"input": NOTHING}, "not empty"),
    ("swiglu", {"input": torch.zeros(T, 3)}, "two halves"),
    ("distribute", {"x": NARROW}, "float16 or bfloat16"),
    ("distribute", {"expert_ids": torch.zeros(T, K).long()}, "int32"),
    ("distribute", {"expert_ids": torch.zeros(0, K).int()}, "every rank has a token"),
    ("distribute", {"expert_ids": torch.zeros(513, K).int()}, "up to 512"),
    ("distribute", {"expert_ids": torch.full((T, K), -1).int()}, "those of experts"),
    ("distribute", {"moe_expert_num": 5}, "those of experts"),
    ("distribute", {"expert_ids": torch.zeros(T, E + 1).int()}, "no more choices"),
    ("distribute", {"x_active_mask": torch.ones(T)}, "a mask is bool"),
    ("distribute", {"x_active_mask": torch.ones(K, dtype=torch.bool)}, "of tokens or of choices"),
    ("distribute", {"expert_ids": torch.zeros(T, K).int()}, "distinct"),
    ("distribute", {"expert_scales": torch.zeros(T, K).bfloat16()}, "float32"),
]


def call_check(name: str, arguments: dict[str, Any]) -> None:
    given = {key: value for key, value in arguments.items() if value is not None or key == "probs"}
    if name == "distribute":
        x, expert_ids, experts = (given.pop(key) for key in ("x", "expert_ids", "moe_expert_num"))
        constraints.distribute(x, expert_ids, "group", 1, 0, experts, **given)
    else:
        getattr(constraints, name)(**given)


@pytest.mark.parametrize(("name", "spoiled", "message"), SPOILED)
def test_the_checks_see_a_call_that_is_not_allowed(name: str, spoiled: dict[str, Any], message: str):
    call_check(name, allowed_calls()[name])
    with pytest.raises(AssertionError, match=message):
        call_check(name, allowed_calls()[name] | spoiled)


def test_every_assertion_of_every_check_is_seen_to_fail():
    call_check("grouped_matmul", allowed_calls()["grouped_matmul"] | W8A8)
    lines = inspect.getsource(constraints).splitlines()
    assertions = {at for at, line in enumerate(lines, 1) if line.lstrip().startswith("assert ")}
    failed = set()
    for name, spoiled, _ in SPOILED:
        try:
            call_check(name, allowed_calls()[name] | spoiled)
        except AssertionError as broken:
            failed.add(traceback.extract_tb(broken.__traceback__)[-1].lineno)
    assert [lines[at - 1] for at in sorted(assertions - failed)] == []


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
