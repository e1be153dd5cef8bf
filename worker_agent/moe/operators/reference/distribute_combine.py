"""MC2's fused combine in plain torch.distributed, both versions; ``contract`` says what it does."""

from __future__ import annotations

import torch

from worker_agent.moe.operators.reference.distribute import (
    ASSIST_WIDTH,
    Choices,
    named_group,
    require_simple,
)
from worker_agent.moe.operators.reference.local import require
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows


def npu_moe_distribute_combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
) -> torch.Tensor:
    """Send rows back to their choices, weigh and sum; see ``Operators.npu_moe_distribute_combine``."""
    require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(tp_send_counts, expand_scales, tp_world_size)
    _require_bound(expand_x, expert_ids, global_bs)
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    (returned_NH,) = _return_rows(group, [expand_x], ep_send_counts, choices, moe_expert_num)
    # Rows return sorted by expert and by their place within it, which expand_idx holds for each choice.
    counts_P = choices.sent_RS.reshape(-1)
    first_P = counts_P.cumsum(0) - counts_P
    sent_choices = choices.choice_of_row
    expert_N = expert_ids.reshape(-1)[sent_choices].long()
    row_of_choice = first_P[expert_N] + expand_idx[sent_choices]
    return _weigh_and_sum(returned_NH[row_of_choice], sent_choices, expert_scales)


def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
) -> torch.Tensor:
    """Send rows back to their choices, weigh and sum; see ``Operators.npu_moe_distribute_combine_v2``."""
    require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(tp_send_counts, expand_scales, tp_world_size)
    _require_bound(expand_x, expert_ids, global_bs)
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    choice_A1 = assist_info_for_combine.view(-1, ASSIST_WIDTH)[:, 1:2]
    returned_NH, choice_N1 = _return_rows(
        group, [expand_x, choice_A1], ep_send_counts, choices, moe_expert_num
    )
    return _weigh_and_sum(returned_NH, choice_N1.squeeze(1), expert_scales)


def _return_rows(
    group: RankGroup,
    columns: list[torch.Tensor],
    ep_send_counts: torch.Tensor,
    choices: Choices,
    moe_expert_num: int,
) -> list[torch.Tensor]:
    """Columns ``[A, ...]`` of the rows here, back on the ranks that their choices came from."""
    order_N, counts_R = _rows_by_source(ep_send_counts, moe_expert_num // group.size, group.size)
    ordered = [column[order_N] for column in columns]
    received = choices.sent_RS.sum(dim=1).tolist()
    return unpack_rows(group.all_to_all(pack_rows(ordered), counts_R.tolist(), received), ordered)


def _weigh_and_sum(
    rows_NH: torch.Tensor, choice_of_row: torch.Tensor, expert_scales: torch.Tensor
) -> torch.Tensor:
    """Each token's rows times their weights, summed in float32 or better and in order of choice; ``[T, H]``."""
    wide = torch.promote_types(rows_NH.dtype, torch.float32)
    outputs_NH = rows_NH.new_zeros(expert_scales.numel(), rows_NH.shape[1], dtype=wide)
    outputs_NH[choice_of_row.long()] = rows_NH.to(wide)
    outputs_TKH = outputs_NH.view(*expert_scales.shape, outputs_NH.shape[1])
    return (outputs_TKH * expert_scales.to(wide).unsqueeze(-1)).sum(dim=1).to(rows_NH.dtype)


def _rows_by_source(
    ep_send_counts: torch.Tensor, slots: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows here in order of the rank that they came from, and how many came from each, ``[R]``."""
    cumulative = ep_send_counts[: slots * ranks].long()
    counts_SR = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).view(slots, ranks)
    source_of_block = torch.arange(ranks, device=cumulative.device).repeat(slots)
    source_N = source_of_block.repeat_interleave(counts_SR.view(-1))
    return source_N.argsort(stable=True), counts_SR.sum(dim=0)


def _require_bound(expand_x: torch.Tensor, expert_ids: torch.Tensor, global_bs: int) -> None:
    bound = global_bs * expert_ids.shape[1]
    require(not global_bs or expand_x.shape[0] <= bound, "expand_x is past global_bs's bound")


def _require_results_of_dispatch(
    tp_send_counts: torch.Tensor | None, expand_scales: torch.Tensor | None, tp_world_size: int
) -> None:
    require(
        not tp_world_size or (tp_send_counts is not None and tp_send_counts.shape == (1,)),
        "with a tensor-parallel group, tp_send_counts must be the dispatch's sixth result",
    )
    require(
        expand_scales is None or expand_scales.dtype == torch.float32,
        "expand_scales must be the dispatch's seventh result",
    )
