"""Tokens by slot where hosts do not count them: what each rank's tokens chose, sent where its tables say."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32, dealt_to, with_entries

_EPOCHS_KEPT = 16
"""Tables of a layer that are kept; what waits for the disk was counted under far fewer."""

LayerTables = tuple[Int32, ...]
"""The tables of all source ranks, int32 ``[R, E]`` or ``[R, E, D]``, layer by layer."""


class RoutingTables:
    """log2phy of the newest epochs of every layer; bounded."""

    def __init__(self, layers: int) -> None:
        self._by_layer: tuple[dict[int, Int32], ...] = tuple({} for _ in range(layers))

    def place(self, layer: int, epoch: int, log2phy_RE: Int32) -> None:
        """Tokens of ``layer`` were sent by these tables at ``epoch``; replaces what was known of that epoch."""
        epochs = self._by_layer[layer]
        epochs.pop(epoch, None)
        epochs[epoch] = np.array(log2phy_RE, dtype=np.int32)
        while len(epochs) > _EPOCHS_KEPT:
            epochs.pop(next(iter(epochs)))

    def at(self, layer_epochs: tuple[int, ...]) -> LayerTables | None:
        """Tables of all layers, not copied; ``None`` where those of one of the epochs are not known."""
        layers = list(zip(self._by_layer, layer_epochs, strict=True))
        if not all(epoch in epochs for epochs, epoch in layers):
            return None
        return tuple(epochs[epoch] for epochs, epoch in layers)


def slots_of_sources(
    source_RLE: npt.NDArray[np.integer[Any]], tables: LayerTables, slots: int
) -> npt.NDArray[np.uint32]:
    """Tokens that all slots received in one step.

    Parameters
    ----------
    source_RLE
        Tokens of each source rank by logical expert, integers ``[R, L, E]``.
    tables
        What they were sent by.
    slots
        R*S, of all ranks.

    Returns
    -------
    npt.NDArray[np.uint32]
        ``[L, R*S]``.
    """
    counts_LP = np.zeros((len(tables), slots), dtype=np.uint32)
    for layer, table in enumerate(tables):
        log2phy_RED = with_entries(table, 2)
        width = log2phy_RED.shape[2]
        for entry in range(width):
            dealt_RE = dealt_to(source_RLE[:, layer], entry, width)
            # Sums of whole numbers, exact in float64.
            sums_P = np.bincount(log2phy_RED[:, :, entry].ravel(), dealt_RE.ravel(), minlength=slots)
            counts_LP[layer] += sums_P.astype(np.uint32)
    return counts_LP
