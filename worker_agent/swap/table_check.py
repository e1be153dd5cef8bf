"""Compares tables on the device with the record of what is installed; ballots compare the ranks' records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eplb_service.placement import expert_map
from worker_agent.device import Mark, host_empty
from worker_agent.live_layer import LiveLayer
from worker_agent.swap.installed import Installed

_BOUNDARIES = 128
"""Step boundaries from one layer's comparison to the next layer's."""


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
    """Compares one layer's ``expert_map`` and ``log2phy`` at a time, in turn; never waits for the device."""

    def __init__(self, layers: Sequence[LiveLayer]) -> None:
        self._layers = layers
        self._boundaries = 0
        self._copy: _Copy | None = None

    def at_boundary(self, step: int, installed: Installed) -> str | None:
        """Return how tables that have arrived differ, or ``None``; begin to copy others where it is time.

        Called between two passes, on the stream on which layers are switched: the copy is of what ``installed`` names.
        """
        copy, self._boundaries = self._copy, self._boundaries + 1
        if copy is not None and copy.arrived.passed():
            self._copy = None
            return copy.difference()
        turn, rest = divmod(self._boundaries, _BOUNDARIES)
        if copy is None and rest == 0:
            index, rank = turn % len(self._layers), installed.rank
            layer, placement = self._layers[index], installed.placement
            named = (
                expert_map(placement.phy2log_LRS[index, rank], placement.experts),
                installed.log2phy_LE[index],
            )
            names = ("expert_map", "log2phy")
            pairs = {
                name: (_to_host(getattr(layer, name)), own) for name, own in zip(names, named, strict=True)
            }
            self._copy = _Copy(index, step, pairs, Mark(layer.log2phy.device))
        return None


def _to_host(table: torch.Tensor) -> torch.Tensor:
    """Copy to the host; the copy may still be under way."""
    return host_empty(tuple(table.shape), table.dtype, table.device).copy_(table, non_blocking=True)
