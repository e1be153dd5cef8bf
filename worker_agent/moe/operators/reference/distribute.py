"""MC2's fused exchanges in plain torch.distributed, both versions of each; ``contract`` says what each does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_agent.moe.operators.contract import DispatchQuantMode, GroupListType, count_ids
from worker_agent.moe.operators.reference.local import npu_dynamic_quant, require
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows

ASSIST_WIDTH = 128
"""int32 values of version 2's assist info per row; the first two are used: source rank, and choice within it."""


def _dispatch_operator(version: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The dispatch of a version: they differ in the assist info alone."""

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
        """Send choices to the ranks of their experts; see ``Operators``."""
        _require_simple(
            group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num
        )
        group = _named_group(group_ep, ep_world_size, ep_rank_id)
        choices = _Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
        arrivals = _exchange_choices(group, x, choices, expert_ids.shape[1], quant_mode, expert_scales)
        capacity = _capacity(arrivals, global_bs or x.shape[0] * ep_world_size, expert_ids.shape[1])
        if version == 1:
            assist = torch.zeros(expert_ids.numel(), dtype=torch.int32, device=x.device)
            assist[choices.choice_of_row] = choices.place_within_expert().to(torch.int32)
        else:
            _, _, source_N1, choice_N1, _ = arrivals.columns
            sources_and_choices = torch.cat([source_N1, choice_N1], dim=1).to(torch.int32)
            info = torch.zeros(capacity, ASSIST_WIDTH, dtype=torch.int32, device=x.device)
            info[: source_N1.shape[0], :2] = sources_and_choices
            assist = info.view(-1)
        return _results(arrivals, assist, capacity, tp_world_size, expert_token_nums_type, expert_scales)

    return dispatch


npu_moe_distribute_dispatch = _dispatch_operator(1)
npu_moe_distribute_dispatch_v2 = _dispatch_operator(2)


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
    _require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(tp_send_counts, expand_scales, tp_world_size)
    _require_bound(expand_x, expert_ids, global_bs)
    group = _named_group(group_ep, ep_world_size, ep_rank_id)
    choices = _Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
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
    _require_simple(group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num)
    _require_results_of_dispatch(tp_send_counts, expand_scales, tp_world_size)
    _require_bound(expand_x, expert_ids, global_bs)
    group = _named_group(group_ep, ep_world_size, ep_rank_id)
    choices = _Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
    choice_A1 = assist_info_for_combine.view(-1, ASSIST_WIDTH)[:, 1:2]
    returned_NH, choice_N1 = _return_rows(
        group, [expand_x, choice_A1], ep_send_counts, choices, moe_expert_num
    )
    return _weigh_and_sum(returned_NH, choice_N1.squeeze(1), expert_scales)


def _return_rows(
    group: RankGroup,
    columns: list[torch.Tensor],
    ep_send_counts: torch.Tensor,
    choices: _Choices,
    moe_expert_num: int,
) -> list[torch.Tensor]:
    """Columns ``[A, ...]`` of the rows here, back on the ranks that their choices came from."""
    order_N, counts_R = _rows_by_source(ep_send_counts, moe_expert_num // group.size, group.size)
    ordered = [column[order_N] for column in columns]
    received = choices.sent_RS.sum(dim=1).tolist()
    return unpack_rows(group.all_to_all(pack_rows(ordered), counts_R.tolist(), received), ordered)


@dataclass(frozen=True)
class _Choices:
    """The choices of one rank's tokens that are to be sent, in order of expert."""

    choice_of_row: torch.Tensor
    sent_RS: torch.Tensor

    @classmethod
    def of(
        cls, expert_ids_TK: torch.Tensor, active: torch.Tensor | None, ranks: int, experts: int
    ) -> _Choices:
        """The choices of ``expert_ids`` that ``active`` (bool ``[T]`` or ``[T, K]``) leaves."""
        expert_N = expert_ids_TK.reshape(-1)
        if active is not None:
            active_TK = active if active.ndim == 2 else active.unsqueeze(1).expand_as(expert_ids_TK)
            expert_N = expert_N.masked_fill(~active_TK.reshape(-1), experts)
        counts_P = count_ids(expert_N, experts + 1)[:-1]
        return cls(expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1))

    def place_within_expert(self) -> torch.Tensor:
        """How many sent rows of the same expert come before each row, int64 ``[rows]``."""
        counts_P = self.sent_RS.reshape(-1)
        first_P = counts_P.cumsum(0) - counts_P
        rows = torch.arange(self.choice_of_row.shape[0], device=counts_P.device)
        return rows - first_P.repeat_interleave(counts_P)


