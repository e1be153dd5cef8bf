"""The one interface of all token dispatchers: what goes in, what comes out, what is carried in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from worker_agent.moe.dispatch.dealing import dealt
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators, QuantMode, count_ids

Metadata = TypeVar("Metadata")
"""What ``combine`` must know of ``dispatch``; each dispatcher has its own type."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class DispatchRequest:
    """This rank's tokens and where they want to go. T may be 0."""

    hidden_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    """Logical experts, int32 or int64; where ``masked``, -1 for a choice that is not real."""

    topk_weights_TK: torch.Tensor
    log2phy_E: torch.Tensor
    """int32: the physical expert that serves each logical one, for the tokens that this rank sends; ``[E, D]`` where it
    deals them over several."""

    masked: bool = False
    """Whether there may be choices that are not real. They are routed nowhere, weigh nothing and count nowhere."""

    scale_T: torch.Tensor | None = None
    """float32: the scale of each token, where ``hidden`` is int8 already."""

    quantized: bool = False
    """Whether experts want int8 rows with one scale each; dispatchers quantize before sending where they can."""

    experts_weigh: bool = False
    """Whether rows must bring their weights to the experts; ``combine`` then only sums."""

    begun_E: torch.Tensor | None = None
    """int64: choices of each expert that this rank has dealt before in this step; ``None`` for none."""

    physical_TK: torch.Tensor | None = None
    """int32: the physical expert of each choice, where this step's tokens were split already; anything for a choice
    that is not real. ``None`` where ``log2phy_E`` says it."""

    check_values: bool = False
    """Whether a dispatcher with demands on the ids themselves checks them; on an accelerator that waits for it."""

    @property
    def active_TK(self) -> torch.Tensor | None:
        """bool: the choices that are real; ``None`` where all are."""
        return self.topk_ids_TK >= 0 if self.masked else None

    def physical(self, nowhere: int) -> torch.Tensor:
        """The physical expert of each choice, ``[T, K]``; ``nowhere`` for choices that are not real."""
        ids_TK, active_TK, physical_TK = self.topk_ids_TK, self.active_TK, self.physical_TK
        if physical_TK is None:
            known_TK = ids_TK if active_TK is None else ids_TK.clamp(min=0)
            physical_TK = self._by_table(known_TK.reshape(-1), active_TK).view_as(ids_TK)
        return physical_TK if active_TK is None else physical_TK.masked_fill(~active_TK, nowhere)

    def _by_table(self, known_N: torch.Tensor, active_TK: torch.Tensor | None) -> torch.Tensor:
        """The physical expert that the table names for each choice, ``[N]``; anything where it is not real."""
        if self.log2phy_E.ndim == 1:
            return self.log2phy_E.index_select(0, known_N)
        active_N = None if active_TK is None else active_TK.reshape(-1)
        return dealt(self.log2phy_E, known_N, active_N, self.begun_E)

    def after(self, before: DispatchRequest) -> DispatchRequest:
        """The same as a part of the step that ``before`` began: tokens are dealt on from where that ended."""
        if self.log2phy_E.ndim == 1:
            return self
        experts = self.log2phy_E.shape[0]
        ids_N = before.topk_ids_TK.reshape(-1).long()
        # What is not real, -1, counts behind the experts.
        begun_E = count_ids(ids_N % (experts + 1), experts + 1)[:-1]
        return replace(self, begun_E=begun_E if before.begun_E is None else begun_E + before.begun_E)

    def real_weights(self) -> torch.Tensor:
        """float32 ``[T, K]``: the weights, zero for choices that are not real."""
        weights_TK, active_TK = self.topk_weights_TK.float(), self.active_TK
        return weights_TK if active_TK is None else weights_TK * active_TK

    def weighed_on_input(self) -> DispatchRequest:
        """The same with each token multiplied by its weight, instead of its output: K is 1.

        Of tokens that are int8 already it is the scale that is multiplied.
        """
        ones_TK = torch.ones_like(self.topk_weights_TK)
        if self.scale_T is not None:
            scale_T = self.scale_T * self.topk_weights_TK[:, 0].float()
            return replace(self, scale_T=scale_T, topk_weights_TK=ones_TK)
        weighed_TH = self.hidden_TH * self.topk_weights_TK.to(self.hidden_TH.dtype)
        return replace(self, hidden_TH=weighed_TH, topk_weights_TK=ones_TK)


@dataclass(frozen=True)
class Dispatched(Generic[Metadata]):
    """What has arrived for this rank's experts, and what the way back needs."""

    batch: ExpertBatch
    metadata: Metadata


@dataclass(frozen=True)
class InFlight(Generic[Result]):
    """Something that travels while the caller does other work."""

    hook: Callable[[], object]
    """Waits for the communication alone; an overlapping caller may call it early, and need not."""

    receive: Callable[[], Result]
    """Waits, and does what is left to do with what came. To be called once."""


