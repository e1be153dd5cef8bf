"""The token choices that one rank's experts must work on, in either of two formats, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from worker_agent.moe.operators import GroupListType, token_counts


class ActivationFormat(str, Enum):
    """How the rows of local slots are laid out in one tensor."""

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
        """How the rows are laid out."""
        return ActivationFormat.STANDARD if self.rows.ndim == 2 else ActivationFormat.BATCHED

    @property
    def counts_S(self) -> torch.Tensor:
        """The rows of each local slot, padding among them, int64."""
        return token_counts(self.group_list_S, self.group_list_type)

    @property
    def heat_S(self) -> torch.Tensor:
        """The real token choices of each local slot, int64."""
        return self.counts_S if self.idle_S is None else self.counts_S - self.idle_S


def chunks(batch: ExpertBatch, rows: int) -> Iterator[tuple[slice, ExpertBatch]]:
    """Parts of at most ``rows`` rows, in the batched format of each slot, and their place along that axis.

    A batch without rows has one part without rows.
    """
    axis = 0 if batch.format is ActivationFormat.STANDARD else 1
    length = batch.rows.shape[axis]
    for start in range(0, max(length, 1), rows):
        part = slice(start, min(start + rows, length))
        yield part, _part(batch, part)


def _part(batch: ExpertBatch, part: slice) -> ExpertBatch:
    width = part.stop - part.start
    if batch.format is ActivationFormat.BATCHED:
        counts_S = (batch.counts_S - part.start).clamp(0, width)
        index: tuple[slice, ...] = (slice(None), part)
    else:
        ends_S = (batch.counts_S.cumsum(0) - part.start).clamp(0, width)
        counts_S = torch.diff(ends_S, prepend=ends_S.new_zeros(1))
        index = (part,)
    return ExpertBatch(
        batch.rows[index],
        counts_S,
        GroupListType.COUNTS,
        None if batch.scale is None else batch.scale[index],
        None if batch.weights is None else batch.weights[index],
    )
