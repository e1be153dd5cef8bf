"""The experts themselves: rows in, expert outputs in the same places out; three implementations of one interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from worker_agent.moe.operators import GroupListType, Operators
from worker_agent.moe.shape import Activation
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
    scale: torch.Tensor | None = None
    """float32 ``[N]`` or ``[S, M]``: the scale of each row, where rows are int8."""

    weights: torch.Tensor | None = None
    """float32 ``[N]`` or ``[S, M]``: the weight of each row's output, where experts weigh."""

    idle_S: torch.Tensor | None = None
    """int64: rows of each slot that are padding, where an exchange has to carry padding along."""

    @property
    def format(self) -> ActivationFormat:
        """The layout of the rows."""
        return ActivationFormat.STANDARD if self.rows.ndim == 2 else ActivationFormat.BATCHED

    @property
    def counts_S(self) -> torch.Tensor:
        """The rows of each local slot, padding among them, int64."""
        return self.group_list_type.counts(self.group_list_S)

    @property
    def heat_S(self) -> torch.Tensor:
        """The real token choices of each local slot, int64."""
        return self.counts_S if self.idle_S is None else self.counts_S - self.idle_S

    def chunks(self, rows: int) -> Iterator[tuple[slice, ExpertBatch]]:
        """Yield parts of at most ``rows`` rows, in the batched format of each slot, and their place along that axis.

        A batch without rows has one part without rows.
        """
        length = self.rows.shape[0 if self.format is ActivationFormat.STANDARD else 1]
        for start in range(0, max(length, 1), rows):
            part = slice(start, min(start + rows, length))
            yield part, self._part(part)

    def _part(self, part: slice) -> ExpertBatch:
        width = part.stop - part.start
        if self.format is ActivationFormat.BATCHED:
            counts_S = (self.counts_S - part.start).clamp(0, width)
            index: tuple[slice, ...] = (slice(None), part)
        else:
            ends_S = (self.counts_S.cumsum(0) - part.start).clamp(0, width)
            counts_S = torch.diff(ends_S, prepend=ends_S.new_zeros(1))
            index = (part,)
        return ExpertBatch(
            self.rows[index],
            counts_S,
            GroupListType.COUNTS,
            None if self.scale is None else self.scale[index],
            None if self.weights is None else self.weights[index],
        )


