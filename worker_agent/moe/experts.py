"""The experts themselves: rows in, expert outputs in the same places out; three implementations of one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch.nn.functional import silu

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
    """Gated feed-forward experts, one per local slot."""

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

    def __init__(self, operators: Operators, *, weighs: bool = False) -> None:
        self._operators = operators
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        dtype = scratch.wide.dtype
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        gate_up_NI = grouped_product(
            self._operators, batch, batch.rows, batch.scale, weights.w13_SIH, weights.w13_scale_SI, dtype
        )
        inner_NI, inner_scale_N = self._operators.npu_swiglu(gate_up_NI), None
        if weights.quantized:
            inner_NI, inner_scale_N = self._operators.npu_dynamic_quant(inner_NI)
        out_NH = grouped_product(
            self._operators, batch, inner_NI, inner_scale_N, weights.w2_SHI, weights.w2_scale_SH, dtype
        )
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


def grouped_product(
    operators: Operators,
    batch: ExpertBatch,
    rows_NK: torch.Tensor,
    scale_N: torch.Tensor | None,
    weight_SMK: torch.Tensor,
    weight_scale_SM: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each row times the matrix of its slot, ``[N, M]``: rows in the order of ``batch``'s."""
    scales: dict[str, Any] = {}
    if scale_N is not None and weight_scale_SM is not None:
        scales = {"scale": [weight_scale_SM], "per_token_scale": [scale_N], "output_dtype": dtype}
    # One count is its own cumulative sum, and the operator takes no list of one count.
    alone = batch.group_list_S.shape[0] == 1
    (out_NM,) = operators.npu_grouped_matmul(
        [rows_NK],
        [weight_SMK.transpose(1, 2)],
        group_list=batch.group_list_S,
        split_item=2,
        group_type=0,
        group_list_type=GroupListType.CUMULATIVE if alone else batch.group_list_type,
        **scales,
    )
    return out_NM


class SlotwiseExperts:
    """For a CPU: nothing is allocated, and slots without rows cost nothing. Reads the counts on the host."""

    format = ActivationFormat.STANDARD
    chunks = True
    needs_scratch = True
    quantized: bool | None = False

    def __init__(self, *, weighs: bool = False) -> None:
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        rows_NH = batch.rows
        count, hidden = rows_NH.shape
        inner = weights.w2_SHI.shape[2]
        gate_up_NI = scratch.wide[: count * 2 * inner].view(count, 2 * inner)
        inner_NI = scratch.narrow[: count * inner].view(count, inner)
        blocks = _blocks(batch)
        for slot, (start, end) in blocks:
            torch.mm(rows_NH[start:end], weights.w13_SIH[slot].t(), out=gate_up_NI[start:end])
        used = blocks[-1][1][1] if blocks else 0
        gate_NI, up_NI = gate_up_NI[:used].chunk(2, dim=1)
        torch.mul(silu(gate_NI, inplace=True), up_NI, out=inner_NI[:used])
        # The first product has been used up: the outputs take its place.
        out_NH = scratch.wide[: count * hidden].view(count, hidden)
        for slot, (start, end) in blocks:
            torch.mm(inner_NI[start:end], weights.w2_SHI[slot].t(), out=out_NH[start:end])
        out_NH[used:] = 0
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


def _blocks(batch: ExpertBatch) -> list[tuple[int, tuple[int, int]]]:
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

    def __init__(self, *, weighs: bool = False) -> None:
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        slots, rows, hidden = batch.rows.shape
        inner = weights.w2_SHI.shape[2]
        gate_up_SMI = scratch.wide[: slots * rows * 2 * inner].view(slots, rows, 2 * inner)
        inner_SMI = scratch.narrow[: slots * rows * inner].view(slots, rows, inner)
        torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2), out=gate_up_SMI)
        gate_SMI, up_SMI = gate_up_SMI.chunk(2, dim=2)
        torch.mul(silu(gate_SMI, inplace=True), up_SMI, out=inner_SMI)
        # The first product has been used up: the outputs take its place.
        out_SMH = scratch.wide[: slots * rows * hidden].view(slots, rows, hidden)
        torch.bmm(inner_SMI, weights.w2_SHI.transpose(1, 2), out=out_SMH)
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
        """Uninitialised memory of set ``index``, valid until it is taken again for the same purpose.

        Raises ``ValueError`` where there is no such set.
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
