"""MC2's way back from the experts in plain torch.distributed; ``contract`` says what each operator does."""

from __future__ import annotations

import torch

from worker_agent.moe.operators.reference.distribute import (
    Choices,
    named_group,
    require_simple,
    weigh_and_sum,
)
from worker_agent.moe.operators.reference.distribute_dispatch import ASSIST_WIDTH
from worker_agent.moe.operators.reference.requirement import require
from worker_agent.moe.packing import pack_rows, unpack_rows


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
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    _require_bound(expand_x, expert_ids, global_bs)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    order_N, counts_R = _rows_by_source(ep_send_counts, moe_expert_num // ep_world_size, ep_world_size)
    returned_NH = group.all_to_all(expand_x[order_N], counts_R.tolist(), choices.sent_RS.sum(dim=1).tolist())
    # Rows return sorted by expert and by their place within it, which is what expand_idx tells of each choice.
    counts_P = choices.sent_RS.reshape(-1)
    first_P = counts_P.cumsum(0) - counts_P
    sent_choices = choices.choice_of_row
    expert_N = expert_ids.reshape(-1)[sent_choices].long()
    row_of_choice = first_P[expert_N] + expand_idx[sent_choices]
    return weigh_and_sum(returned_NH[row_of_choice], sent_choices, expert_scales)


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
    group = named_group(group_ep, ep_world_size, ep_rank_id)
    _require_bound(expand_x, expert_ids, global_bs)
    choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    order_N, counts_R = _rows_by_source(ep_send_counts, moe_expert_num // ep_world_size, ep_world_size)
    choice_A = assist_info_for_combine.view(-1, ASSIST_WIDTH)[:, 1]
    columns = [expand_x[order_N], choice_A[order_N].unsqueeze(1)]
    received = choices.sent_RS.sum(dim=1).tolist()
    packed_NB = group.all_to_all(pack_rows(columns), counts_R.tolist(), received)
    returned_NH, choice_N1 = unpack_rows(packed_NB, columns)
    return weigh_and_sum(returned_NH, choice_N1.squeeze(1), expert_scales)


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
