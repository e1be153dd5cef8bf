"""What both versions of MC2's fused exchanges share, in plain torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.heat import count_ids
from worker_agent.moe.operators.contract import DispatchQuantMode
from worker_agent.moe.operators.reference.arithmetic import npu_dynamic_quant
from worker_agent.moe.operators.reference.requirement import require
from worker_agent.moe.packing import pack_rows, unpack_rows
from worker_agent.moe.rank_group import RankGroup


@dataclass(frozen=True)
class Choices:
    """The choices of one rank's tokens that are to be sent, in order of expert."""

    choice_of_row: torch.Tensor
    sent_RS: torch.Tensor

    @classmethod
    def of(
        cls, expert_ids_TK: torch.Tensor, active: torch.Tensor | None, ranks: int, experts: int
    ) -> Choices:
        """The choices of ``expert_ids`` that ``active`` (bool ``[T]`` or ``[T, K]``) leaves."""
        expert_N = expert_ids_TK.reshape(-1)
        if active is not None:
            active_TK = active if active.ndim == 2 else active.unsqueeze(1).expand_as(expert_ids_TK)
            expert_N = expert_N.masked_fill(~active_TK.reshape(-1), experts)
        counts_P = count_ids(expert_N, experts + 1)[:-1]
        return cls(expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1))

    def place_within_expert(self) -> torch.Tensor:
        """How many sent rows of the same expert stand before each row, int64 ``[rows]``."""
        counts_P = self.sent_RS.reshape(-1)
        first_P = counts_P.cumsum(0) - counts_P
        rows = torch.arange(self.choice_of_row.shape[0], device=counts_P.device)
        return rows - first_P.repeat_interleave(counts_P)


@dataclass(frozen=True)
class Arrivals:
    """The rows that came to a rank, sorted by local expert and then by source rank."""

    columns: list[torch.Tensor]
    received_RS: torch.Tensor


def exchange_choices(
    group: RankGroup,
    x: torch.Tensor,
    choices: Choices,
    top_k: int,
    quant_mode: int,
    weights_TK: torch.Tensor | None,
) -> Arrivals:
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
    return Arrivals([column[order_N] for column in arrived], received_RS)


def weigh_and_sum(
    rows_NH: torch.Tensor, choice_of_row: torch.Tensor, expert_scales: torch.Tensor
) -> torch.Tensor:
    """Each token's rows times their weights, summed in float32 and in order of choice; ``[T, H]``."""
    outputs_NH = rows_NH.new_zeros(expert_scales.numel(), rows_NH.shape[1], dtype=torch.float32)
    outputs_NH[choice_of_row.long()] = rows_NH.float()
    outputs_TKH = outputs_NH.view(*expert_scales.shape, outputs_NH.shape[1])
    return (outputs_TKH * expert_scales.float().unsqueeze(-1)).sum(dim=1).to(rows_NH.dtype)


def named_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> RankGroup:
    """The group that an operator is to work in; ``ValueError`` where it is not the one described."""
    group = RankGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    return group


def padded(rows_NX: torch.Tensor, length: int) -> torch.Tensor:
    """Rows followed by zeros, ``length`` in all."""
    padded_AX = rows_NX.new_zeros(length, *rows_NX.shape[1:])
    padded_AX[: rows_NX.shape[0]] = rows_NX
    return padded_AX


def require_simple(
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
