"""Sorting tokens by expert and back, in plain torch; ``contract`` says what each operator does."""

from __future__ import annotations

import torch

from worker_agent.moe.operators.contract import GroupListType, QuantMode
from worker_agent.moe.operators.reference.arithmetic import npu_dynamic_quant
from worker_agent.moe.operators.reference.requirement import require


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort tokens, once per choice, by index; see ``Operators.npu_moe_token_permute``."""
    choices = indices.shape[1] if indices.ndim == 2 else 1
    choice_of_row = torch.argsort(indices.reshape(-1), stable=True)
    kept = choice_of_row[:num_out_tokens] if num_out_tokens else choice_of_row
    return tokens.index_select(0, kept // choices), _inverse(choice_of_row)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Gather each token's rows and sum them, weighted, in float32 and in order of choice."""
    rows_NH = permuted_tokens.index_select(0, sorted_indices)
    if probs is None:
        return rows_NH
    rows_TKH = rows_NH.view(*probs.shape, rows_NH.shape[-1]).float()
    return (rows_TKH * probs.float().unsqueeze(-1)).sum(dim=1).to(permuted_tokens.dtype)


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
    """Sort the choices of an expert range by expert; see ``Operators.npu_moe_init_routing_v2``."""
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
    group_N = torch.where(inactive_N, end, expert_N) - first
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
    """Where each index stands in a permutation, int32."""
    places_N = torch.arange(order_N.shape[0], dtype=torch.int32, device=order_N.device)
    return torch.empty_like(places_N).scatter_(0, order_N, places_N)
