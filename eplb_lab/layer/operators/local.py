"""Operators of one rank, in plain torch.

Dimensions: N rows, H their width, G groups, T tokens, K choices per token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from eplb_lab.layer.operators.codes import GroupListType, QuantMode

_EXACT_COLUMNS = 2**24 // 128**2
"""Maximum number of int8 products whose sum float32 can represent exactly."""


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
    """Multiply each group of rows by its group's matrix.

    Parameters
    ----------
    x
        One tensor, ``[N, K]``.
    weight
        One tensor, ``[G, K, M]``.
    bias
        One tensor, ``[G, M]``, added to the products. int8 products have no bias.
    scale
        One tensor, ``[G, M]``: scales of an int8 product's columns.
    per_token_scale
        One tensor, ``[N]``: scales of an int8 product's rows.
    group_list
        int64 ``[G]``, number of rows in each group, encoded as ``group_list_type``.
    split_item
        2 or 3: return one tensor.
    group_type
        0: rows are grouped.
    group_list_type
        ``GroupListType`` of ``group_list``.
    output_dtype
        Data type of an int8 product.

    Returns
    -------
    list of torch.Tensor
        One tensor, ``[N, M]``. Rows after the last group are undefined.
    """
    require(
        split_item in (2, 3) and group_type == 0,
        f"split_item must be 2 or 3 and group_type 0, got {split_item} and {group_type}",
    )
    (rows_NK,) = x
    (weight_GKM,) = weight
    quantized = rows_NK.dtype == torch.int8
    require(
        quantized == (scale is not None and per_token_scale is not None),
        f"scale and per_token_scale are required for int8 rows and not allowed otherwise, got {rows_NK.dtype} rows",
    )
    require(not quantized or bias is None, "int8 rows do not support a bias")
    counts_G = GroupListType(group_list_type).counts(group_list)
    if rows_NK.is_cuda and _fused_product_supports(rows_NK, weight_GKM):
        return [_fused_product(rows_NK, weight_GKM, counts_G, None if bias is None else bias[0])]
    out_NM = torch.zeros(
        (rows_NK.shape[0], weight_GKM.shape[2]), dtype=output_dtype or rows_NK.dtype, device=rows_NK.device
    )
    end = 0
    for group, count in enumerate(counts_G.tolist()):
        start = end
        end += count
        if not count:
            continue
        rows = rows_NK[start:end]
        matrix = weight_GKM[group]
        if scale is not None and per_token_scale is not None:
            product = _exact_product(rows, matrix)
            out_NM[start:end] = product * scale[0][group] * per_token_scale[0][start:end, None]
        else:
            torch.mm(rows, matrix, out=out_NM[start:end])
        if bias is not None:
            out_NM[start:end] += bias[0][group]
    return [out_NM]


def _exact_product(rows_NK: torch.Tensor, matrix_KM: torch.Tensor) -> torch.Tensor:
    """Return the exact product of int8 matrices as float64, like hardware that accumulates in int32.

    Blocks of ``_EXACT_COLUMNS`` columns are multiplied in float32. This is exact at that size, and converting to
    float32 is cheaper than converting to float64.
    """
    blocks = zip(rows_NK.split(_EXACT_COLUMNS, 1), matrix_KM.split(_EXACT_COLUMNS), strict=True)
    products = [(rows.float() @ matrix.float()).double() for rows, matrix in blocks]
    return torch.stack(products).sum(dim=0) if len(products) > 1 else products[0]


def _fused_product_supports(rows_NK: torch.Tensor, weight_GKM: torch.Tensor) -> bool:
    """Return True if torch has a kernel that multiplies all groups in one call.

    The kernel multiplies bfloat16 matrices whose rows are multiples of 16 bytes.
    """
    aligned = all(size * rows_NK.element_size() % 16 == 0 for size in weight_GKM.shape[1:])
    return hasattr(functional, "grouped_mm") and rows_NK.dtype == torch.bfloat16 and aligned


def _fused_product(
    rows_NK: torch.Tensor, weight_GKM: torch.Tensor, counts_G: torch.Tensor, bias_GM: torch.Tensor | None
) -> torch.Tensor:
    """Return the grouped product without reading the counts on the host.

    Rows after the last group are undefined.
    """
    ends_G = counts_G.cumsum(0).to(torch.int32)
    out_NM: torch.Tensor = functional.grouped_mm(rows_NK, weight_GKM, offs=ends_G)
    if bias_GM is not None:
        row_N = torch.arange(rows_NK.shape[0], dtype=torch.int32, device=rows_NK.device)
        group_N = torch.searchsorted(ends_G, row_N, right=True).clamp_(max=weight_GKM.shape[0] - 1)
        out_NM += bias_GM.index_select(0, group_N)
    return out_NM


def npu_dynamic_quant(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row symmetrically to int8.

    Parameters
    ----------
    input
        Rows ``[N, H]`` in floating point.

    Returns
    -------
    tuple of torch.Tensor
        int8 rows ``[N, H]``, and their float32 scales ``[N]``.

    Examples
    --------
    >>> npu_dynamic_quant(torch.tensor([[0.5, -1.0], [254.0, 20.0]]))
    (tensor([[  64, -127],
            [ 127,   10]], dtype=torch.int8), tensor([0.0079, 2.0000]))
    """
    wide_NH = input.float()
    scale_N = wide_NH.abs().amax(dim=-1) / 127
    steps_NH = wide_NH / scale_N.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps_NH.round().to(torch.int8), scale_N


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the SiLU of the first half of dimension ``dim``, times the second half."""
    gate, up = input.chunk(2, dim=dim)
    return functional.silu(gate) * up


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each token once per choice, and sort the rows by the choices' ids.

    Parameters
    ----------
    tokens
        ``[T, H]``.
    indices
        Ids to sort by, ``[T, K]`` or ``[T]``. The sort is stable.
    num_out_tokens
        Maximum number of rows to return. By default, and with 0, all rows are returned.

    Returns
    -------
    tuple of torch.Tensor
        Rows ``[T*K, H]``, and the row of each choice, int32 ``[T*K]``.

    Examples
    --------
    >>> tokens = torch.tensor([[1.0], [2.0]])
    >>> rows, row_of_choice = npu_moe_token_permute(tokens, torch.tensor([[3, 0], [0, 1]]))
    >>> rows.flatten().tolist(), row_of_choice.tolist()
    ([1.0, 2.0, 2.0, 1.0], [3, 0, 1, 2])
    >>> npu_moe_token_unpermute(rows, row_of_choice, torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    tensor([[1.],
            [2.]])
    """
    choices = indices.shape[1] if indices.ndim == 2 else 1
    choice_of_row = torch.argsort(indices.reshape(-1), stable=True)
    row_choices = choice_of_row[:num_out_tokens] if num_out_tokens else choice_of_row
    return tokens.index_select(0, row_choices // choices), _inverse(choice_of_row)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Undo ``npu_moe_token_permute``, and compute the weighted sum of the rows of each token's choices.

    Parameters
    ----------
    permuted_tokens
        Sorted rows ``[T*K, H]``.
    sorted_indices
        Row of each choice, ``[T*K]``.
    probs
        Weights ``[T, K]``. If ``None``, the rows are not summed.

    Returns
    -------
    torch.Tensor
        ``[T, H]``, or ``[T*K, H]`` if ``probs`` is ``None``.
    """
    rows_NH = permuted_tokens.index_select(0, sorted_indices)
    if probs is None:
        return rows_NH
    wide_dtype = torch.promote_types(permuted_tokens.dtype, torch.float32)
    rows_TKH = rows_NH.view(*probs.shape, rows_NH.shape[-1]).to(wide_dtype)
    return (rows_TKH * probs.to(wide_dtype).unsqueeze(-1)).sum(dim=1).to(permuted_tokens.dtype)


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
    """Repeat each token once per choice, and sort the rows by expert, active experts first.

    Parameters
    ----------
    x
        Tokens ``[T, H]``.
    expert_idx
        Chosen experts ``[T, K]``.
    scale
        Scales ``[T]`` of tokens that are already quantised.
    expert_tokens_num_type
        ``GroupListType`` of the token counts that are returned.
    active_expert_range
        First active expert, and the end of the range (exclusive).
    quant_mode
        ``QuantMode`` of the rows that are returned.

    Returns
    -------
    tuple of torch.Tensor
        1. Rows ``[T*K, H]``. Rows after those of the active choices are undefined.
        2. Row of each choice, int32 ``[T*K]``, or -1 if its expert is not active.
        3. Number of tokens for each active expert, int64.
        4. Scales of the rows, float32 ``[T*K]``, if they are quantised.
    """
    choices = expert_idx.shape[1]
    require(active_num == expert_idx.numel(), f"active_num must be {expert_idx.numel()}, got {active_num}")
    require(expert_tokens_num_flag, "expert_tokens_num_flag must be set")
    require(quant_mode in list(QuantMode), f"quant_mode must be -1 (none) or 1 (dynamic), got {quant_mode}")
    require(row_idx_type == 0, f"row_idx_type must be 0 (row of each choice), got {row_idx_type}")
    first, end = active_expert_range
    require(
        scale is None or quant_mode == QuantMode.NONE, "scale requires quant_mode -1 (rows already quantised)"
    )
    require(
        0 <= first < end <= expert_num,
        f"active_expert_range must be within 0..{expert_num}, got {active_expert_range}",
    )
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
    """Return the position of each index in a permutation, int32."""
    position_N = torch.arange(order_N.shape[0], dtype=torch.int32, device=order_N.device)
    return torch.empty_like(position_N).scatter_(0, order_N, position_N)
