"""MC2's fused exchanges, in plain torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eplb_lab.layer.operators.codes import DispatchQuantMode, GroupListType
from eplb_lab.layer.operators.local import npu_dynamic_quant, require
from eplb_lab.layer.rank_group import RankGroup, pack_rows, unpack_rows
from worker_agent.counting import count_ids

_ASSIST_WIDTH = 128
"""Number of int32 assist-info values per row. Only two are used: the source rank and the choice's index on it."""


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
    """Send each token to the ranks of the experts that it chose (collective).

    Parameters
    ----------
    x
        Tokens ``[T, H]``.
    expert_ids
        Physical experts ``[T, K]``.
    group_ep
        Name of the expert-parallel group.
    x_active_mask
        bool ``[T]`` or ``[T, K]``; unset choices are not sent.
    expert_scales
        float32 weights ``[T, K]``, if nodes communicate in two levels.
    group_tp
        Name of the tensor-parallel group. An A3 requires it even for a group of one rank.
    global_bs
        Largest T on any rank times the number of ranks, or 0 if all ranks have the same T.
    expert_token_nums_type
        ``GroupListType`` of the token counts that are returned.

    Returns
    -------
    tuple of torch.Tensor
        Seven tensors. A is ``global_bs`` times the smaller of K and the number of local experts.

        1. Received rows ``[A, H]``, sorted by local expert and then by source rank.
        2. Scales of the rows, ``[A]``.
        3. Assist info, an opaque tensor that combine needs.
        4. Number of tokens for each local expert, int64.
        5. Cumulative counts by expert and source rank, int32 ``[S * R]``; longer if nodes communicate in two levels.
        6. Row count of each tensor-parallel rank, int32.
        7. Weights of the rows ``[A]``, if nodes communicate in two levels.
    """
    _require_whole_experts(group_tp, group_ep, tp_world_size, tp_rank_id)
    _require_no_shared_ranks(expert_shard_type, shared_expert_rank_num)
    group = _group(group_ep, ep_world_size, ep_rank_id)
    require(quant_mode in list(DispatchQuantMode), f"quant_mode must be 0 or 2 (dynamic), got {quant_mode}")
    top_k = expert_ids.shape[1]
    choice_of_row, sent_RS = _sorted_choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    columns = _columns(x, expert_scales, choice_of_row, top_k, group.rank, quant_mode)
    received_RS = group.exchange(sent_RS)
    received_columns = _exchanged(group, columns, sent_RS.sum(dim=1), received_RS.sum(dim=1))
    ranks, slots = received_RS.shape
    # The number of rows returned must not depend on the routing.
    tokens = global_bs or x.shape[0] * ep_world_size
    capacity = tokens * min(slots, top_k)
    rows_AH, scale_A1, info_A2, weights_A1 = _sorted_by_expert(received_columns, received_RS, capacity)
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
        torch.full((tp_world_size,), received_columns[0].shape[0], dtype=torch.int32, device=x.device),
        weights_A1.squeeze(1) if expert_scales is not None else weights_A1.new_empty(0),
    )


def _columns(
    x: torch.Tensor,
    expert_scales: torch.Tensor | None,
    choice_of_row: torch.Tensor,
    top_k: int,
    rank: int,
    quant_mode: int,
) -> list[torch.Tensor]:
    """Return the columns to send: rows ``[N, H]``, scales ``[N, 1]``, assist info ``[N, 2]`` and weights ``[N, 1]``."""
    rows_NH = x.index_select(0, choice_of_row // top_k)
    scale_N = rows_NH.new_zeros(rows_NH.shape[0], dtype=torch.float32)
    if quant_mode == DispatchQuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    weights_N = torch.zeros_like(scale_N)
    if expert_scales is not None:
        weights_N = expert_scales.float().reshape(-1)[choice_of_row]
    info_N2 = torch.stack([torch.full_like(choice_of_row, rank), choice_of_row], dim=1).to(torch.int32)
    return [rows_NH, scale_N.unsqueeze(1), info_N2, weights_N.unsqueeze(1)]


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
    """Send the rows back to their source ranks, and compute the weighted sum of each token's rows (collective).

    Parameters
    ----------
    expand_x
        Experts' outputs ``[A, H]``, in the order of dispatch's rows.
    assist_info_for_combine
        Third result of dispatch.
    ep_send_counts
        Fifth result of dispatch.
    expert_scales
        float32 weights ``[T, K]``.
    tp_send_counts
        Sixth result of dispatch.
    expand_scales
        Seventh result of dispatch.

    Returns
    -------
    torch.Tensor
        Outputs of the tokens, ``[T, H]``.
    """
    _require_whole_experts(group_tp, group_ep, tp_world_size, tp_rank_id)
    _require_no_shared_ranks(expert_shard_type, shared_expert_rank_num)
    group = _group(group_ep, ep_world_size, ep_rank_id)
    require(
        not tp_world_size or (tp_send_counts is not None and tp_send_counts.shape == (1,)),
        "with a tensor-parallel group, tp_send_counts must be the sixth result of dispatch",
    )
    require(
        expand_scales is None or expand_scales.dtype == torch.float32,
        "expand_scales must be the seventh result of dispatch",
    )
    capacity = global_bs * expert_ids.shape[1]
    require(
        not global_bs or expand_x.shape[0] <= capacity,
        f"expand_x has {expand_x.shape[0]} rows, but global_bs allows only {capacity}",
    )
    _, sent_RS = _sorted_choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    choice_A1 = assist_info_for_combine.view(-1, _ASSIST_WIDTH)[:, 1:2]
    ranks, slots = sent_RS.shape
    cumulative = ep_send_counts[: slots * ranks].long()
    counts_SR = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).view(slots, ranks)
    order_N = _regrouped(counts_SR)
    columns = [column[order_N] for column in (expand_x, choice_A1)]
    rows_NH, choice_N1 = _exchanged(group, columns, counts_SR.sum(dim=0), sent_RS.sum(dim=1))
    return _weighted_sums(rows_NH, choice_N1.squeeze(1).long(), expert_scales)


