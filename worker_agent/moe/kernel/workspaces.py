"""Memory that all layers of a model use by turns, in as many sets as batches overlap."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch


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
