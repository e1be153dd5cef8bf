"""MC2's way to the experts in plain torch.distributed; ``contract`` says what each operator does."""

from __future__ import annotations

import torch

from worker_agent.moe.operators.contract import GroupListType
from worker_agent.moe.operators.reference.distribute import (
    Arrivals,
    Choices,
    exchange_choices,
    named_group,
    padded,
    require_simple,
)
from worker_agent.moe.operators.reference.requirement import require

ASSIST_WIDTH = 128
"""int32 values of assist info per row, of which the first two are used here: source rank, and choice within it."""


def npu_moe_distribute_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[torch.Tensor, ...]:
    """Send choices to the ranks of their experts; see ``Operators.npu_moe_distribute_dispatch``."""
    require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    arrivals = exchange_choices(group, x, choices, expert_ids.shape[1], quant_mode, expert_scales)
    expand_idx = torch.zeros(expert_ids.numel(), dtype=torch.int32, device=x.device)
    expand_idx[choices.choice_of_row] = choices.place_within_expert().to(torch.int32)
    capacity = _capacity(arrivals, global_bs or x.shape[0] * ep_world_size, expert_ids.shape[1])
    return _results(arrivals, expand_idx, capacity, tp_world_size, expert_token_nums_type, expert_scales)


def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[torch.Tensor, ...]:
    """Send choices to the ranks of their experts; see ``Operators.npu_moe_distribute_dispatch_v2``."""
    require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    arrivals = exchange_choices(group, x, choices, expert_ids.shape[1], quant_mode, expert_scales)
    capacity = _capacity(arrivals, global_bs or x.shape[0] * ep_world_size, expert_ids.shape[1])
    assist_info = torch.zeros(capacity, ASSIST_WIDTH, dtype=torch.int32, device=x.device)
    _, _, source_N1, choice_N1, _ = arrivals.columns
    assist_info[: source_N1.shape[0], :2] = torch.cat([source_N1, choice_N1], dim=1).to(torch.int32)
    return _results(
        arrivals, assist_info.view(-1), capacity, tp_world_size, expert_token_nums_type, expert_scales
    )


def _capacity(arrivals: Arrivals, global_bs: int, top_k: int) -> int:
    """A, the rows of the result, which may not depend on the routing."""
    capacity = global_bs * min(arrivals.received_RS.shape[1], top_k)
    rows = arrivals.columns[0].shape[0]
    require(rows <= capacity, f"{rows} rows arrive, past global_bs's bound of {capacity}")
    return capacity


def _results(
    arrivals: Arrivals,
    assist: torch.Tensor,
    capacity: int,
    tp_world_size: int,
    expert_token_nums_type: int,
    expert_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    rows_NH, scale_N1, _, _, weights_N1 = arrivals.columns
    tokens_S = arrivals.received_RS.sum(dim=0)
    if expert_token_nums_type == GroupListType.CUMULATIVE:
        tokens_S = tokens_S.cumsum(0)
    received_counts = arrivals.received_RS.t().reshape(-1).cumsum(0).to(torch.int32)
    expand_scales = scale_N1.new_empty(0)
    if expert_scales is not None:
        ranks, slots = arrivals.received_RS.shape
        two_levels = (
            capacity // min(slots, expert_scales.shape[1]) * 2 * expert_scales.shape[1] * (ranks // 8)
        )
        received_counts = padded(received_counts, received_counts.shape[0] + two_levels)
        expand_scales = padded(weights_N1.squeeze(1), capacity)
    return (
        padded(rows_NH, capacity),
        padded(scale_N1.squeeze(1), capacity),
        assist,
        tokens_S,
        received_counts,
        torch.full((tp_world_size,), rows_NH.shape[0], dtype=torch.int32, device=rows_NH.device),
        expand_scales,
    )
