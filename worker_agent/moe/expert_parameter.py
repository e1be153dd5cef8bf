"""One parameter of all local experts: what a value of it covers, and which part of a checkpoint tensor goes where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Shard(str, Enum):
    """One of the matrices of an expert, by the names that checkpoints use; there is no w3 without a gate."""

    W1 = "w1"
    """Gate projection, the first half of w13; the only one that is there where experts have no gate."""

    W2 = "w2"
    """Down projection."""

    W3 = "w3"
    """Up projection, the second half of w13."""


class Granularity(str, Enum):
    """What one value of a parameter covers."""

    WEIGHT = "weight"
    """A weight: w13 ``[S, 2*I, H]``, w2 ``[S, H, I]``."""

    GROUP = "group"
    """A scale or zero point for a group of a row or a block of a matrix: shaped as the weight, with fewer rows and
    columns."""

    CHANNEL = "channel"
    """A scale or offset for an output row: w13 ``[S, 2*I]`` or ``[S, 2*I, 1]``, w2 ``[S, H]`` or ``[S, H, 1]``.

    Checkpoints may hold them with or without the last dimension as well.
    """

    TENSOR = "tensor"
    """A scale for a matrix: w13 ``[S, 2]``, w2 ``[S, 1]``; checkpoints hold scalars."""

    BIAS = "bias"
    """Added to an output row: shaped as a channel's scale. Tensor-parallel ranks add up, so one has all of w2's."""

    COLUMN = "column"
    """For each column of a matrix, as a quantization's order of them (``g_idx``): w13 ``[S, H]``, w2 ``[S, I]``.

    w1 and w3 share it.
    """

    EXPERT = "expert"
    """For the input of a product, as ``input_scale``: w13 and w2 ``[S]`` or ``[S, n]``; w1 and w3 share it."""

    @property
    def shared(self) -> bool:
        """Whether w1 and w3 have one value between them, which checkpoints hold twice."""
        return self in (Granularity.COLUMN, Granularity.EXPERT)


@dataclass(frozen=True)
class ExpertParameter:
    """A tensor of all local slots. ``transposed`` swaps its two inner dimensions.

    Tensor parallelism splits w1 and w3 by rows and w2 by columns: a rank's tensor holds its part alone.
    """

    tensor_S: torch.Tensor
    granularity: Granularity = Granularity.WEIGHT
    transposed: bool = False
    gated: bool = True
    """Whether w13 has a half for each of w1 and w3."""

    zeros: bool = False
    """Whether only zeros are taken and nothing is kept: the offset of a symmetric quantization, there or not."""

    def loaded_shape(self, shard: Shard, tp_size: int) -> tuple[int, ...]:
        """The shape of a checkpoint tensor of one expert's shard, of which this rank takes its part."""
        shape = list(self._destination(0, shard).shape)
        split = self._split_dimension(shard)
        if split is not None:
            shape[split] *= tp_size
        return tuple(shape)

    def fitted(self, shard: Shard, loaded: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor in the shape that is held here: with or without a last dimension of one."""
        destination = self._destination(0, shard)
        if self.granularity in (Granularity.TENSOR, Granularity.EXPERT):
            return loaded.reshape(destination.shape) if loaded.numel() == destination.numel() == 1 else loaded
        if self.granularity is not Granularity.CHANNEL:
            return loaded
        if loaded.ndim == destination.ndim + 1 and loaded.shape[-1] == 1:
            return loaded.squeeze(-1)
        return loaded.unsqueeze(-1) if loaded.ndim == destination.ndim - 1 else loaded

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether values of ``dtype`` can be copied: floating point into floating point, integers into the same."""
        own = self.tensor_S.dtype
        return dtype.is_floating_point if own.is_floating_point else dtype == own

    def fill(self, slot: int, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> None:
        """Copy ``tp_rank``'s part of a tensor of ``loaded_shape`` into a slot."""
        if self.zeros:
            return
        destination = self._destination(slot, shard)
        if self.granularity is Granularity.BIAS and shard is Shard.W2 and tp_rank:
            destination.zero_()
        else:
            destination.copy_(self._own_part(shard, loaded, tp_rank))

    def holds(self, slot: int, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> bool:
        """Whether a slot has just what ``fill`` would copy into it."""
        destination = self._destination(slot, shard)
        return torch.equal(destination, self._own_part(shard, loaded, tp_rank).to(destination))

    def _own_part(self, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> torch.Tensor:
        split = self._split_dimension(shard)
        if split is None:
            return loaded
        width = self._destination(0, shard).shape[split]
        return loaded.narrow(split, tp_rank * width, width)

    def _destination(self, slot: int, shard: Shard) -> torch.Tensor:
        part = self.tensor_S[slot]
        if self.granularity is Granularity.TENSOR:
            return part[1 if shard is Shard.W3 else 0]
        rows = part.transpose(0, 1) if self.transposed and part.ndim == 2 else part
        if shard is Shard.W2 or not self.gated or self.granularity.shared:
            return rows
        gate, up = rows.chunk(2, dim=0)
        return gate if shard is Shard.W1 else up

    def _split_dimension(self, shard: Shard) -> int | None:
        by_rows = self.granularity in (Granularity.CHANNEL, Granularity.BIAS)
        if self.granularity is Granularity.COLUMN:
            return 0 if shard is Shard.W2 else None
        if self.granularity in (Granularity.TENSOR, Granularity.EXPERT) or (by_rows and shard is Shard.W2):
            return None
        return 1 if shard is Shard.W2 else 0
