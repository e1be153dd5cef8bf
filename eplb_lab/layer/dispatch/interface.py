"""Token dispatcher interface and shared helpers.

A dispatcher sends token choices to the ranks of their physical experts, and later sends the experts' outputs back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.functional import pad

from eplb_lab.layer.experts import ActivationFormat, ExpertBatch
from eplb_lab.layer.operators import GroupListType, Operators, QuantMode
from worker_agent.counting import count_ids, sorted_positions


@dataclass(frozen=True)
class DispatchRequest:
    """Request to dispatch this rank's tokens, with their choices. T may be 0."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    """Logical experts, int32 or int64; -1 marks a padding choice, which is neither routed nor counted."""

    topk_weights_TK: torch.Tensor
    log2phy_E: torch.Tensor
    """int32: this rank's table, the physical expert for each logical expert; ``[E, D]`` for a dealing table."""

    scale_T: torch.Tensor | None = None
    """float32: scale of each token, if ``hidden_TH`` is int8."""

    quantized: bool = False
    """True if the experts need int8 rows with one scale each. If possible, dispatchers quantise before sending."""

    dealt_counts_E: torch.Tensor | None = None
    """int64: number of choices per expert that this rank has already dealt in this step; ``None`` means zero."""

    physical_TK: torch.Tensor | None = None
    """int32: physical expert of each choice, if the tokens were split per step; otherwise ``log2phy_E`` is used.

    Values at padding choices are arbitrary.
    """

    check_values: bool = False
    """True if dispatchers check their additional requirements on the ids. On an accelerator, this blocks the host."""

    @property
    def active_TK(self) -> torch.Tensor:
        """Mask of the real choices, bool."""
        return self.topk_ids_TK >= 0

    @property
    def real_weights_TK(self) -> torch.Tensor:
        """Weights of the choices, float32; zero for padding choices."""
        return self.topk_weights_TK.float().masked_fill(~self.active_TK, 0.0)

    @property
    def quantizes(self) -> bool:
        """True if the dispatcher must quantise the rows, because the experts need int8 but the tokens are not int8."""
        return self.quantized and self.scale_T is None

    def physical(self, padding_id: int) -> torch.Tensor:
        """Return the physical expert of each choice, ``[T, K]``; ``padding_id`` for padding choices.

        Examples
        --------
        Expert 1 has replicas 4 and 9, and its tokens are dealt to them in turn:

        >>> ids_TK = torch.tensor([[1], [0], [1], [-1], [1]])
        >>> table_ED = torch.tensor([[2, 2], [4, 9]])
        >>> request = DispatchRequest(torch.zeros(5, 8), ids_TK, torch.ones(5, 1), table_ED)
        >>> request.physical(padding_id=-7).flatten().tolist()
        [4, 2, 9, -7, 4]
        """
        physical_TK = self.physical_TK
        if physical_TK is None:
            table_ED = self.log2phy_E.reshape(self.log2phy_E.shape[0], -1)
            physical_TK = _dealt(table_ED, self.topk_ids_TK.reshape(-1), self.dealt_counts_E).view_as(
                self.topk_ids_TK
            )
        return physical_TK.masked_fill(~self.active_TK, padding_id)

    def after(self, before: DispatchRequest) -> DispatchRequest:
        """Return this request as the second one of a step, so that it continues dealing where ``before`` stopped."""
        experts = self.log2phy_E.shape[0]
        # Count padding choices (-1) as an additional expert.
        ids_N = before.topk_ids_TK.reshape(-1).long() % (experts + 1)
        return replace(self, dealt_counts_E=count_ids(ids_N, experts + 1)[:-1])

    def weighed_on_input(self) -> DispatchRequest:
        """Return the request with weights applied to the tokens instead of the outputs; K must be 1.

        If tokens are already int8, the weights are applied to their scales.
        """
        ones_TK = torch.ones_like(self.topk_weights_TK)
        if self.scale_T is not None:
            scale_T = self.scale_T * self.topk_weights_TK[:, 0].float()
            return replace(self, scale_T=scale_T, topk_weights_TK=ones_TK)
        weighed_TH = self.hidden_TH * self.topk_weights_TK.to(self.hidden_TH.dtype)
        return replace(self, hidden_TH=weighed_TH, topk_weights_TK=ones_TK)


@dataclass(frozen=True)
class Dispatched:
    """Result of a dispatch: the rows received for this rank's experts, and the function that sends the outputs back."""

    batch: ExpertBatch
    combine: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    """Starts sending the experts' outputs back to their source ranks. Call it only once.

    The outputs are given in the order of the batch's rows.

    The result is a function that waits for the outputs of this rank's own tokens and returns their weighted sums,
    ``[T, H]``. It keeps no reference to the batch.
    """