def _weighted_sums(rows_NH: torch.Tensor, choice_N: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows, ``[T, H]``, given the index of each row's choice."""
    # Sum in float32 or wider, and in the order of the choices.
    wide_dtype = torch.promote_types(rows_NH.dtype, torch.float32)
    outputs_NH = rows_NH.new_zeros(weights_TK.numel(), rows_NH.shape[1], dtype=wide_dtype)
    outputs_NH[choice_N] = rows_NH.to(wide_dtype)
    outputs_TKH = outputs_NH.view(*weights_TK.shape, outputs_NH.shape[1])
    return (outputs_TKH * weights_TK.to(wide_dtype).unsqueeze(-1)).sum(dim=1).to(rows_NH.dtype)


def _sorted_choices(
    expert_ids_TK: torch.Tensor, active: torch.Tensor | None, ranks: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the active choices by expert.

    Returns
    -------
    choice_of_row : torch.Tensor
        Indices of the active choices, in the order of their experts, ``[N]``.
    sent_RS : torch.Tensor
        Number of choices for each slot of each rank.
    """
    expert_N = expert_ids_TK.reshape(-1)
    if active is not None:
        active_TK = active if active.ndim == 2 else active.unsqueeze(1).expand_as(expert_ids_TK)
        expert_N = expert_N.masked_fill(~active_TK.reshape(-1), experts)
    counts_P = count_ids(expert_N, experts + 1)[:-1]
    return expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1)


def _regrouped(counts_XY: torch.Tensor) -> torch.Tensor:
    """Return the order, ``[N]``, that sorts rows by Y first, given the counts of rows that are sorted by X first."""
    groups, subgroups = counts_XY.shape
    subgroup_of_block = torch.arange(subgroups, device=counts_XY.device).repeat(groups)
    return subgroup_of_block.repeat_interleave(counts_XY.reshape(-1)).argsort(stable=True)


def _sorted_by_expert(
    columns: list[torch.Tensor], received_RS: torch.Tensor, capacity: int
) -> Iterator[torch.Tensor]:
    """Sort received rows by local expert, and yield each column, padded to ``capacity`` rows.

    Raises ``ValueError`` if there are more rows.
    """
    order_N = _regrouped(received_RS)
    rows = order_N.shape[0]
    require(rows <= capacity, f"received {rows} rows, but global_bs allows only {capacity}")
    for column in columns:
        yield _padded(column[order_N], capacity)


def _exchanged(
    group: RankGroup, columns: list[torch.Tensor], sent_R: torch.Tensor, received_R: torch.Tensor
) -> list[torch.Tensor]:
    """Send the columns' rows, in rank order, and return the received rows."""
    packed_NB = group.all_to_all(pack_rows(columns), sent_R.tolist(), received_R.tolist())
    return unpack_rows(packed_NB, columns)


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX


def _require_whole_experts(group_tp: str, group_ep: str, tp_world_size: int, tp_rank_id: int) -> None:
    require(
        tp_world_size in (0, 1) and tp_rank_id == 0 and group_tp in ("", group_ep),
        f"tensor parallelism of experts is not supported, got tp_world_size {tp_world_size}, tp_rank_id {tp_rank_id}, "
        f"group_tp {group_tp!r}",
    )


def _require_no_shared_ranks(expert_shard_type: int, shared_expert_rank_num: int) -> None:
    require(
        expert_shard_type == 0 and shared_expert_rank_num == 0,
        f"ranks reserved for shared experts are not supported, got expert_shard_type {expert_shard_type}, "
        f"shared_expert_rank_num {shared_expert_rank_num}",
    )


def _group(name: str, size: int, rank: int) -> RankGroup:
    """Return the group with this name. Raises ``ValueError`` if its size or this rank's index differs."""
    group = RankGroup.named(name)
    require(
        (group.size, group.rank) == (size, rank),
        f"this is rank {group.rank} of {group.size} in group {name!r}, not rank {rank} of {size}",
    )
    return group
