"""The experts themselves: rows in, expert outputs in the same places out; two implementations of one interface."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from worker_agent.moe.operators import GroupListType, Operators
from worker_agent.moe.shape import Activation, MoEShape
from worker_agent.moe.weights import ExpertWeights


class ActivationFormat(str, Enum):
    """The layout of the rows of local slots in one tensor."""

    STANDARD = "standard"
    """``[N, H]``: rows sorted by slot. As small as can be, but its size depends on the routing."""

    BATCHED = "batched"
    """``[S, M, H]``: M rows for each slot, the real ones first. Its size is the same at every step."""


@dataclass(frozen=True)
class ExpertBatch:
    """Rows for the experts of S local slots."""

    rows: torch.Tensor
    """``[N, H]`` or ``[S, M, H]``; rows that belong to no slot are to be ignored."""

    group_list_S: torch.Tensor
    """int64: the rows of each local slot."""

    group_list_type: GroupListType
    scale_N: torch.Tensor | None = None
    """float32: the scale of each row, where rows are int8."""

    idle_S: torch.Tensor | None = None
    """int64: rows of each slot that are padding, where an exchange has to carry padding along."""

    @property
    def counts_S(self) -> torch.Tensor:
        """The rows of each local slot, padding among them, int64."""
        return self.group_list_type.counts(self.group_list_S)

    @property
    def heat_S(self) -> torch.Tensor:
        """The real token choices of each local slot, int64."""
        return self.counts_S if self.idle_S is None else self.counts_S - self.idle_S


class Experts(Protocol):
    """Feed-forward experts, one per local slot."""

    format: ActivationFormat
    """Of the rows that it takes, and gives back."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, /) -> torch.Tensor:
        """Put each row through the expert of its slot: shaped as the batch, of ``dtype``, in memory of its own."""
        ...


class QuantMethod(Protocol):
    """The seam of a quantization: ``quantization`` has the methods, which describe the arguments."""

    quantizes_tokens: bool
    """Experts want int8 rows, with a scale each."""

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool, /
    ) -> ExpertWeights:
        """Make the tensors that a checkpoint is loaded into."""
        ...

    def process_after_load(
        self, weights: ExpertWeights, operators: Operators, dtype: torch.dtype, /
    ) -> ExpertWeights:
        """Return the tensors that the layer holds and computes with, made of those that were loaded."""
        ...

    def apply(
        self,
        operators: Operators,
        batch: ExpertBatch,
        weights: ExpertWeights,
        activation: Activation,
        dtype: torch.dtype,
        /,
    ) -> torch.Tensor:
        """Put each row through the expert of its slot, ``[N, H]`` of ``dtype``."""
        ...


class GroupedExperts:
    """Experts by the operators of an NPU, as their quantization method has it."""

    format = ActivationFormat.STANDARD

    def __init__(self, operators: Operators, activation: Activation, method: QuantMethod) -> None:
        self._operators, self._activation, self._method = operators, activation, method

    def run(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
        """Multiply, activate and multiply group by group; nothing is called for no rows."""
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        return self._method.apply(self._operators, batch, weights, self._activation, dtype)


def activated(operators: Operators, activation: Activation, first_NI: torch.Tensor) -> torch.Tensor:
    """Return the activation of a first product, ``[N, I]``; by the fused operator where there is one, and rows."""
    if activation is Activation.SILU and first_NI.shape[0]:
        return operators.npu_swiglu(first_NI)
    return activation(first_NI)


def grouped_product(
    operators: Operators,
    batch: ExpertBatch,
    rows_NK: torch.Tensor,
    scale_N: torch.Tensor | None,
    weight_SMK: torch.Tensor,
    weight_scale_SM: torch.Tensor | None,
    bias_SM: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply each row by the matrix of its slot and add its bias: ``[N, M]`` of ``dtype``.

    ``operators`` multiply. Rows ``rows_NK`` are in the order of ``batch``'s; where they are int8 they have scales
    ``scale_N``, float32 ``[N]``. Slots have matrices ``weight_SMK``, with scales ``weight_scale_SM`` where they are
    int8, and biases ``bias_SM`` if any.
    """
    more: dict[str, Any] = {}
    if scale_N is not None and weight_scale_SM is not None:
        more = {"scale": [weight_scale_SM], "per_token_scale": [scale_N], "output_dtype": dtype}
    elif bias_SM is not None:
        more = {"bias": [bias_SM]}
    # One count is its own cumulative sum, and the operator takes no list of one count.
    alone = batch.group_list_S.shape[0] == 1
    (out_NM,) = operators.npu_grouped_matmul(
        [rows_NK],
        [weight_SMK.transpose(1, 2)],
        group_list=batch.group_list_S,
        split_item=2,
        group_type=0,
        group_list_type=GroupListType.CUMULATIVE if alone else batch.group_list_type,
        **more,
    )
    if bias_SM is not None and "bias" not in more:
        # Of int8 rows the operator takes biases that it scales with the product, in int32 alone.
        row_N = torch.arange(rows_NK.shape[0], device=rows_NK.device)
        slot_N = torch.searchsorted(batch.counts_S.cumsum(0), row_N, right=True)
        out_NM += bias_SM.index_select(0, slot_N.clamp(max=bias_SM.shape[0] - 1))
    return out_NM


class BatchedExperts:
    """All M rows of all slots, real or not, without a look at the counts: a graph can capture it.

    In floating point alone.
    """

    format = ActivationFormat.BATCHED

    def __init__(self, activation: Activation = Activation.SILU) -> None:
        self._activation = activation

    def run(self, batch: ExpertBatch, weights: ExpertWeights, _dtype: torch.dtype) -> torch.Tensor:
        """Multiply, activate and multiply all slots at once; rows are of the outputs' dtype already."""
        first_SMI = torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2))
        if weights.w13_bias_SI is not None:
            first_SMI += weights.w13_bias_SI.unsqueeze(1)
        out_SMH = torch.bmm(self._activation(first_SMI), weights.w2_SHI.transpose(1, 2))
        if weights.w2_bias_SH is not None:
            out_SMH += weights.w2_bias_SH.unsqueeze(1)
        return out_SMH