class Experts:
    """Feed-forward experts, one per local slot; those that weigh multiply each row's output by the batch's weight."""

    format = ActivationFormat.STANDARD
    """Of the rows that it takes, and gives back."""

    needs_workspaces = True
    """It writes into workspaces; otherwise its operators have memory of their own."""

    quantized: bool | None = False
    """It takes int8 weights (True), floating-point ones (False) or either (None)."""

    def __init__(self, *, weighs: bool = False, activation: Activation = Activation.SILU) -> None:
        self._activation = activation
        self.weighs = weighs

    def run(
        self, batch: ExpertBatch, weights: ExpertWeights, wide: torch.Tensor, narrow: torch.Tensor
    ) -> torch.Tensor:
        """Put each row through the expert of its slot: shaped as the batch, of the workspaces' dtype.

        Contents of the workspaces, both 1-D, mean nothing before and after a call: ``wide`` has room for the first
        product, and later for the down-projection's output, ``narrow`` for the activation.
        """
        out = self._outputs(batch, weights, wide, narrow)
        if not self.weighs:
            return out
        assert batch.weights is not None, "the kernel has seen to it that rows bring their weights"
        return out.mul_(batch.weights.unsqueeze(-1).to(out.dtype))

    def _outputs(
        self, batch: ExpertBatch, weights: ExpertWeights, wide: torch.Tensor, narrow: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


class GroupedExperts(Experts):
    """Experts by the operators of an NPU, which return memory of their own."""

    needs_workspaces = False
    quantized = None

    def __init__(
        self, operators: Operators, *, weighs: bool = False, activation: Activation = Activation.SILU
    ) -> None:
        super().__init__(weighs=weighs, activation=activation)
        self._operators = operators

    def _outputs(
        self, batch: ExpertBatch, weights: ExpertWeights, wide: torch.Tensor, _narrow: torch.Tensor
    ) -> torch.Tensor:
        dtype = wide.dtype
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        first = weights.w13_SIH, weights.w13_scale_SI, weights.w13_bias_SI
        first_NI = grouped_product(self._operators, batch, batch.rows, batch.scale, *first, dtype)
        inner_NI, inner_scale_N = activated(self._operators, self._activation, first_NI), None
        if weights.quantized:
            inner_NI, inner_scale_N = self._operators.npu_dynamic_quant(inner_NI)
        second = weights.w2_SHI, weights.w2_scale_SH, weights.w2_bias_SH
        return grouped_product(self._operators, batch, inner_NI, inner_scale_N, *second, dtype)


def activated(operators: Operators, activation: Activation, first_NI: torch.Tensor) -> torch.Tensor:
    """Return the activation of a first product, ``[N, I]``; by the fused operator where there is one, and rows."""
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


class SlotwiseExperts(Experts):
    """For a CPU: products allocate nothing, and slots without rows cost nothing. Reads the counts on the host."""

    def _outputs(
        self, batch: ExpertBatch, weights: ExpertWeights, wide: torch.Tensor, narrow: torch.Tensor
    ) -> torch.Tensor:
        rows_NH = batch.rows
        count, hidden = rows_NH.shape
        first, inner = weights.w13_SIH.shape[1], weights.w2_SHI.shape[2]
        first_NI = wide[: count * first].view(count, first)
        inner_NI = narrow[: count * inner].view(count, inner)
        ends = batch.counts_S.cumsum(0).tolist()
        spans = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        blocks = [(slot, start, end) for slot, (start, end) in spans if start < end]
        _slotwise_product(blocks, rows_NH, weights.w13_SIH, weights.w13_bias_SI, first_NI)
        used = ends[-1]
        self._activation.into(first_NI[:used], inner_NI[:used])
        # The first product has been used up: the outputs take its place.
        out_NH = wide[: count * hidden].view(count, hidden)
        _slotwise_product(blocks, inner_NI, weights.w2_SHI, weights.w2_bias_SH, out_NH)
        out_NH[used:] = 0
        return out_NH


def _slotwise_product(
    blocks: Sequence[tuple[int, int, int]],
    rows_NK: torch.Tensor,
    weight_SMK: torch.Tensor,
    bias_SM: torch.Tensor | None,
    out_NM: torch.Tensor,
) -> None:
    """Write each slot's rows, from its first one to the one after its last, times its matrix, plus its bias."""
    for slot, start, end in blocks:
        torch.mm(rows_NK[start:end], weight_SMK[slot].t(), out=out_NM[start:end])
        if bias_SM is not None:
            out_NM[start:end] += bias_SM[slot]


class BatchedExperts(Experts):
    """All M rows of all slots, real or not, without a look at the counts: a graph can capture it."""

    format = ActivationFormat.BATCHED

    def _outputs(
        self, batch: ExpertBatch, weights: ExpertWeights, wide: torch.Tensor, narrow: torch.Tensor
    ) -> torch.Tensor:
        slots, rows, hidden = batch.rows.shape
        first, inner = weights.w13_SIH.shape[1], weights.w2_SHI.shape[2]
        first_SMI = wide[: slots * rows * first].view(slots, rows, first)
        inner_SMI = narrow[: slots * rows * inner].view(slots, rows, inner)
        torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2), out=first_SMI)
        if weights.w13_bias_SI is not None:
            first_SMI += weights.w13_bias_SI.unsqueeze(1)
        self._activation.into(first_SMI, inner_SMI)
        # The first product has been used up: the outputs take its place.
        out_SMH = wide[: slots * rows * hidden].view(slots, rows, hidden)
        torch.bmm(inner_SMI, weights.w2_SHI.transpose(1, 2), out=out_SMH)
        if weights.w2_bias_SH is not None:
            out_SMH += weights.w2_bias_SH.unsqueeze(1)
        return out_SMH


class Workspaces:
    """Memory that grows to the largest demand and is never given back; one for all layers of a device.

    There is 1 set, or 2 for dual-batch overlap: the outputs of one batch must outlast the other batch's experts.
    """

    def __init__(self, sets: int = 1) -> None:
        if sets < 1:
            raise ValueError(f"there must be at least one set of workspaces, got {sets}")
        self.sets = sets
        self._memory: dict[tuple[int, str], torch.Tensor] = {}

    def take(
        self, index: int, purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return uninitialised memory, valid until it is taken again from the set ``index`` for the same ``purpose``.

        These are ``"wide"`` and ``"narrow"`` as for ``Experts.run``, and ``"output"`` for the outputs of several
        chunks: all of a set can be in use at once. ``shape``, ``dtype`` and ``device`` are the tensor's. Raises
        ``ValueError`` where there is no such set.
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
        """The size of all sets."""
        return sum(memory.numel() for memory in self._memory.values())
