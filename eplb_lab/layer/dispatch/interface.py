"""The interface of token dispatchers: choices in, rows for local experts out, and a way back for their outputs."""

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
    """This rank's tokens and their choices. T may be 0."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    """Logical experts, int32 or int64; -1 for a choice that is not real: it is routed nowhere and counts nowhere."""

    topk_weights_TK: torch.Tensor
    log2phy_E: torch.Tensor
    """int32: the physical expert that serves each logical one, for the tokens that this rank sends; ``[E, D]`` where it
    deals them over several."""

    scale_T: torch.Tensor | None = None
    """float32: the scale of each token, where ``hidden`` is int8 already."""

    quantized: bool = False
    """Experts want int8 rows with one scale each; dispatchers quantize before sending where they can."""

    begun_E: torch.Tensor | None = None
    """int64: choices of each expert that this rank has dealt before in this step; ``None`` for none."""

    physical_TK: torch.Tensor | None = None
    """int32: the physical expert of each choice, where this step's tokens were split already; anything for a choice
    that is not real. ``None`` where ``log2phy_E`` says it."""

    check_values: bool = False
    """A dispatcher with demands on the ids themselves checks them; on an accelerator that waits for it."""

    @property
    def active_TK(self) -> torch.Tensor:
        """bool: the choices that are real."""
        return self.topk_ids_TK >= 0

    @property
    def real_weights_TK(self) -> torch.Tensor:
        """float32: the weights, zero for choices that are not real."""
        return self.topk_weights_TK.float().masked_fill(~self.active_TK, 0.0)

    @property
    def quantizes(self) -> bool:
        """True where the dispatcher has to quantize rows, which are not int8 yet."""
        return self.quantized and self.scale_T is None

    def physical(self, nowhere: int) -> torch.Tensor:
        """Return the physical expert of each choice, ``[T, K]``; ``nowhere`` for choices that are not real."""
        physical_TK = self.physical_TK
        if physical_TK is None:
            table_ED = self.log2phy_E.reshape(self.log2phy_E.shape[0], -1)
            physical_TK = _dealt(table_ED, self.topk_ids_TK.reshape(-1), self.begun_E).view_as(
                self.topk_ids_TK
            )
        return physical_TK.masked_fill(~self.active_TK, nowhere)

    def after(self, before: DispatchRequest) -> DispatchRequest:
        """Return the same as a part of the step that ``before`` began: tokens are dealt on from where that ended."""
        experts = self.log2phy_E.shape[0]
        # What is not real, -1, counts behind the experts.
        ids_N = before.topk_ids_TK.reshape(-1).long() % (experts + 1)
        return replace(self, begun_E=count_ids(ids_N, experts + 1)[:-1])

    def weighed_on_input(self) -> DispatchRequest:
        """Return the same with each token multiplied by its weight, instead of its output: K is 1.

        Of tokens that are int8 already it is the scale that is multiplied.
        """
        ones_TK = torch.ones_like(self.topk_weights_TK)
        if self.scale_T is not None:
            scale_T = self.scale_T * self.topk_weights_TK[:, 0].float()
            return replace(self, scale_T=scale_T, topk_weights_TK=ones_TK)
        weighed_TH = self.hidden_TH * self.topk_weights_TK.to(self.hidden_TH.dtype)
        return replace(self, hidden_TH=weighed_TH, topk_weights_TK=ones_TK)


@dataclass(frozen=True)
class Dispatched:
    """The rows that have arrived for this rank's experts, and the way back."""

    batch: ExpertBatch
    combine: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    """Sends the experts' outputs, in the order of the batch's rows, back, to be called once; returns what waits for
    those that come here, weighs and sums them: ``[T, H]``. It keeps nothing of the batch."""


