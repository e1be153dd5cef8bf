"""The experts themselves: rows in, expert outputs in the same places out; three implementations of one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from worker_agent.moe.activation import Activation
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators
from worker_agent.moe.weights import ExpertWeights


@dataclass(frozen=True)
class Scratch:
    """Memory that an experts part may write: its contents mean nothing before and after a call."""

    wide: torch.Tensor
    """1-D, of the outputs' dtype: room for the first product, and later for the down-projection's output."""

    narrow: torch.Tensor
    """1-D, room for the activation."""


class ExpertsPart(Protocol):
    """Feed-forward experts, one per local slot."""

    format: ActivationFormat
    """What it takes, and gives back."""

    weighs: bool
    """Whether it multiplies each row's output by the batch's weight; ``combine`` then only sums."""

    chunks: bool
    """Whether a batch may come in parts."""

    needs_scratch: bool
    """Whether it writes into scratch; otherwise its operators have memory of their own, and scratch is empty."""

    quantized: bool | None
    """Whether it takes int8 weights (True), floating-point ones (False) or either (None)."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """Each row through the expert of its slot: shaped as the batch, of the scratch's dtype and perhaps in it."""
        ...


def apply_row_weights(out: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
    """Outputs times the batch's weights, in place."""
    assert batch.weights is not None, "the kernel has seen to it that rows bring their weights"
    return out.mul_(batch.weights.unsqueeze(-1).to(out.dtype))


class GroupedExperts:
    """What runs on an NPU. The operators return memory of their own, so that no scratch is used."""

    format = ActivationFormat.STANDARD
    chunks = True
    needs_scratch = False
    quantized: bool | None = None

    def __init__(
        self, operators: Operators, *, weighs: bool = False, activation: Activation = Activation.SILU
    ) -> None:
        self._operators = operators
        self._activation = activation
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        dtype = scratch.wide.dtype
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        first = weights.w13_SIH, weights.w13_scale_SI, weights.w13_bias_SI
        first_NI = grouped_product(self._operators, batch, batch.rows, batch.scale, *first, dtype)
        inner_NI, inner_scale_N = activated(self._operators, self._activation, first_NI), None
        if weights.quantized:
            inner_NI, inner_scale_N = self._operators.npu_dynamic_quant(inner_NI)
        second = weights.w2_SHI, weights.w2_scale_SH, weights.w2_bias_SH
        out_NH = grouped_product(self._operators, batch, inner_NI, inner_scale_N, *second, dtype)
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


def activated(operators: Operators, activation: Activation, first_NI: torch.Tensor) -> torch.Tensor:
    """The activation of a first product, ``[N, I]``; by the fused operator where there is one, and rows for it."""
    if activation is Activation.SILU and first_NI.shape[0]:
        return operators.npu_swiglu(first_NI)
    inner = first_NI.shape[1] // 2 if activation.gated else first_NI.shape[1]
    return activation.into(first_NI, first_NI.new_empty(first_NI.shape[0], inner))


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
    """Each row times the matrix of its slot, plus its bias, ``[N, M]``: rows in the order of ``batch``'s.

    Parameters
    ----------
    operators
        What multiplies.
    batch
        Which rows belong to which slot.
    rows_NK, scale_N
        Rows, and their scales where they are int8, float32 ``[N]``.
    weight_SMK, weight_scale_SM
        Matrices of the slots, and their scales where they are int8.
    bias_SM
        Biases of the slots; ``None`` without.
    dtype
        Of the product.
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


class SlotwiseExperts:
    """For a CPU: products allocate nothing, and slots without rows cost nothing. Reads the counts on the host."""

    format = ActivationFormat.STANDARD
    chunks = True
    needs_scratch = True
    quantized: bool | None = False

    def __init__(self, *, weighs: bool = False, activation: Activation = Activation.SILU) -> None:
        self._activation = activation
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        rows_NH = batch.rows
        count, hidden = rows_NH.shape
        first, inner = weights.w13_SIH.shape[1], weights.w2_SHI.shape[2]
        first_NI = scratch.wide[: count * first].view(count, first)
        inner_NI = scratch.narrow[: count * inner].view(count, inner)
        blocks = _blocks(batch)
        _slotwise_product(blocks, rows_NH, weights.w13_SIH, weights.w13_bias_SI, first_NI)
        used = blocks[-1][1][1] if blocks else 0
        self._activation.into(first_NI[:used], inner_NI[:used])
        # The first product has been used up: the outputs take its place.
        out_NH = scratch.wide[: count * hidden].view(count, hidden)
        _slotwise_product(blocks, inner_NI, weights.w2_SHI, weights.w2_bias_SH, out_NH)
        out_NH[used:] = 0
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


_Blocks = list[tuple[int, tuple[int, int]]]


def _slotwise_product(
    blocks: _Blocks,
    rows_NK: torch.Tensor,
    weight_SMK: torch.Tensor,
    bias_SM: torch.Tensor | None,
    out_NM: torch.Tensor,
) -> None:
    """Write each slot's rows times its matrix, plus its bias."""
    for slot, (start, end) in blocks:
        torch.mm(rows_NK[start:end], weight_SMK[slot].t(), out=out_NM[start:end])
        if bias_SM is not None:
            out_NM[start:end] += bias_SM[slot]


def _blocks(batch: ExpertBatch) -> _Blocks:
    """The slots that have rows, each with the first of its rows and the row after its last."""
    ends = batch.counts_S.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    spans = zip(starts, ends, strict=True)
    return [(slot, span) for slot, span in enumerate(spans) if span[0] < span[1]]


class BatchedExperts:
    """All M rows of all slots, real or not, without a look at the counts: a graph can capture it."""

    format = ActivationFormat.BATCHED
    chunks = True
    needs_scratch = True
    quantized: bool | None = False

    def __init__(self, *, weighs: bool = False, activation: Activation = Activation.SILU) -> None:
        self._activation = activation
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        slots, rows, hidden = batch.rows.shape
        first, inner = weights.w13_SIH.shape[1], weights.w2_SHI.shape[2]
        first_SMI = scratch.wide[: slots * rows * first].view(slots, rows, first)
        inner_SMI = scratch.narrow[: slots * rows * inner].view(slots, rows, inner)
        torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2), out=first_SMI)
        if weights.w13_bias_SI is not None:
            first_SMI += weights.w13_bias_SI.unsqueeze(1)
        self._activation.into(first_SMI, inner_SMI)
        # The first product has been used up: the outputs take its place.
        out_SMH = scratch.wide[: slots * rows * hidden].view(slots, rows, hidden)
        torch.bmm(inner_SMI, weights.w2_SHI.transpose(1, 2), out=out_SMH)
        if weights.w2_bias_SH is not None:
            out_SMH += weights.w2_bias_SH.unsqueeze(1)
        return apply_row_weights(out_SMH, batch) if self.weighs else out_SMH


