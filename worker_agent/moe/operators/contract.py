"""What each operator takes and returns, in torch_npu's names: the part of them that this package uses."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch


class GroupListType(IntEnum):
    """How a group list ``[groups]`` encodes the rows of each group."""

    CUMULATIVE = 0
    COUNTS = 1


class QuantMode(IntEnum):
    """What ``npu_moe_init_routing_v2`` does to the rows that it returns."""

    NONE = -1
    DYNAMIC = 1
    """int8, with one scale per row."""


class DispatchQuantMode(IntEnum):
    """What ``npu_moe_distribute_dispatch_v2`` does to the rows that it sends."""

    NONE = 0
    DYNAMIC = 2
    """int8, with one scale per row."""


def token_counts(group_list: torch.Tensor, group_list_type: int) -> torch.Tensor:
    """Rows of each group, whichever way a group list encodes them."""
    if group_list_type == GroupListType.COUNTS:
        return group_list
    return torch.diff(group_list, prepend=group_list.new_zeros(1))


def count_ids(ids: torch.Tensor, bins: int) -> torch.Tensor:
    """How often each id ``0..bins-1`` occurs, int64 ``[bins]``."""
    flat_N = ids.reshape(-1)
    counts = torch.zeros(bins, dtype=torch.int64, device=ids.device)
    return counts.index_add_(0, flat_N, torch.ones(flat_N.shape, dtype=torch.int64, device=ids.device))


class Operators(Protocol):
    """Operators by torch_npu's names. N rows, H their width, G groups, T tokens, K choices per token."""

    def npu_moe_token_permute(
        self, tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Repeat tokens ``[T, H]`` once per choice, stably sorted by ``indices`` (``[T, K]`` or ``[T]``).

        Returns the rows ``[T*K, H]`` and int32 ``[T*K]``: the row of each choice among them. With a
        positive ``num_out_tokens`` only that many first rows are returned.
        """
        ...

    def npu_moe_token_unpermute(
        self, permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Undo a permutation: ``[T, H]``, each token the sum of its choices' rows times ``probs [T, K]``.

        Without ``probs`` each row is a token of its own.
        """
        ...

    def npu_moe_init_routing_v2(
        self,
        x: torch.Tensor,
        expert_idx: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        active_num: int,
        expert_num: int,
        expert_tokens_num_type: int = 0,
        expert_tokens_num_flag: bool = False,
        active_expert_range: list[int],
        quant_mode: int = -1,
        row_idx_type: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the choices ``expert_idx [T, K]`` within ``active_expert_range`` (half open) by expert.

        Returns the rows ``[T*K, H]``, those of active choices first and the rest undefined; int32 ``[T*K]``,
        the row of each choice, or -1 where it is not active; the tokens of each active expert, int64,
        counts where ``expert_tokens_num_type`` is 1 and cumulative where it is 0; and float32 ``[T*K]``, the
        rows' scales where they are quantized: here, or before, when ``scale [T]`` holds the tokens' own.
        """
        ...

    def npu_grouped_matmul(
        self,
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        *,
        bias: list[torch.Tensor] | None = None,
        scale: list[torch.Tensor] | None = None,
        per_token_scale: list[torch.Tensor] | None = None,
        group_list: torch.Tensor,
        split_item: int = 0,
        group_type: int | None = None,
        group_list_type: int = 0,
        output_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Multiply each group of rows of ``x[0] [N, K]`` with its matrix of ``weight[0] [G, K, M]``.

        ``group_list`` int64 ``[G]`` is read as ``group_list_type`` says; ``group_type`` 0 groups rows and
        ``split_item`` 2 returns one tensor ``[N, M]``. Rows past the last group are undefined.

        Where both are int8, the product of a group is scaled by ``scale[0] [G, M]`` by column and by
        ``per_token_scale[0] [N]`` by row, and returned as ``output_dtype``. To other products ``bias[0] [G, M]`` is
        added.
        """
        ...

    def npu_moe_distribute_dispatch_v2(
        self,
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
        ...

    def npu_moe_distribute_dispatch(
        self,
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
        """As ``npu_moe_distribute_dispatch_v2``; the assist info is int32 ``[T * K]``.

        It holds for each choice how many choices of the same expert come before it on this rank. Hardware
        understands no ``x_active_mask`` here.
        """
        ...

    def npu_moe_distribute_combine_v2(
        self,
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
        ...

    def npu_moe_distribute_combine(
        self,
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
        """As ``npu_moe_distribute_combine_v2``, with the third result of the dispatch as ``expand_idx``."""
        ...

    def npu_dynamic_quant(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize each row of ``[N, H]`` symmetrically: int8 ``[N, H]``, and float32 ``[N]`` to scale it back by."""
        ...

    def npu_swiglu(self, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """SiLU of the first half of ``dim`` times the second half."""
        ...
