"""MC2's fused exchanges in plain torch.distributed."""

from __future__ import annotations

import torch

from eplb_lab.layer.operators.codes import DispatchQuantMode, GroupListType
from eplb_lab.layer.operators.local import npu_dynamic_quant, require
from eplb_lab.layer.rank_group import RankGroup, pack_rows, unpack_rows
from worker_agent.counting import count_ids

_ASSIST_WIDTH = 128
"""int32 values of the assist info per row; the first two are used: source rank, and choice within it."""


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
    """Send each choice ``expert_ids [T, K]`` of tokens ``x [T, H]`` to the rank of its expert; collective.

    ``group_ep`` names the group. Choices whose ``x_active_mask`` (bool ``[T]`` or ``[T, K]``) is not set are
    not sent. ``global_bs`` is the ranks' largest T times their number, or 0 where all have the same.
    ``expert_scales`` float32 ``[T, K]`` are the weights, where nodes talk in two levels. On A3 ``group_tp``
    names a group even if it has one rank.

    Returns seven tensors: the rows ``[A, H]`` that arrive, sorted by local expert and then source rank, A
    being ``global_bs`` times the lesser of K and local experts; their scales ``[A]``; opaque assist info for
    the way back; tokens of each local expert, int64, as ``expert_token_nums_type`` says; cumulative int32
    counts by expert and source rank, ``[S * R]`` and more in two levels; int32 counts by tensor-parallel rank;
    and the rows' weights ``[A]`` where nodes talk in two levels.
    """
    place = group_ep, ep_world_size, ep_rank_id, group_tp, tp_world_size, tp_rank_id
    group = _simple_group(*place, expert_shard_type, shared_expert_rank_num)
    require(quant_mode in list(DispatchQuantMode), f"quant_mode must be 0 or 2 (dynamic), got {quant_mode}")
    top_k = expert_ids.shape[1]
    choice_of_row, sent_RS = _choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    rows_NH = x.index_select(0, choice_of_row // top_k)
    scale_N = rows_NH.new_zeros(rows_NH.shape[0], dtype=torch.float32)
    if quant_mode == DispatchQuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    weights_N = torch.zeros_like(scale_N)
    if expert_scales is not None:
        weights_N = expert_scales.float().reshape(-1)[choice_of_row]
    info_N2 = torch.stack([torch.full_like(choice_of_row, group.rank), choice_of_row], dim=1).to(torch.int32)
    columns = [rows_NH, scale_N.unsqueeze(1), info_N2, weights_N.unsqueeze(1)]
    received_RS = group.exchange(sent_RS)
    sent, received = sent_RS.sum(dim=1).tolist(), received_RS.sum(dim=1).tolist()
    arrived = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    ranks, slots = received_RS.shape
    slot_of_block = torch.arange(slots, device=x.device).repeat(ranks)
    order_N = slot_of_block.repeat_interleave(received_RS.view(-1)).argsort(stable=True)
    # The rows of the result may not depend on the routing.
    tokens = global_bs or x.shape[0] * ep_world_size
    capacity, rows = tokens * min(slots, top_k), sum(received)
    require(rows <= capacity, f"{rows} rows arrive, past global_bs's bound of {capacity}")
    rows_AH, scale_A1, info_A2, weights_A1 = (_padded(column[order_N], capacity) for column in arrived)
    assist_AX = info_A2.new_zeros(capacity, _ASSIST_WIDTH)
    assist_AX[:, :2] = info_A2
    tokens_S = received_RS.sum(dim=0)
    received_counts = received_RS.t().reshape(-1).cumsum(0).to(torch.int32)
    if expert_scales is not None:
        received_counts = _padded(received_counts, ranks * slots + tokens * 2 * top_k * (ranks // 8))
    return (
        rows_AH,
        scale_A1.squeeze(1),
        assist_AX.view(-1),
        tokens_S.cumsum(0) if expert_token_nums_type == GroupListType.CUMULATIVE else tokens_S,
        received_counts,
        torch.full((tp_world_size,), rows, dtype=torch.int32, device=x.device),
        weights_A1.squeeze(1) if expert_scales is not None else weights_A1.new_empty(0),
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
    """Send rows ``[A, H]`` back to the choices that they came from, and sum each token's, weighted; ``[T, H]``.

    ``assist_info_for_combine``, ``ep_send_counts``, ``tp_send_counts`` and ``expand_scales`` are the third,
    fifth, sixth and seventh result of the dispatch, ``expert_scales`` the float32 weights ``[T, K]``.
    """
    place = group_ep, ep_world_size, ep_rank_id, group_tp, tp_world_size, tp_rank_id
    group = _simple_group(*place, expert_shard_type, shared_expert_rank_num)
    require(
        not tp_world_size or (tp_send_counts is not None and tp_send_counts.shape == (1,)),
        "with a tensor-parallel group, tp_send_counts must be the dispatch's sixth result",
    )
    require(
        expand_scales is None or expand_scales.dtype == torch.float32,
        "expand_scales must be the dispatch's seventh result",
    )
    bound = global_bs * expert_ids.shape[1]
    require(not global_bs or expand_x.shape[0] <= bound, "expand_x is past global_bs's bound")
    _, sent_RS = _choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    choice_A1 = assist_info_for_combine.view(-1, _ASSIST_WIDTH)[:, 1:2]
    ranks, slots = sent_RS.shape
    cumulative = ep_send_counts[: slots * ranks].long()
    counts_SR = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).view(slots, ranks)
    source_of_block = torch.arange(ranks, device=cumulative.device).repeat(slots)
    order_N = source_of_block.repeat_interleave(counts_SR.view(-1)).argsort(stable=True)
    columns = [column[order_N] for column in (expand_x, choice_A1)]
    sent, received = counts_SR.sum(dim=0).tolist(), sent_RS.sum(dim=1).tolist()
    rows_NH, choice_N1 = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    # Summed in float32 or better, and in order of choice.
    wide = torch.promote_types(rows_NH.dtype, torch.float32)
    outputs_NH = rows_NH.new_zeros(expert_scales.numel(), rows_NH.shape[1], dtype=wide)
    outputs_NH[choice_N1.squeeze(1).long()] = rows_NH.to(wide)
    outputs_TKH = outputs_NH.view(*expert_scales.shape, outputs_NH.shape[1])
    return (outputs_TKH * expert_scales.to(wide).unsqueeze(-1)).sum(dim=1).to(rows_NH.dtype)


def _choices(
    expert_ids_TK: torch.Tensor, active: torch.Tensor | None, ranks: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choices that ``active`` leaves, in order of expert, and how many go to each slot ``[R, S]``."""
    expert_N = expert_ids_TK.reshape(-1)
    if active is not None:
        active_TK = active if active.ndim == 2 else active.unsqueeze(1).expand_as(expert_ids_TK)
        expert_N = expert_N.masked_fill(~active_TK.reshape(-1), experts)
    counts_P = count_ids(expert_N, experts + 1)[:-1]
    return expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1)


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX


def _simple_group(
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    group_tp: str,
    tp_world_size: int,
    tp_rank_id: int,
    expert_shard_type: int,
    shared_expert_rank_num: int,
) -> RankGroup:
    """Return the group that an operator is to work in; refuse another one than described, and ranks set apart."""
    require(
        tp_world_size in (0, 1) and tp_rank_id == 0 and group_tp in ("", group_ep),
        "experts are not split further: tensor parallelism has one rank",
    )
    require(expert_shard_type == 0 and shared_expert_rank_num == 0, "no rank is set apart for shared experts")
    group = RankGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    return group
