"""Expert interface, and an implementation for the batched format.

Experts receive rows grouped by local slot and return each row's output at the same position.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from eplb_lab.layer.operators import GroupListType
from eplb_lab.layer.shape import Activation
from eplb_lab.layer.weights import ExpertWeights


class ActivationFormat(str, Enum):
    """Layout of the rows of all local slots in one tensor."""

    STANDARD = "standard"
    """``[N, H]``: rows sorted by slot. The tensor is as small as possible, but its size depends on the routing."""

    BATCHED = "batched"
    """``[S, M, H]``: M rows per slot, real rows first. The tensor has the same size at every step."""


@dataclass(frozen=True)
class ExpertBatch:
    """Rows for the experts of S local slots."""

    rows: torch.Tensor
    """``[N, H]`` or ``[S, M, H]``. Experts ignore the rows that belong to no slot."""

    group_list_S: torch.Tensor
    """int64: number of rows of each local slot, in the encoding ``group_list_type``."""

    group_list_type: GroupListType
    scale_N: torch.Tensor | None = None
    """float32: scale of each row, if rows are int8."""

    padding_S: torch.Tensor | None = None
    """int64: number of padding rows of each slot, if the exchange transfers padding."""

    @property
    def counts_S(self) -> torch.Tensor:
        """Number of rows of each local slot, including padding, int64."""
        return self.group_list_type.counts(self.group_list_S)

    @property
    def heat_S(self) -> torch.Tensor:
        """Number of token choices for each local slot, excluding padding, int64."""
        return self.counts_S if self.padding_S is None else self.counts_S - self.padding_S


class Experts(Protocol):
    """Feed-forward experts, one per local slot."""

    format: ActivationFormat
    """Format of the rows that ``apply`` receives and returns."""

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, /) -> torch.Tensor:
        """Return the output of each row's expert, in data type ``dtype`` and in the batch's shape.

        The result shares no memory with the batch.
        """
        ...


class BatchedExperts:
    """Floating-point experts that compute all M rows of every slot, including padding.

    They never read the row counts, so CUDA graphs can capture them.
    """

    format = ActivationFormat.BATCHED

    def __init__(self, activation: Activation = Activation.SILU) -> None:
        self._activation = activation

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, _dtype: torch.dtype) -> torch.Tensor:
        """Compute all slots at once, with one batched matmul per projection.

        The rows already have the data type of the outputs.
        """
        first_SMI = torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2))
        if weights.w13_bias_SI is not None:
            first_SMI += weights.w13_bias_SI.unsqueeze(1)
        out_SMH = torch.bmm(self._activation(first_SMI), weights.w2_SHI.transpose(1, 2))
        if weights.w2_bias_SH is not None:
            out_SMH += weights.w2_bias_SH.unsqueeze(1)
        return out_SMH