class Purpose(str, Enum):
    """What a piece of memory is for; each has its own, so that all of a set can be in use at once."""

    WIDE = "wide"
    """The first product of the experts, and the down-projection's output after it."""

    NARROW = "narrow"
    """The activation between them."""

    OUTPUT = "output"
    """The outputs of all chunks, where there are several."""


class Workspaces:
    """Grows to the largest demand and is never given back; one for all layers of a device.

    Parameters
    ----------
    sets
        1, or 2 for dual-batch overlap: the outputs of one batch must outlast the other batch's experts.
    """

    def __init__(self, sets: int = 1) -> None:
        if sets < 1:
            raise ValueError(f"there must be at least one set of workspaces, got {sets}")
        self.sets = sets
        self._memory: dict[tuple[int, Purpose], torch.Tensor] = {}

    def take(
        self, index: int, purpose: Purpose, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory, valid until it is taken again for the same purpose.

        Parameters
        ----------
        index
            Of the set.
        purpose
            What it is for.
        shape, dtype, device
            Of the tensor.

        Raises
        ------
        ValueError
            Where there is no such set.
        """
        if not 0 <= index < self.sets:
            raise ValueError(f"there is no set {index} among {self.sets} of workspaces")
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = self._memory.get((index, purpose))
        if memory is None or memory.numel() < size or memory.device != device:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            self._memory[index, purpose] = memory
        return memory[:size].view(dtype).view(*shape)

    @property
    def bytes(self) -> int:
        """What all sets hold."""
        return sum(memory.numel() for memory in self._memory.values())