class TokenDispatcher(Protocol):
    """Dispatch and combine are collective: every rank of the group calls them at every step, with or without tokens.

    Each returns once its tokens are on their way, where they can travel while the caller does other work. Nothing of a
    call stays on the dispatcher.
    """

    format: ActivationFormat
    """Of the rows that it gives."""

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Send token choices to the ranks of their physical experts; return what waits for those that come here."""
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
    """Repeat tokens once per choice, stably sorted by ``order_TK``: int ``0..groups-1``, the group of each choice.

    Returns the rows; their scales, float32 ``[N]``, where they are int8; and the row of each choice, int32 ``[T*K]``.
    ``operators`` sort floating-point ``hidden_TH`` by permuting, and quantize it after that where ``quantize`` says so.
    The permutation takes no int8: tokens that have scales ``scale_T`` already are sorted by the routing
    operator. Operators are not called for no rows at all.
    """
    if not order_TK.numel():
        quantized = quantize or scale_T is not None
        rows_NH = hidden_TH.new_empty(
            0, hidden_TH.shape[1], dtype=torch.int8 if quantized else hidden_TH.dtype
        )
        none_N = hidden_TH.new_empty(0, dtype=torch.float32) if quantized else None
        return rows_NH, none_N, order_TK.new_empty(0, dtype=torch.int32)
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
    """The last part of combine: weighs the row of each choice and sums them by token."""

    row_of_choice: torch.Tensor
    """int32 ``[T*K]``; any number for a choice that has none."""

    weights_TK: torch.Tensor
    absent_TK: torch.Tensor | None = None
    """bool: the choices that have no row. ``None`` where ``row_of_choice`` is a permutation of all choices, behind
    whose last row those without one come: their rows are zeros."""

    def __call__(self, operators: Operators, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return the tokens' outputs ``[T, H]``, of the rows' dtype; the rows are used up."""
        if not rows_NH.shape[0]:
            return rows_NH.new_zeros(self.weights_TK.shape[0], rows_NH.shape[1])
        if self.absent_TK is None:
            # The operator wants a row for each choice.
            rows_NH = pad(rows_NH, (0, 0, 0, self.weights_TK.numel() - rows_NH.shape[0]))
            weights_TK = self.weights_TK.to(rows_NH.dtype)
            return operators.npu_moe_token_unpermute(rows_NH, self.row_of_choice, weights_TK)
        # Another row of the same token replaces a missing one and weighs nothing, so that what another request's
        # row holds, be it NaN, stays there.
        row_TK = self.row_of_choice.view_as(self.weights_TK)
        own_T1 = row_TK.gather(1, (~self.absent_TK).int().argmax(dim=1, keepdim=True))
        nothing_T1 = self.absent_TK.all(dim=1, keepdim=True)
        row_TK = torch.where(self.absent_TK, own_T1.masked_fill(nothing_T1, 0), row_TK)
        weights_TK = self.weights_TK.masked_fill(self.absent_TK, 0.0).to(rows_NH.dtype)
        out_TH = operators.npu_moe_token_unpermute(rows_NH, row_TK.reshape(-1), weights_TK)
        return out_TH.masked_fill_(nothing_T1, 0.0)


def _dealt(table_ED: torch.Tensor, ids_N: torch.Tensor, begun_E: torch.Tensor | None) -> torch.Tensor:
    """Return the entry of each choice, of the table's dtype ``[N]``; anything for choices that are not real.

    By tensor operators alone, so that graphs may capture it: the ``i``-th real choice of an expert goes to entry
    ``i % D`` of the table, integers ``[E, D]``. ``ids_N`` has the expert of each choice in order, -1 for one that is
    not real, and ``begun_E`` counts those that were dealt before.
    """
    experts, width = table_ED.shape
    known_N = ids_N.long().clamp(min=0)
    if width == 1:
        return table_ED.view(-1).index_select(0, known_N)
    counted_N = ids_N.long() % (experts + 1)
    counts_E = count_ids(counted_N, experts + 1)
    # How many of the choices before it are of the same expert.
    turn_N = sorted_positions(counted_N) - (counts_E.cumsum(0) - counts_E).index_select(0, counted_N)
    if begun_E is not None:
        turn_N = turn_N + begun_E.index_select(0, known_N)
    return table_ED.reshape(-1).index_select(0, known_N * width + turn_N % width)
