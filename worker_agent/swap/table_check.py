"""Checks that the tables on the device match the layout that this rank has committed.

Ballots compare only the layouts that ranks have recorded, not the tables on their devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.placement import expert_map
from worker_agent.device import Mark, empty_on_host
from worker_agent.live_layer import LiveLayer
from worker_agent.swap.rank_layout import RankLayout

_ROUND_BOUNDARIES = 256
"""Number of step boundaries within which each layer's tables are compared once, if there are at most as many layers."""


class _Snapshot(NamedTuple):
    """Snapshot of a layer's tables on the device. Each copy is stored with the table committed when it was queued."""

    layer: int
    step: int
    pairs: dict[str, tuple[torch.Tensor, npt.NDArray[np.int32]]]
    arrived: Mark

    def difference(self) -> str | None:
        """Return a message about the first entry that differs, or ``None`` if all tables match."""
        for name, (copied, expected) in self.pairs.items():
            actual = copied.numpy().reshape(expected.shape)
            if not np.array_equal(actual, expected):
                index = int((actual != expected).argmax())
                expert = index // expected[0].size
                return (
                    f"layer {self.layer}: {name} of expert {expert} is {actual.flat[index]} on the device at step "
                    f"{self.step}, but the committed value is {expected.flat[index]}"
                )
        return None


class TableCheck:
    """Checker for ``expert_map`` and ``log2phy`` on the device. It checks one layer at a time.

    Every layer is also checked just before a commit overwrites it. The check never waits for the device, so a
    difference is reported at a later step boundary.
    """

    def __init__(self, layers: Sequence[LiveLayer]) -> None:
        self._layers = layers
        self._interval = max(1, _ROUND_BOUNDARIES // len(layers))
        self._boundaries = 0
        self._snapshots: deque[_Snapshot] = deque()

    def at_boundary(self, step: int, layout: RankLayout) -> str | None:
        """Compare the tables that have arrived, and queue a copy of the next layer's tables if it is due.

        Call this between two forward passes, on the stream that switches layers. At that point the device holds the
        tables of ``layout``.

        Parameters
        ----------
        step
            Current step number, for the message.
        layout
            This rank's current layout.

        Returns
        -------
        str or None
            A message about the first difference, or ``None`` if there is none so far.
        """
        self._boundaries += 1
        while self._snapshots and self._snapshots[0].arrived.passed():
            difference = self._snapshots.popleft().difference()
            if difference is not None:
                return difference
        turn, remainder = divmod(self._boundaries, self._interval)
        if not self._snapshots and remainder == 0:
            self._queue_copy(turn % len(self._layers), step, layout)
        return None

    def before_commit(self, layer: int, step: int, layout: RankLayout) -> None:
        """Queue a copy of a layer's tables for comparison, just before a commit overwrites them."""
        self._queue_copy(layer, step, layout)

    def _queue_copy(self, index: int, step: int, layout: RankLayout) -> None:
        layer = self._layers[index]
        placement = layout.placement
        expected = {
            "expert_map": expert_map(placement.phy2log_LRS[index, layout.rank], placement.experts),
            "log2phy": layout.log2phy_LE[index],
        }
        pairs = {name: (_to_host(getattr(layer, name)), table) for name, table in expected.items()}
        self._snapshots.append(_Snapshot(index, step, pairs, Mark(layer.log2phy.device)))


def _to_host(table: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a table to the host, and return the host tensor."""
    return empty_on_host(tuple(table.shape), table.dtype, table.device).copy_(table, non_blocking=True)
