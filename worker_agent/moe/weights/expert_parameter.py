"""One tensor of a layer's local experts, and how shards of checkpoint tensors land in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Shard(str, Enum):
    """One of the three matrices of a gated expert, by the names that checkpoints use."""

    W1 = "w1"
    """Gate projection, the first half of w13."""

    W2 = "w2"
    """Down projection."""

    W3 = "w3"
    """Up projection, the second half of w13."""


class Granularity(str, Enum):
    """What one value of a parameter stands for."""

    WEIGHT = "weight"
    """A weight: w13 ``[S, 2*I, H]``, w2 ``[S, H, I]``."""

    GROUP = "group"
    """A scale for a group of a row or a block of a matrix: shaped as the weight, with fewer rows and columns."""

    CHANNEL = "channel"
    """A scale for an output row: w13 ``[S, 2*I, 1]``, w2 ``[S, H, 1]``."""

    TENSOR = "tensor"
    """A scale for a matrix: w13 ``[S, 2]``, w2 ``[S, 1]``; checkpoints hold scalars."""


@dataclass(frozen=True)
class ExpertParameter:
    """A tensor of all local slots. ``transposed`` says that its two inner dimensions stand the other way round.

    Tensor parallelism splits w1 and w3 by rows and w2 by columns: a rank's tensor holds its part alone.
    """

    tensor_S: torch.Tensor
    granularity: Granularity = Granularity.WEIGHT
    transposed: bool = False

    def loaded_shape(self, shard: Shard, tp_size: int) -> tuple[int, ...]:
        """The shape of a checkpoint tensor of one expert's shard, of which this rank takes its part."""
        shape = list(self._destination(0, shard).shape)
        split = self._split_dimension(shard)
        if split is not None:
            shape[split] *= tp_size
        return tuple(shape)

    def fill(self, slot: int, shard: Shard, loaded: torch.Tensor, tp_rank: int) -> None:
        """Copy ``tp_rank``'s part of a tensor of ``loaded_shape`` into a slot."""
        destination = self._destination(slot, shard)
        split = self._split_dimension(shard)
        if split is not None:
            width = destination.shape[split]
            loaded = loaded.narrow(split, tp_rank * width, width)
        destination.copy_(loaded)

    def _destination(self, slot: int, shard: Shard) -> torch.Tensor:
        part = self.tensor_S[slot]
        if self.granularity is Granularity.TENSOR:
            return part[1 if shard is Shard.W3 else 0]
        rows = part.transpose(0, 1) if self.transposed else part
        if shard is Shard.W2:
            return rows
        gate, up = rows.chunk(2, dim=0)
        return gate if shard is Shard.W1 else up

    def _split_dimension(self, shard: Shard) -> int | None:
        if self.granularity is Granularity.TENSOR:
            return None
        if shard is Shard.W2:
            return None if self.granularity is Granularity.CHANNEL else 1
        return 0
