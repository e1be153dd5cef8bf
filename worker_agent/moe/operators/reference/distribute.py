"""The fused exchanges of MC2 in plain torch.distributed; ``contract`` says what each operator does."""

from __future__ import annotations

import torch

from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.heat_ring import count_ids
from worker_agent.moe.operators.contract import DispatchQuantMode, GroupListType
from worker_agent.moe.operators.reference.arithmetic import npu_dynamic_quant
from worker_agent.moe.operators.reference.requirement import require
from worker_agent.moe.packing import pack_rows, unpack_rows

_ASSIST_WIDTH = 128
"""int32 values of assist info per row, of which the first two are used here: source rank, and choice within it."""


def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[torch.Tensor, ...]:
    """Send choices to the ranks of their experts; see ``Operators.npu_moe_distribute_dispatch_v2``."""
    require(
        quant_mode in list(DispatchQuantMode), f"quant_mode must be 0 (none) or 2 (dynamic), got {quant_mode}"
    )
    group = EpGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    local, choices = moe_expert_num // ep_world_size, expert_ids.shape[1]
    choice_of_row, sent_RS = _sorted_choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    rows_NH = x.index_select(0, choice_of_row // choices)
    scale_N = rows_NH.new_zeros(rows_NH.shape[0], dtype=torch.float32)
    if quant_mode == DispatchQuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    origin_N2 = torch.stack([torch.full_like(choice_of_row, ep_rank_id), choice_of_row], dim=1).to(
        torch.int32
    )

    received_RS = group.exchange(sent_RS)
    columns = [rows_NH, scale_N.unsqueeze(1), origin_N2]
    sent, received = sent_RS.sum(dim=1).tolist(), received_RS.sum(dim=1).tolist()
    arrivals = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    slot_of_block = torch.arange(local, device=x.device).repeat(ep_world_size)
    order_N = slot_of_block.repeat_interleave(received_RS.view(-1)).argsort(stable=True)

    capacity = (global_bs or x.shape[0] * ep_world_size) * min(local, choices)
    require(
        order_N.shape[0] <= capacity, f"{order_N.shape[0]} rows arrive, past global_bs's bound of {capacity}"
    )
    expand_x, dynamic_scales, origin_A2 = (_padded(column[order_N], capacity) for column in arrivals)
    assist_info = torch.zeros(capacity, _ASSIST_WIDTH, dtype=torch.int32, device=x.device)
    assist_info[:, :2] = origin_A2
    tokens_S = received_RS.sum(dim=0)
    if expert_token_nums_type == GroupListType.CUMULATIVE:
        tokens_S = tokens_S.cumsum(0)
    ep_recv_counts = received_RS.t().reshape(-1).cumsum(0).to(torch.int32)
    nothing = dynamic_scales.new_empty(0)
    return (
        expand_x,
        dynamic_scales.squeeze(1),
        assist_info.view(-1),
        tokens_S,
        ep_recv_counts,
        nothing.to(torch.int32),
        nothing,
    )


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
    x_active_mask: torch.Tensor | None = None,
    global_bs: int = 0,
) -> torch.Tensor:
    """Send rows back to their choices, weigh and sum; see ``Operators.npu_moe_distribute_combine_v2``."""
    group = EpGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    capacity = expand_x.shape[0]
    require(
        not global_bs or capacity <= global_bs * expert_ids.shape[1], "expand_x is past global_bs's bound"
    )
    rows = int(ep_send_counts[-1])
    source_N, choice_N = assist_info_for_combine.view(capacity, _ASSIST_WIDTH)[:rows, :2].unbind(dim=1)
    order_N = source_N.argsort(stable=True)
    columns = [expand_x[:rows][order_N], choice_N[order_N].unsqueeze(1)]
    sent = count_ids(source_N, ep_world_size).tolist()
    _, received_RS = _sorted_choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    received = received_RS.sum(dim=1).tolist()
    returned_NH, place_N1 = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    outputs_NH = expand_x.new_zeros(expert_ids.numel(), expand_x.shape[1], dtype=torch.float32)
    outputs_NH[place_N1.squeeze(1).long()] = returned_NH.float()
    outputs_TKH = outputs_NH.view(*expert_ids.shape, outputs_NH.shape[1])
    return (outputs_TKH * expert_scales.float().unsqueeze(-1)).sum(dim=1).to(expand_x.dtype)


def _sorted_choices(
    expert_ids: torch.Tensor, active_T: torch.Tensor | None, ranks: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of active tokens in order of expert, and how many go to each rank's experts, ``[R, S]``."""
    expert_N = expert_ids.reshape(-1)
    if active_T is not None:
        idle_N = ~active_T.repeat_interleave(expert_ids.shape[1])
        expert_N = expert_N.masked_fill(idle_N, experts)
    counts_P = count_ids(expert_N, experts + 1)[:-1]
    return expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1)


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX
