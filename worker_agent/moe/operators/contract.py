"""What each operator takes and returns, in torch_npu's names: the part of them that this package uses."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch


class GroupListType(IntEnum):
    """How a group list ``[groups]`` tells the rows of each group."""

    CUMULATIVE = 0
    COUNTS = 1


class QuantMode(IntEnum):
    """What ``npu_moe_init_routing_v2`` does to the rows that it returns."""

    NONE = -1
    DYNAMIC = 1
    """int8, with one scale a row."""


def token_counts(group_list: torch.Tensor, group_list_type: int) -> torch.Tensor:
    """Rows of each group, whichever way a group list tells them."""
    if group_list_type == GroupListType.COUNTS:
        return group_list
    return torch.diff(group_list, prepend=group_list.new_zeros(1))


class Operators(Protocol):
    """Operators by torch_npu's names. N rows, H their width, G groups, T tokens, K choices a token."""

    def npu_moe_token_permute(
        self, tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Repeat tokens ``[T, H]`` once per choice, stably sorted by ``indices`` (``[T, K]`` or ``[T]``).

        Returns the rows ``[T*K, H]`` and int32 ``[T*K]``: where each choice's row stands among them. With a
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
        active_num: int,
        expert_num: int,
        expert_tokens_num_type: int,
        expert_tokens_num_flag: bool,
        active_expert_range: list[int],
        quant_mode: int = -1,
        row_idx_type: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the choices ``expert_idx [T, K]`` within ``active_expert_range`` (half open) by expert.

        Returns the rows ``[T*K, H]``, those of active choices first and the rest undefined; int32 ``[T*K]``,
        where each choice's row stands, or -1 where it is not active; the tokens of each active expert, int64,
        counts where ``expert_tokens_num_type`` is 1 and cumulative where it is 0; and the scales of quantized
        rows.
        """
        ...

    def npu_grouped_matmul(
        self,
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        *,
        scale: list[torch.Tensor] | None = None,
        per_token_scale: list[torch.Tensor] | None = None,
        group_list: torch.Tensor,
        split_item: int,
        group_type: int,
        group_list_type: int,
        output_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Multiply each group of rows of ``x[0] [N, K]`` with its matrix of ``weight[0] [G, K, M]``.

        ``group_list`` int64 ``[G]`` is read as ``group_list_type`` says; ``group_type`` 0 groups rows and
        ``split_item`` 2 returns one tensor ``[N, M]``. Rows past the last group are undefined.

        Where both are int8, the product of a group is scaled by ``scale[0] [G, M]`` by column and by
        ``per_token_scale[0] [N]`` by row, and returned as ``output_dtype``.
        """
        ...

    def npu_dynamic_quant(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize each row of ``[N, H]`` symmetrically: int8 ``[N, H]``, and float32 ``[N]`` to scale it back by."""
        ...

    def npu_swiglu(self, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """SiLU of the first half of ``dim`` times the second half."""
        ...
