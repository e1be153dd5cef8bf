"""What each layer's slots held at its newest epochs, and where tokens went: what counts are read under."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32, with_entries

_EPOCHS_KEPT = 8
_PLACEMENTS_KEPT = 4
"""Placements of all layers kept stacked: before and after a switch, and ranks in between."""
PLACEMENTS_HELD = _EPOCHS_KEPT + 2 * _PLACEMENTS_KEPT
"""Slots of all layers held at most, as int32; those that are stacked are twice as wide."""
TARGETS_HELD = _EPOCHS_KEPT
"""Tables of all ranks held at most, as int16."""


class PlacedLayer(NamedTuple):
    """One layer at one epoch: experts of its slots, and the ranks that each source rank's tokens of an expert go to."""

    phy2log_RS: Int32
    target_RED: npt.NDArray[np.int16]

    @classmethod
    def of(cls, phy2log_RS: Int32, log2phy_RE: Int32) -> PlacedLayer:
        """By its slots and tables."""
        return cls(phy2log_RS, with_entries(log2phy_RE // phy2log_RS.shape[1], 2).astype(np.int16))


class PlacementHistory:
    """The newest epochs of every layer; bounded.

    Parameters
    ----------
    by_layer
        For each layer what it was by epoch, oldest first.
    """

    def __init__(self, by_layer: tuple[dict[int, PlacedLayer], ...]) -> None:
        self.by_layer = by_layer
        self._stacked: dict[tuple[int, ...], npt.NDArray[np.intp]] = {}

    def copy(self) -> PlacementHistory:
        """Another of the same content."""
        return PlacementHistory(tuple(dict(epochs) for epochs in self.by_layer))

    def place(self, layer: int, epoch: int, phy2log_RS: Int32, log2phy_RE: Int32) -> None:
        """Counts of ``layer`` at ``epoch`` are of these slots and tables; replaces what was known of that epoch."""
        self.put(layer, epoch, PlacedLayer.of(phy2log_RS, log2phy_RE))

    def put(self, layer: int, epoch: int, placed: PlacedLayer) -> None:
        """``place`` for who has put it together already."""
        self._stacked.clear()
        epochs = self.by_layer[layer]
        epochs.pop(epoch, None)
        epochs[epoch] = placed
        while len(epochs) > _EPOCHS_KEPT:
            epochs.pop(next(iter(epochs)))

    def cells(self, layer_epochs: tuple[int, ...], experts: int) -> npt.NDArray[np.intp] | None:
        """Where in heat ``[L, E]``, flattened, each slot's tokens belong, ``[L, R, S]``.

        ``None`` where one of the epochs is not known.
        """
        known = self._stacked.get(layer_epochs)
        if known is not None:
            return known
        layers = list(zip(self.by_layer, layer_epochs, strict=True))
        if not all(epoch in epochs for epochs, epoch in layers):
            return None
        if len(self._stacked) >= _PLACEMENTS_KEPT:
            self._stacked.pop(next(iter(self._stacked)))
        rows = [
            experts * layer + epochs[epoch].phy2log_RS.astype(np.intp)
            for layer, (epochs, epoch) in enumerate(layers)
        ]
        self._stacked[layer_epochs] = np.stack(rows)
        return self._stacked[layer_epochs]

    def targets(self, layer_epochs: tuple[int, ...], rank: int) -> npt.NDArray[np.int16]:
        """Ranks that the tokens of source ``rank`` go to in turn, int16 ``[L, E, D]``; the epochs must be known."""
        layers = zip(self.by_layer, layer_epochs, strict=True)
        return np.stack([epochs[epoch].target_RED[rank] for epochs, epoch in layers])
