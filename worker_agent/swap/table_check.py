"""Compares tables on the device with the record of what is installed; ballots compare the ranks' records alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.placement import expert_map
from worker_agent.device import Mark, host_empty
from worker_agent.live_layer import LiveLayer
from worker_agent.swap.rank_layout import RankLayout

_ALL_WITHIN = 256
"""Number of step boundaries within which each layer's tables are compared once, if there are no more layers."""


class _Copy(NamedTuple):
    """Tables of a layer on their way from the device, each beside what was installed as the copy was queued."""

    layer: int
    step: int
    pairs: dict[str, tuple[torch.Tensor, npt.NDArray[np.int32]]]
    arrived: Mark

    def difference(self) -> str | None:
        """First entry that is not what is installed, as a sentence; ``None`` where all are."""
        for name, (copied, installed) in self.pairs.items():
            there = copied.numpy().reshape(installed.shape)
            if not np.array_equal(there, installed):
                at, width = int((there != installed).argmax()), installed[0].size
                return (
                    f"layer {self.layer}: {name} of expert {at // width} is {there.flat[at]} on the device at step "
                    f"{self.step}, but {installed.flat[at]} is installed"
                )
        return None


class TableCheck:
    """Compares ``expert_map`` and ``log2phy`` of one layer after another, and of each layer that a commit overwrites.

    Never waits for the device: differences show at a later step boundary.
    """

    def __init__(self, layers: Sequence[LiveLayer]) -> None:
        self._layers = layers
        self._interval = max(1, _ALL_WITHIN // len(layers))
        self._boundaries = 0
        self._copies: deque[_Copy] = deque()

    def at_boundary(self, step: int, installed: RankLayout) -> str | None:
        """Return how tables that have arrived differ, or ``None``; begin to copy others where it is time.

        Called between two passes, on the stream on which layers are switched: the copy is of what ``installed`` names.
        """
        self._boundaries += 1
        while self._copies and self._copies[0].arrived.passed():
            difference = self._copies.popleft().difference()
            if difference is not None:
                return difference
        turn, rest = divmod(self._boundaries, self._interval)
        if not self._copies and rest == 0:
            self._begin(turn % len(self._layers), step, installed)
        return None

    def before_commit(self, layer: int, step: int, installed: RankLayout) -> None:
        """Begin to copy the tables of a layer that is about to be overwritten: nobody could compare them later."""
        self._begin(layer, step, installed)

    def _begin(self, index: int, step: int, installed: RankLayout) -> None:
        layer, placement = self._layers[index], installed.placement
        named = {
            "expert_map": expert_map(placement.phy2log_LRS[index, installed.rank], placement.experts),
            "log2phy": installed.log2phy_LE[index],
        }
        pairs = {name: (_to_host(getattr(layer, name)), own) for name, own in named.items()}
        self._copies.append(_Copy(index, step, pairs, Mark(layer.log2phy.device)))


def _to_host(table: torch.Tensor) -> torch.Tensor:
    """Copy to the host; the copy may still be under way."""
    return host_empty(tuple(table.shape), table.dtype, table.device).copy_(table, non_blocking=True)
