"""MC2's fused dispatch in plain torch.distributed, both versions; ``contract`` says what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_agent.moe.operators.contract import DispatchQuantMode, GroupListType
from worker_agent.moe.operators.reference.distribute import (
    ASSIST_WIDTH,
    Choices,
    named_group,
    require_simple,
)
from worker_agent.moe.operators.reference.local import npu_dynamic_quant, require
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows


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
        require_simple(
            group_ep, group_tp, tp_world_size, tp_rank_id, expert_shard_type, shared_expert_rank_num
        )
        group = named_group(group_ep, ep_world_size, ep_rank_id)
        choices = Choices.of(expert_ids, x_active_mask, ep_world_size, moe_expert_num)
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


@dataclass(frozen=True)
class _Arrivals:
    """The rows that came to a rank, sorted by local expert and then by source rank."""

    columns: list[torch.Tensor]
    received_RS: torch.Tensor


def _exchange_choices(
    group: RankGroup,
    x: torch.Tensor,
    choices: Choices,
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


def _padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    """Rows followed by zeros, ``length`` in all."""
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX
