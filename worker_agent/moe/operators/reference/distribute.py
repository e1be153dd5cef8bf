"""MC2's fused exchanges in plain torch.distributed, both versions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_agent.moe.operators.codes import DispatchQuantMode, GroupListType, count_ids
from worker_agent.moe.operators.reference.local import npu_dynamic_quant, require
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows

_ASSIST_WIDTH = 128
"""int32 values of version 2's assist info per row; the first two are used: source rank, and choice within it."""


def _dispatch_operator(version: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the dispatch of a version: they differ in the assist info alone."""

    def dispatch(
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

        Of version 1 the assist info is int32 ``[T * K]``: for each choice how many of the same expert come before it on
        this rank; hardware understands no ``x_active_mask`` there.
        """
        _require_simple(
            group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num
        )
        group, top_k = _named_group(group_ep, ep_world_size, ep_rank_id), expert_ids.shape[1]
        choice_of_row, sent_RS = _choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
        columns, received_RS = _exchange(group, x, choice_of_row, sent_RS, top_k, quant_mode, expert_scales)
        # The rows of the result may not depend on the routing.
        capacity = (global_bs or x.shape[0] * ep_world_size) * min(received_RS.shape[1], top_k)
        rows = columns[0].shape[0]
        require(rows <= capacity, f"{rows} rows arrive, past global_bs's bound of {capacity}")
        if version == 1:
            assist = torch.zeros(expert_ids.numel(), dtype=torch.int32, device=x.device)
            place_N = torch.arange(choice_of_row.shape[0], device=x.device)
            first_P = sent_RS.view(-1).cumsum(0) - sent_RS.view(-1)
            assist[choice_of_row] = (place_N - first_P.repeat_interleave(sent_RS.view(-1))).to(torch.int32)
        else:
            info = torch.zeros(capacity, _ASSIST_WIDTH, dtype=torch.int32, device=x.device)
            info[:rows, :2] = torch.cat(columns[2:4], dim=1).to(torch.int32)
            assist = info.view(-1)
        return _results(
            columns, received_RS, assist, capacity, tp_world_size, expert_token_nums_type, expert_scales
        )

    return dispatch


npu_moe_distribute_dispatch = _dispatch_operator(1)
npu_moe_distribute_dispatch_v2 = _dispatch_operator(2)


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


def _exchange(
    group: RankGroup,
    x: torch.Tensor,
    choice_of_row: torch.Tensor,
    sent_RS: torch.Tensor,
    top_k: int,
    quant_mode: int,
    weights_TK: torch.Tensor | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Send each choice's token to its expert.

    As columns arrive rows, scales, source, choice there, and weight, sorted by local expert and then source rank; and
    the number of rows by source and local expert.
    """
    require(quant_mode in list(DispatchQuantMode), f"quant_mode must be 0 or 2 (dynamic), got {quant_mode}")
    rows_NH = x.index_select(0, choice_of_row // top_k)
    scale_N = rows_NH.new_zeros(rows_NH.shape[0], dtype=torch.float32)
    if quant_mode == DispatchQuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    weights_N = torch.zeros_like(scale_N)
    if weights_TK is not None:
        weights_N = weights_TK.float().reshape(-1)[choice_of_row]
    source_N = torch.full_like(choice_of_row, group.rank)
    columns = [rows_NH, *(column.unsqueeze(1) for column in (scale_N, source_N, choice_of_row, weights_N))]
    received_RS = group.exchange(sent_RS)
    sent, received = sent_RS.sum(dim=1).tolist(), received_RS.sum(dim=1).tolist()
    arrived = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    slot_of_block = torch.arange(received_RS.shape[1], device=x.device).repeat(group.size)
    order_N = slot_of_block.repeat_interleave(received_RS.view(-1)).argsort(stable=True)
    return [column[order_N] for column in arrived], received_RS


def _results(
    columns: list[torch.Tensor],
    received_RS: torch.Tensor,
    assist: torch.Tensor,
    capacity: int,
    tp_world_size: int,
    expert_token_nums_type: int,
    expert_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    rows_NH, scale_N1, _, _, weights_N1 = columns
    tokens_S = received_RS.sum(dim=0)
    if expert_token_nums_type == GroupListType.CUMULATIVE:
        tokens_S = tokens_S.cumsum(0)
    received_counts = received_RS.t().reshape(-1).cumsum(0).to(torch.int32)
    expand_scales = scale_N1.new_empty(0)
    if expert_scales is not None:
        ranks, slots = received_RS.shape
        two_levels = (
            capacity // min(slots, expert_scales.shape[1]) * 2 * expert_scales.shape[1] * (ranks // 8)
        )
        received_counts = _padded(received_counts, received_counts.shape[0] + two_levels)
        expand_scales = _padded(weights_N1.squeeze(1), capacity)
    return (
        _padded(rows_NH, capacity),
        _padded(scale_N1.squeeze(1), capacity),
        assist,
        tokens_S,
        received_counts,
        torch.full((tp_world_size,), rows_NH.shape[0], dtype=torch.int32, device=rows_NH.device),
        expand_scales,
    )


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX


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
    """Undo ``npu_moe_distribute_dispatch``; as the next version, with the third result as ``expand_idx``."""
    _require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(
        expand_x, expert_ids, tp_send_counts, expand_scales, tp_world_size, global_bs
    )
    group = _named_group(group_ep, ep_world_size, ep_rank_id)
    choice_of_row, sent_RS = _choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    (returned_NH,) = _return_rows(group, [expand_x], ep_send_counts, sent_RS, moe_expert_num)
    # Rows return sorted by expert and by their place within it, which expand_idx holds for each choice.
    first_P = sent_RS.view(-1).cumsum(0) - sent_RS.view(-1)
    expert_N = expert_ids.reshape(-1)[choice_of_row].long()
    row_of_choice = first_P[expert_N] + expand_idx[choice_of_row]
    return _weigh_and_sum(returned_NH[row_of_choice], choice_of_row, expert_scales)


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
    _require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(
        expand_x, expert_ids, tp_send_counts, expand_scales, tp_world_size, global_bs
    )
    group = _named_group(group_ep, ep_world_size, ep_rank_id)
    _, sent_RS = _choices(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    choice_A1 = assist_info_for_combine.view(-1, _ASSIST_WIDTH)[:, 1:2]
    returned_NH, choice_N1 = _return_rows(
        group, [expand_x, choice_A1], ep_send_counts, sent_RS, moe_expert_num
    )
    return _weigh_and_sum(returned_NH, choice_N1.squeeze(1), expert_scales)


def _return_rows(
    group: RankGroup,
    columns: list[torch.Tensor],
    ep_send_counts: torch.Tensor,
    sent_RS: torch.Tensor,
    moe_expert_num: int,
) -> list[torch.Tensor]:
    """Send columns ``[A, ...]`` of the rows here back to the ranks that their choices came from."""
    slots, ranks = moe_expert_num // group.size, group.size
    cumulative = ep_send_counts[: slots * ranks].long()
    counts_SR = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).view(slots, ranks)
    source_of_block = torch.arange(ranks, device=cumulative.device).repeat(slots)
    order_N = source_of_block.repeat_interleave(counts_SR.view(-1)).argsort(stable=True)
    counts_R = counts_SR.sum(dim=0)
    ordered = [column[order_N] for column in columns]
    received = sent_RS.sum(dim=1).tolist()
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


def _require_results_of_dispatch(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    tp_send_counts: torch.Tensor | None,
    expand_scales: torch.Tensor | None,
    tp_world_size: int,
    global_bs: int,
) -> None:
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


def _named_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> RankGroup:
    """Return the group that an operator is to work in; ``ValueError`` where it is not the one described."""
    group = RankGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    return group


def _require_simple(
    group_ep: str,
    group_tp: str,
    tp_world_size: int,
    tp_rank_id: int,
    expert_shard_type: int,
    shared_expert_rank_num: int,
) -> None:
    """Refuse experts that are split further, and ranks that hold shared experts alone."""
    require(
        tp_world_size in (0, 1) and tp_rank_id == 0 and group_tp in ("", group_ep),
        "experts are not split further: tensor parallelism has one rank",
    )
    require(expert_shard_type == 0 and shared_expert_rank_num == 0, "no rank is set apart for shared experts")
