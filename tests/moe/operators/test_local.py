"""Tests that the reference operators match their slow, simple twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_lab.layer.operators import GroupListType, QuantMode, local, operators_for, reference

ROUTING = {
    "active_num": 10,
    "expert_num": 4,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "active_expert_range": [0, 4],
}
shapes = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))


def choices(tokens: int, top_k: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    return torch.randn(tokens, 3, generator=generator), ids_TK


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_permute_sorts_stably_and_unpermute_undoes_it(shape: tuple[int, int, int, int]):
    hidden_TH, ids_TK = choices(*shape)
    rows_NH, row_of_choice = reference.npu_moe_token_permute(hidden_TH, ids_TK)
    in_order = sorted(range(ids_TK.numel()), key=lambda choice: int(ids_TK.flatten()[choice]))
    for row, choice in enumerate(in_order):
        assert row_of_choice[choice] == row
        assert torch.equal(rows_NH[row], hidden_TH[choice // ids_TK.shape[1]])
    weights_TK = torch.rand(ids_TK.shape, generator=torch.Generator().manual_seed(1))
    restored_TH = reference.npu_moe_token_unpermute(rows_NH, row_of_choice, weights_TK)
    torch.testing.assert_close(restored_TH, hidden_TH * weights_TK.sum(dim=1, keepdim=True))


def test_permute_returns_the_requested_number_of_rows():
    hidden_TH, ids_TK = choices(4, 2, 3, seed=0)
    rows_NH, row_of_choice = reference.npu_moe_token_permute(hidden_TH, ids_TK, 5)
    assert rows_NH.shape == (5, 3)
    assert torch.equal(rows_NH, reference.npu_moe_token_permute(hidden_TH, ids_TK)[0][:5])
    assert sorted(row_of_choice.tolist()) == list(range(8))


@given(shapes, st.integers(0, 5), st.integers(1, 5), st.sampled_from(list(GroupListType)))
@settings(max_examples=40, deadline=None)
def test_init_routing_sorts_the_choices_in_the_active_range(
    shape: tuple[int, int, int, int], first: int, width: int, kind: GroupListType
):
    hidden_TH, ids_TK = choices(*shape)
    active = range(first, first + width)
    rows_NH, row_of_choice, tokens_G, _ = reference.npu_moe_init_routing_v2(
        hidden_TH,
        ids_TK,
        active_num=ids_TK.numel(),
        expert_num=10,
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=True,
        active_expert_range=[active.start, active.stop],
    )
    ids = ids_TK.flatten().tolist()
    kept = sorted(
        (choice for choice in range(len(ids)) if ids[choice] in active), key=lambda choice: ids[choice]
    )
    assert rows_NH.shape == (ids_TK.numel(), 3)
    assert kind.counts(tokens_G).tolist() == [ids.count(expert) for expert in active]
    assert row_of_choice.tolist() == [
        kept.index(choice) if choice in kept else -1 for choice in range(len(ids))
    ]
    for row, choice in enumerate(kept):
        assert torch.equal(rows_NH[row], hidden_TH[choice // ids_TK.shape[1]])


def product(
    rows_NK: torch.Tensor,
    weight_GKM: torch.Tensor,
    group_list_G: torch.Tensor,
    kind: GroupListType = GroupListType.COUNTS,
    dtype: torch.dtype | None = None,
    **more: torch.Tensor,
) -> torch.Tensor:
    """Return the grouped product with one matrix per group.

    ``more`` contains additional one-tensor lists for the operator.
    """
    lists = {name: [tensor] for name, tensor in more.items()}
    groups = {"group_list": group_list_G, "group_list_type": kind, "split_item": 2, "group_type": 0}
    (out_NM,) = reference.npu_grouped_matmul([rows_NK], [weight_GKM], **groups, output_dtype=dtype, **lists)
    return out_NM


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from(list(GroupListType)))
@settings(max_examples=30, deadline=None)
def test_grouped_matmul_multiplies_each_group_with_its_matrix(counts: list[int], kind: GroupListType):
    generator = torch.Generator().manual_seed(0)
    rows_NK = torch.randn(sum(counts) + 2, 3, generator=generator)
    weight_GKM = torch.randn(len(counts), 4, 3, generator=generator).transpose(1, 2)
    counted = torch.tensor(counts)
    listed = counted.cumsum(0) if kind == GroupListType.CUMULATIVE else counted
    out_NM = product(rows_NK, weight_GKM, listed, kind)
    group_of_row = torch.repeat_interleave(counted).tolist()
    for row, group in enumerate(group_of_row):
        torch.testing.assert_close(out_NM[row], rows_NK[row] @ weight_GKM[group])
    assert out_NM.shape == (sum(counts) + 2, 4)


def test_swiglu_gates_with_the_first_half():
    out = reference.npu_swiglu(torch.tensor([[1.0, -2.0, 3.0, 5.0]]))
    gate = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(out, (gate * torch.sigmoid(gate) * torch.tensor([3.0, 5.0])).unsqueeze(0))


def test_unsupported_routing_arguments_are_rejected():
    hidden_TH, ids_TK = choices(5, 2, 4, seed=0)
    for name, value in {"active_num": 3, "active_expert_range": [3, 5], "row_idx_type": 1}.items():
        with pytest.raises(ValueError, match="reference operator: "):
            reference.npu_moe_init_routing_v2(hidden_TH, ids_TK, **(ROUTING | {name: value}))


def test_cpu_and_cuda_use_the_reference_operators():
    assert operators_for(torch.device("cpu")) is reference
    assert operators_for(torch.device("cuda")) is reference


def test_dynamic_quant_keeps_each_row_within_half_a_step():
    rows_NH = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[10.0**n] for n in range(-3, 3)]
    )
    rows_NH[2] = 0.0
    int8_NH, scale_N = reference.npu_dynamic_quant(rows_NH)
    assert int8_NH.dtype == torch.int8
    assert scale_N.dtype == torch.float32
    assert int8_NH.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127, 127]
    error_N = (int8_NH * scale_N.unsqueeze(1) - rows_NH).abs().amax(dim=1)
    assert (error_N <= scale_N * 0.5001).all()


def test_grouped_matmul_of_int8_is_exact_and_scaled_by_row_and_column():
    generator = torch.Generator().manual_seed(0)
    rows_NK = torch.randint(-127, 128, (5, 2000), generator=generator, dtype=torch.int8)
    weight_GKM = torch.randint(-127, 128, (2, 2000, 3), generator=generator, dtype=torch.int8)
    scale_GM = torch.rand(2, 3, generator=generator)
    scale_N = torch.rand(5, generator=generator)
    operands = rows_NK, weight_GKM, torch.tensor([2, 3])
    out_NM = product(*operands, dtype=torch.float32, scale=scale_GM, per_token_scale=scale_N)
    for row, group in enumerate([0, 0, 1, 1, 1]):
        product_M = rows_NK[row].long() @ weight_GKM[group].long()
        torch.testing.assert_close(out_NM[row], product_M * scale_GM[group] * scale_N[row])
    with pytest.raises(
        ValueError, match=r"required for int8 rows and not allowed otherwise, got torch\.int8"
    ):
        product(*operands)


@pytest.mark.parametrize("columns", [1, 1024, 1025, 4099])
def test_the_largest_sums_of_int8_products_are_exact(columns: int):
    """The sum is odd and larger than 2^24, so float32 could not represent it."""
    rows_NK = torch.full((1, columns), -128, dtype=torch.int8)
    weight_GKM = torch.full((1, columns, 2), -128, dtype=torch.int8)
    rows_NK[0, -1] = 127
    weight_GKM[0, -1] = 127
    scales = {"scale": torch.ones(1, 2), "per_token_scale": torch.ones(1)}
    out_NM = product(rows_NK, weight_GKM, torch.tensor([1]), dtype=torch.float64, **scales)
    assert out_NM.tolist() == [[float((columns - 1) * 128**2 + 127**2)] * 2]


def test_init_routing_quantises_the_sorted_rows():
    hidden_TH, ids_TK = choices(5, 2, 4, seed=3)
    rows_NH, row_of_choice, tokens_G, _ = reference.npu_moe_init_routing_v2(hidden_TH, ids_TK, **ROUTING)
    quantized = reference.npu_moe_init_routing_v2(hidden_TH, ids_TK, **ROUTING, quant_mode=QuantMode.DYNAMIC)
    int8_NH, scale_N = reference.npu_dynamic_quant(rows_NH)
    for got, expected in zip(quantized, (int8_NH, row_of_choice, tokens_G, scale_N), strict=True):
        assert torch.equal(got, expected)


def test_double_precision_sums_stay_in_double_precision():
    """Under all-gather, each rank sums its own choices, so less precise sums would depend on the placement."""
    rows_NH = torch.tensor([[1.0], [2.0**-40], [-1.0]], dtype=torch.float64)
    out_TH = reference.npu_moe_token_unpermute(rows_NH, torch.arange(3), torch.ones(1, 3))
    assert out_TH.dtype == torch.float64
    assert out_TH.item() == 2.0**-40


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 0], [9, 0, 0, 0]])
def test_the_fused_kernel_equals_the_products_group_by_group(counts: list[int], biased: bool):
    generator = torch.Generator().manual_seed(0)
    rows_NK = torch.randn(9, 16, generator=generator).bfloat16()
    weight_GKM = torch.randn(4, 24, 16, generator=generator).bfloat16().transpose(1, 2)
    bias_GM = torch.randn(4, 24, generator=generator) if biased else None
    assert local._fused_product_supports(rows_NK, weight_GKM)
    counts_G = torch.tensor(counts)
    fused_NM = local._fused_product(rows_NK, weight_GKM, counts_G, bias_GM)
    found_NM = product(rows_NK, weight_GKM, counts_G, **({"bias": bias_GM} if biased else {}))
    used = sum(counts)
    assert fused_NM.dtype == torch.bfloat16
    torch.testing.assert_close(fused_NM[:used], found_NM[:used], rtol=2e-2, atol=2e-2)


def test_matrices_that_the_fused_kernel_cannot_handle_are_recognised():
    weight_GKM = torch.zeros(4, 16, 24, dtype=torch.bfloat16)
    assert not local._fused_product_supports(torch.zeros(9, 16), weight_GKM)
    assert not local._fused_product_supports(torch.zeros(9, 12).bfloat16(), weight_GKM[:, :12])
    assert not local._fused_product_supports(torch.zeros(9, 16).bfloat16(), weight_GKM[:, :, :20])
