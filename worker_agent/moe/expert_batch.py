"""The token choices that one rank's experts must work on, in either of two formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from worker_agent.moe.operators import GroupListType, token_counts


class ActivationFormat(str, Enum):
    """How the rows of local slots stand in one tensor."""

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
    """float32 ``[N]`` or ``[S, M]``: what each row's output weighs, where experts weigh."""

    idle_S: torch.Tensor | None = None
    """int64: rows of each slot that are padding, where an exchange has to carry padding along."""

    @property
    def format(self) -> ActivationFormat:
        """How the rows stand."""
        return ActivationFormat.STANDARD if self.rows.ndim == 2 else ActivationFormat.BATCHED

    @property
    def counts_S(self) -> torch.Tensor:
        """The rows of each local slot, padding among them, int64."""
        return token_counts(self.group_list_S, self.group_list_type)

    @property
    def heat_S(self) -> torch.Tensor:
        """The real token choices of each local slot, int64."""
        return self.counts_S if self.idle_S is None else self.counts_S - self.idle_S