class TokenDispatcher(Protocol):
    """Dispatcher for token choices.

    Dispatch and combine are collective: every rank of the group calls them in every step, even if it has no tokens.
    Both return as soon as the tokens are in transit, so that the caller can do other work in the meantime. A dispatcher
    keeps no state between calls.
    """

    format: ActivationFormat
    """Format of the rows that the dispatcher returns."""

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Start sending the choices to the ranks of their physical experts.

        Return a function that waits for the rows of this rank's experts and returns them.
        """
        ...


def sorted_rows(
    operators: Operators,
    hidden_TH: torch.Tensor,
    order_TK: torch.Tensor,
    groups: int,
    *,
    scale_T: torch.Tensor | None = None,
    quantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Repeat each token once per choice, and sort the rows by the group of the choice.

    Floating-point tokens are sorted by the permutation operator, which does not support int8. Tokens that are already
    int8 are sorted by the routing operator. If there are no choices, no operator is called.

    Parameters
    ----------
    operators
        Operators for the device.
    hidden_TH
        Tokens, in floating point or int8.
    order_TK
        Group of each choice, ``0..groups-1``. The sort is stable.
    groups
        Number of groups.
    scale_T
        Scales of int8 tokens.
    quantize
        Quantise the rows after the sort.

    Returns
    -------
    rows_NH : torch.Tensor
        Sorted rows.
    scale_N : torch.Tensor, optional
        float32 scales of the rows, if they are int8.
    row_of_choice : torch.Tensor
        Row of each choice, int32 ``[T*K]``.
    """
    if not order_TK.numel():
        quantized = quantize or scale_T is not None
        rows_NH = hidden_TH.new_empty(
            0, hidden_TH.shape[1], dtype=torch.int8 if quantized else hidden_TH.dtype
        )
        empty_N = hidden_TH.new_empty(0, dtype=torch.float32) if quantized else None
        return rows_NH, empty_N, order_TK.new_empty(0, dtype=torch.int32)
    if scale_T is not None:
        rows_NH, row_of_choice, _, scale_N = operators.npu_moe_init_routing_v2(
            hidden_TH,
            order_TK.to(torch.int32),
            scale=scale_T,
            active_num=order_TK.numel(),
            expert_num=groups,
            expert_tokens_num_type=GroupListType.COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, groups],
            quant_mode=QuantMode.NONE,
        )
        return rows_NH, scale_N, row_of_choice
    rows_NH, row_of_choice = operators.npu_moe_token_permute(hidden_TH, order_TK.long())
    if not quantize:
        return rows_NH, None, row_of_choice
    return *operators.npu_dynamic_quant(rows_NH), row_of_choice


@dataclass(frozen=True)
class WeightAndReduce:
    """Last step of combine. It multiplies each choice's row by the choice's weight, and sums the rows of each token."""

    row_of_choice: torch.Tensor
    """int32 ``[T*K]``: row of each choice; arbitrary for choices without a row."""

    weights_TK: torch.Tensor
    absent_TK: torch.Tensor | None = None
    """bool: choices without a row.

    ``None`` if ``row_of_choice`` is a permutation of all choices. Choices without a row are then last, and rows of
    zeros are appended for them.
    """

    def __call__(self, operators: Operators, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return the tokens' outputs ``[T, H]``, in the data type of the rows. Do not use ``rows_NH`` afterwards."""
        if not rows_NH.shape[0]:
            return rows_NH.new_zeros(self.weights_TK.shape[0], rows_NH.shape[1])
        if self.absent_TK is None:
            # The operator requires a row for each choice.
            rows_NH = pad(rows_NH, (0, 0, 0, self.weights_TK.numel() - rows_NH.shape[0]))
            weights_TK = self.weights_TK.to(rows_NH.dtype)
            return operators.npu_moe_token_unpermute(rows_NH, self.row_of_choice, weights_TK)
        # Replace an absent row with another row of the same token, with weight zero. A different token's row might
        # contain NaN, which would propagate to this token even with weight zero.
        row_TK = self.row_of_choice.view_as(self.weights_TK)
        present_T1 = row_TK.gather(1, (~self.absent_TK).int().argmax(dim=1, keepdim=True))
        no_rows_T1 = self.absent_TK.all(dim=1, keepdim=True)
        row_TK = torch.where(self.absent_TK, present_T1.masked_fill(no_rows_T1, 0), row_TK)
        weights_TK = self.weights_TK.masked_fill(self.absent_TK, 0.0).to(rows_NH.dtype)
        out_TH = operators.npu_moe_token_unpermute(rows_NH, row_TK.reshape(-1), weights_TK)
        return out_TH.masked_fill_(no_rows_T1, 0.0)


def _dealt(table_ED: torch.Tensor, ids_N: torch.Tensor, dealt_counts_E: torch.Tensor | None) -> torch.Tensor:
    """Return the table entry of each choice: the ``i``-th choice of an expert uses entry ``i % D``.

    Only tensor operators are used, so that a graph can capture the function.

    Parameters
    ----------
    table_ED
        Dealing table of integers.
    ids_N
        Expert of each choice, or -1 for a padding choice.
    dealt_counts_E
        Number of choices per expert that were dealt earlier in the step.

    Returns
    -------
    torch.Tensor
        Entries ``[N]`` in the table's data type; arbitrary for padding choices.
    """
    experts, width = table_ED.shape
    expert_N = ids_N.long().clamp(min=0)
    if width == 1:
        return table_ED.view(-1).index_select(0, expert_N)
    # Count padding choices (-1) as an additional expert.
    bucket_N = ids_N.long() % (experts + 1)
    counts_E = count_ids(bucket_N, experts + 1)
    # Number of earlier choices of the same expert.
    turn_N = sorted_positions(bucket_N) - (counts_E.cumsum(0) - counts_E).index_select(0, bucket_N)
    if dealt_counts_E is not None:
        turn_N = turn_N + dealt_counts_E.index_select(0, expert_N)
    return table_ED.reshape(-1).index_select(0, expert_N * width + turn_N % width)