@dataclass(frozen=True)
class _Arrivals:
    """The rows that came to a rank, sorted by local expert and then by source rank."""

    columns: list[torch.Tensor]
    received_RS: torch.Tensor


def _exchange_choices(
    group: RankGroup,
    x: torch.Tensor,
    choices: _Choices,
    top_k: int,
    quant_mode: int,
    weights_TK: torch.Tensor | None,
) -> _Arrivals:
    """Send each choice's token to its expert: as columns arrive rows, scales, source, choice there, and weight."""
    require(quant_mode in list(DispatchQuantMode), f"quant_mode must be 0 or 2 (dynamic), got {quant_mode}")
    choice_of_row = choices.choice_of_row
    rows_NH = x.index_select(0, choice_of_row // top_k)
    scale_N = rows_NH.new_zeros(rows_NH.shape[0], dtype=torch.float32)
    if quant_mode == DispatchQuantMode.DYNAMIC:
        rows_NH, scale_N = npu_dynamic_quant(rows_NH)
    weights_N = torch.zeros_like(scale_N)
    if weights_TK is not None:
        weights_N = weights_TK.float().reshape(-1)[choice_of_row]
    source_N = torch.full_like(choice_of_row, group.rank)
    columns = [rows_NH, *(column.unsqueeze(1) for column in (scale_N, source_N, choice_of_row, weights_N))]
    received_RS = group.exchange(choices.sent_RS)
    sent, received = choices.sent_RS.sum(dim=1).tolist(), received_RS.sum(dim=1).tolist()
    arrived = unpack_rows(group.all_to_all(pack_rows(columns), sent, received), columns)
    slot_of_block = torch.arange(received_RS.shape[1], device=x.device).repeat(group.size)
    order_N = slot_of_block.repeat_interleave(received_RS.view(-1)).argsort(stable=True)
    return _Arrivals([column[order_N] for column in arrived], received_RS)


def _capacity(arrivals: _Arrivals, global_bs: int, top_k: int) -> int:
    """A, the rows of the result, which may not depend on the routing."""
    capacity = global_bs * min(arrivals.received_RS.shape[1], top_k)
    rows = arrivals.columns[0].shape[0]
    require(rows <= capacity, f"{rows} rows arrive, past global_bs's bound of {capacity}")
    return capacity


def _results(
    arrivals: _Arrivals,
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


def _weigh_and_sum(
    rows_NH: torch.Tensor, choice_of_row: torch.Tensor, expert_scales: torch.Tensor
) -> torch.Tensor:
    """Each token's rows times their weights, summed in float32 and in order of choice; ``[T, H]``."""
    outputs_NH = rows_NH.new_zeros(expert_scales.numel(), rows_NH.shape[1], dtype=torch.float32)
    outputs_NH[choice_of_row.long()] = rows_NH.float()
    outputs_TKH = outputs_NH.view(*expert_scales.shape, outputs_NH.shape[1])
    return (outputs_TKH * expert_scales.float().unsqueeze(-1)).sum(dim=1).to(rows_NH.dtype)


def _rows_by_source(
    ep_send_counts: torch.Tensor, slots: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows here in order of the rank that they came from, and how many came from each, ``[R]``."""
    cumulative = ep_send_counts[: slots * ranks].long()
    counts_SR = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).view(slots, ranks)
    source_of_block = torch.arange(ranks, device=cumulative.device).repeat(slots)
    source_N = source_of_block.repeat_interleave(counts_SR.view(-1))
    return source_N.argsort(stable=True), counts_SR.sum(dim=0)


def _named_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> RankGroup:
    """The group that an operator is to work in; ``ValueError`` where it is not the one described."""
    group = RankGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    return group


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    """Rows followed by zeros, ``length`` in all."""
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX


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
