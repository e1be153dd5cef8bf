"""A batch in parts, each with its own count of rows for every slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType


def chunks(batch: ExpertBatch, rows: int) -> Iterator[tuple[slice, ExpertBatch]]:
    """Parts of at most ``rows`` rows, in the batched format of each slot, and where they stand along that axis.

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
