"""The operators of one rank in plain torch: N rows, H their width, G groups, T tokens, K choices per token."""

from __future__ import annotations

import torch
from torch.nn import functional

from eplb_lab.layer.operators.codes import GroupListType, QuantMode

_EXACT_COLUMNS = 2**24 // 128**2
"""Columns of int8 values whose products sum up to no more than float32 counts."""


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"reference operator: {message}")


def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    scale: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Multiply each group of rows of ``x[0] [N, K]`` with its matrix of ``weight[0] [G, K, M]``.

    ``group_list`` int64 ``[G]`` is read as ``group_list_type`` says; ``group_type`` 0 groups rows and
    ``split_item`` 2 returns one tensor ``[N, M]``. Rows past the last group are undefined.

    Where both are int8, the product of a group is scaled by ``scale[0] [G, M]`` by column and by
    ``per_token_scale[0] [N]`` by row, and returned as ``output_dtype``. To other products ``bias[0] [G, M]`` is
    added.
    """
    require(split_item in (2, 3) and group_type == 0, "only rows in groups, in one tensor, are supported")
    (rows_NK,), (weight_GKM,) = x, weight
    quantized = rows_NK.dtype == torch.int8
    require(
        quantized == (scale is not None and per_token_scale is not None),
        "int8 rows, and only they, need scales",
    )
    require(not quantized or bias is None, "biases of int8 rows are not supported")
    counts_G = GroupListType(group_list_type).counts(group_list)
    if rows_NK.is_cuda and _fused_product_takes(rows_NK, weight_GKM):
        return [_fused_product(rows_NK, weight_GKM, counts_G, None if bias is None else bias[0])]
    out_NM = torch.zeros(
        (rows_NK.shape[0], weight_GKM.shape[2]), dtype=output_dtype or rows_NK.dtype, device=rows_NK.device
    )
    end = 0
    for group, count in enumerate(counts_G.tolist()):
        start, end = end, end + count
        if not count:
            continue
        rows, matrix = rows_NK[start:end], weight_GKM[group]
        if scale is not None and per_token_scale is not None:
            product = _exact_product(rows, matrix)
            out_NM[start:end] = product * scale[0][group] * per_token_scale[0][start:end, None]
        else:
            torch.mm(rows, matrix, out=out_NM[start:end])
        if bias is not None:
            out_NM[start:end] += bias[0][group]
    return [out_NM]


def _exact_product(rows_NK: torch.Tensor, matrix_KM: torch.Tensor) -> torch.Tensor:
    """Product of int8 matrices in float64, exact as on hardware that sums in int32.

    Sums over so many columns are exact in float32, which is the cheaper one to convert a matrix to.
    """
    parts = zip(rows_NK.split(_EXACT_COLUMNS, 1), matrix_KM.split(_EXACT_COLUMNS), strict=True)
    products = [(rows.float() @ matrix.float()).double() for rows, matrix in parts]
    return torch.stack(products).sum(dim=0) if len(products) > 1 else products[0]


def _fused_product_takes(rows_NK: torch.Tensor, weight_GKM: torch.Tensor) -> bool:
    """Return whether torch has one kernel for all groups: of bfloat16 matrices with rows of multiples of 16 bytes."""
    aligned = all(size * rows_NK.element_size() % 16 == 0 for size in weight_GKM.shape[1:])
    return hasattr(functional, "grouped_mm") and rows_NK.dtype == torch.bfloat16 and aligned


def _fused_product(
    rows_NK: torch.Tensor, weight_GKM: torch.Tensor, counts_G: torch.Tensor, bias_GM: torch.Tensor | None
) -> torch.Tensor:
    """The same without reading the counts on the host; rows behind the groups may become anything."""
    ends_G = counts_G.cumsum(0).to(torch.int32)
    out_NM: torch.Tensor = functional.grouped_mm(rows_NK, weight_GKM, offs=ends_G)
    if bias_GM is not None:
        row_N = torch.arange(rows_NK.shape[0], dtype=torch.int32, device=rows_NK.device)
        group_N = torch.searchsorted(ends_G, row_N, right=True).clamp_(max=weight_GKM.shape[0] - 1)
        out_NM += bias_GM.index_select(0, group_N)
    return out_NM


def npu_dynamic_quant(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of ``[N, H]`` symmetrically: int8 ``[N, H]``, and float32 ``[N]`` to scale it back by."""
    wide_NH = input.float()
    scale_N = wide_NH.abs().amax(dim=-1) / 127
    steps_NH = wide_NH / scale_N.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps_NH.round().to(torch.int8), scale_N


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """SiLU of the first half of ``dim`` times the second half."""
    gate, up = input.chunk(2, dim=dim)
    return functional.silu(gate) * up


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat tokens ``[T, H]`` once per choice, stably sorted by ``indices`` (``[T, K]`` or ``[T]``).

    Returns the rows ``[T*K, H]`` and int32 ``[T*K]``: the row of each choice among them. With a
    positive ``num_out_tokens`` only that many first rows are returned.
    """
    choices = indices.shape[1] if indices.ndim == 2 else 1
    choice_of_row = torch.argsort(indices.reshape(-1), stable=True)
    kept = choice_of_row[:num_out_tokens] if num_out_tokens else choice_of_row
    return tokens.index_select(0, kept // choices), _inverse(choice_of_row)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Undo a permutation: ``[T, H]``, each token the sum of its choices' rows times ``probs [T, K]``.

    Without ``probs`` each row is a token of its own.
    """
    rows_NH = permuted_tokens.index_select(0, sorted_indices)
    if probs is None:
        return rows_NH
    wide = torch.promote_types(permuted_tokens.dtype, torch.float32)
    rows_TKH = rows_NH.view(*probs.shape, rows_NH.shape[-1]).to(wide)
    return (rows_TKH * probs.to(wide).unsqueeze(-1)).sum(dim=1).to(permuted_tokens.dtype)


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    active_expert_range: list[int],
    quant_mode: int = -1,
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the choices ``expert_idx [T, K]`` within ``active_expert_range`` (half open) by expert.

    Returns the rows ``[T*K, H]``, those of active choices first and the rest undefined; int32 ``[T*K]``,
    the row of each choice, or -1 where it is not active; the tokens of each active expert, int64,
    counts where ``expert_tokens_num_type`` is 1 and cumulative where it is 0; and float32 ``[T*K]``, the
    rows' scales where they are quantized: here, or before, when ``scale [T]`` holds the tokens' own.
    """
    choices = expert_idx.shape[1]
    require(active_num == expert_idx.numel(), f"active_num must be {expert_idx.numel()}, got {active_num}")
    require(expert_tokens_num_flag, "expert_tokens_num_flag must be set")
    require(quant_mode in list(QuantMode), f"quant_mode must be -1 (none) or 1 (dynamic), got {quant_mode}")
    require(row_idx_type == 0, f"row_idx_type must be 0 (row of each choice), got {row_idx_type}")
    first, end = active_expert_range
    require(scale is None or quant_mode == QuantMode.NONE, "rows that have scales are quantized already")
    require(0 <= first < end <= expert_num, f"no expert range within 0..{expert_num}: {active_expert_range}")
    expert_N = expert_idx.reshape(-1)
    inactive_N = (expert_N < first) | (expert_N >= end)
    group_N = expert_N.masked_fill(inactive_N, end) - first
    choice_of_row = torch.argsort(group_N, stable=True)
    row_of_choice = _inverse(choice_of_row).masked_fill_(inactive_N, -1)
    counts_G = torch.zeros(end - first + 1, dtype=torch.int64, device=x.device)
    counts_G.index_add_(0, group_N, torch.ones_like(choice_of_row))
    tokens_G = counts_G[:-1]
    if expert_tokens_num_type == GroupListType.CUMULATIVE:
        tokens_G = tokens_G.cumsum(0)
    rows_NH = x.index_select(0, choice_of_row // choices)
    scale_N = rows_NH.new_ones(rows_NH.shape[0], dtype=torch.float32)
    if scale is not None:
        scale_N = scale.index_select(0, choice_of_row // choices)
    if quant_mode == QuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    return rows_NH, row_of_choice, tokens_G, scale_N


def _inverse(order_N: torch.Tensor) -> torch.Tensor:
    """The place of each index in a permutation, int32."""
    places_N = torch.arange(order_N.shape[0], dtype=torch.int32, device=order_N.device)
    return torch.empty_like(places_N).scatter_(0, order_N, places_N)