class TokenDispatcher(Protocol[Metadata]):
    """Both halves are collective: every rank of the group calls them at every step, with or without tokens.

    Nothing of a call stays on the dispatcher; what ``combine`` needs travels in ``Dispatched.metadata``.
    """

    format: ActivationFormat
    brings_weights: bool
    """Whether it serves requests whose experts weigh."""

    def dispatch(self, request: DispatchRequest) -> Dispatched[Metadata]:
        """Bring token choices to the ranks of their physical experts."""
        ...

    def combine(self, rows: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        """Bring expert outputs, in the order of the batch's rows, back and weigh and sum them: ``[T, H]``."""
        ...


@runtime_checkable
class AsyncTokenDispatcher(Protocol[Metadata]):
    """A dispatcher whose tokens travel while the caller does other work."""

    def start_dispatch(self, request: DispatchRequest) -> InFlight[Dispatched[Metadata]]:
        """As ``dispatch``, without waiting for the tokens."""
        ...

    def start_combine(self, rows: torch.Tensor, metadata: Metadata) -> InFlight[torch.Tensor]:
        """As ``combine``, without waiting for the outputs."""
        ...


def started_dispatch(
    dispatcher: TokenDispatcher[Metadata], request: DispatchRequest
) -> InFlight[Dispatched[Metadata]]:
    """Send the tokens, without waiting for them where the dispatcher can."""
    if isinstance(dispatcher, AsyncTokenDispatcher):
        return dispatcher.start_dispatch(request)
    return _arrived(dispatcher.dispatch(request))


def started_combine(
    dispatcher: TokenDispatcher[Metadata], rows: torch.Tensor, metadata: Metadata
) -> InFlight[torch.Tensor]:
    """Send the outputs back, without waiting for them where the dispatcher can."""
    if isinstance(dispatcher, AsyncTokenDispatcher):
        return dispatcher.start_combine(rows, metadata)
    return _arrived(dispatcher.combine(rows, metadata))


def _arrived(result: Result) -> InFlight[Result]:
    return InFlight(lambda: None, lambda: result)


@dataclass(frozen=True)
class SortedRows:
    """A row for each choice, in order of what they were sorted by."""

    rows_NH: torch.Tensor
    scale_N: torch.Tensor | None
    """float32, where rows are int8."""

    weights_N: torch.Tensor | None
    row_of_choice: torch.Tensor
    """int32 ``[T*K]``."""


def sorted_rows(
    operators: Operators,
    hidden_TH: torch.Tensor,
    order_TK: torch.Tensor,
    groups: int,
    *,
    scale_T: torch.Tensor | None = None,
    weights_TK: torch.Tensor | None = None,
    quantize: bool = False,
) -> SortedRows:
    """Repeat tokens once per choice, stably sorted by ``order`` (int ``0..groups-1``), with scales and weights.

    Floating-point rows are sorted by permuting, and quantized after it where ``quantize`` says so; the permutation
    takes no int8, so that rows which have scales already are sorted by the routing operator. Operators are not called
    for no rows at all.

    Parameters
    ----------
    operators
        What sorts and quantizes.
    hidden_TH, order_TK
        Tokens ``[T, H]``, and the group of each of their choices, int ``[T, K]``, ``0..groups-1``.
    groups
        How many there are.
    scale_T
        Scales of int8 tokens, float32 ``[T]``.
    weights_TK
        Weights of the choices, which go along with their rows.
    quantize
        Whether rows are quantized once they are sorted.
    """
    if not order_TK.numel():
        rows_NH = hidden_TH.new_empty(
            0, hidden_TH.shape[1], dtype=torch.int8 if quantize else hidden_TH.dtype
        )
        none_N = hidden_TH.new_empty(0, dtype=torch.float32)
        return SortedRows(
            rows_NH,
            none_N if quantize or scale_T is not None else None,
            None if weights_TK is None else none_N,
            order_TK.new_empty(0, dtype=torch.int32),
        )
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
    else:
        scale_N = None
        rows_NH, row_of_choice = operators.npu_moe_token_permute(hidden_TH, order_TK.long())
        if quantize:
            rows_NH, scale_N = operators.npu_dynamic_quant(rows_NH)
    weights_N = None
    if weights_TK is not None:
        flat_N = weights_TK.reshape(-1)
        weights_N = torch.empty_like(flat_N).scatter_(0, row_of_choice.long(), flat_N)
    return SortedRows(rows_NH, scale_N, weights_N, row_of_choice)


@dataclass(frozen=True)
class Weights:
    """A request's weights, put where they will be applied: one of the two is ``None``."""

    by_experts_TK: torch.Tensor | None
    by_combine_TK: torch.Tensor | None

    @classmethod
    def of(cls, request: DispatchRequest) -> Weights:
        """Where the request wants them."""
        weights_TK = request.real_weights()
        return cls(weights_TK, None) if request.experts_weigh else cls(None, weights_TK)


@dataclass(frozen=True)
class WeightAndReduce:
    """The row of each choice, and what it weighs."""

    row_of_choice: torch.Tensor
    """int32 ``[T*K]``; any number outside the rows for a choice that has none."""

    choices: int
    """K."""

    weights_TK: torch.Tensor | None
    """``None`` where the experts have weighed: rows are then only summed."""

    absent_TK: torch.Tensor | None = None
    """bool: the choices that have no row; ``None`` where all have one."""

    def __call__(self, operators: Operators, rows_NH: torch.Tensor) -> torch.Tensor:
        """The tokens' outputs ``[T, H]``, of the rows' dtype; the rows are used up."""
        tokens = self.row_of_choice.shape[0] // self.choices
        if not rows_NH.shape[0]:
            return rows_NH.new_zeros(tokens, rows_NH.shape[1])
        weights_TK = self.weights_TK
        if weights_TK is None:
            weights_TK = rows_NH.new_ones(tokens, self.choices, dtype=torch.float32)
        row_of_choice = self.row_of_choice
        if self.absent_TK is not None:
            # Row 0 replaces a missing one and weighs nothing; where it is nobody's it may hold anything, even NaN.
            weights_TK = weights_TK.masked_fill(self.absent_TK, 0.0)
            row_of_choice = row_of_choice.masked_fill(self.absent_TK.reshape(-1), 0)
            rows_NH[0].masked_fill_(self.absent_TK.all(), 0.0)
        return operators.npu_moe_token_unpermute(rows_NH, row_of_choice, weights_TK.to(rows_NH.dtype))
