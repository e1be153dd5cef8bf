"""The interface of experts, rows in, their outputs in the same places out; and those of the batched format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from eplb_lab.layer.operators import GroupListType
from eplb_lab.layer.shape import Activation
from eplb_lab.layer.weights import ExpertWeights


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

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype, /) -> torch.Tensor:
        """Put each row through the expert of its slot: shaped as the batch, of ``dtype``, in memory of its own."""
        ...


class BatchedExperts:
    """All M rows of all slots, real or not, without a look at the counts: a graph can capture it.

    In floating point alone.
    """

    format = ActivationFormat.BATCHED

    def __init__(self, activation: Activation = Activation.SILU) -> None:
        self._activation = activation

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, _dtype: torch.dtype) -> torch.Tensor:
        """Multiply, activate and multiply all slots at once; rows are of the outputs' dtype already."""
        first_SMI = torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2))
        if weights.w13_bias_SI is not None:
            first_SMI += weights.w13_bias_SI.unsqueeze(1)
        out_SMH = torch.bmm(self._activation(first_SMI), weights.w2_SHI.transpose(1, 2))
        if weights.w2_bias_SH is not None:
            out_SMH += weights.w2_bias_SH.unsqueeze(1)
        return out_SMH
