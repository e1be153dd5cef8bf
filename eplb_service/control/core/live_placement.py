"""What a deployment serves right now, as its ranks have told it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.placement import Int32, Placement, PlacementError, combine_digests, layer_digest


@dataclass(frozen=True)
class LivePlacement:
    """Placement, tables and versions of all layers at one epoch.

    Parameters
    ----------
    placement
        Experts of all slots.
    log2phy_RLE
        int32 ``[R, L, E]``, the table of each source rank.
    epoch
        Version of the whole; one more with each layer that switches.
    layer_epochs
        Epoch at which each layer last changed.
    layer_digests
        Fingerprint of each layer.
    """

    placement: Placement
    log2phy_RLE: Int32
    epoch: int
    layer_epochs: tuple[int, ...]
    layer_digests: tuple[int, ...]

    @classmethod
    def of(
        cls, placement: Placement, log2phy_RLE: Int32, epoch: int, layer_epochs: tuple[int, ...]
    ) -> LivePlacement:
        """Fingerprints computed; raises ``PlacementError`` where a table names a slot that lacks the expert."""
        check_tables(log2phy_RLE, placement)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        return cls(placement, log2phy_RLE, epoch, layer_epochs, digests)

    @property
    def digest(self) -> int:
        """The placement's fingerprint, as the ranks compute it."""
        return combine_digests(self.placement.experts, self.layer_digests)

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_RE: Int32) -> LivePlacement:
        """One epoch later, with one layer switched."""
        tables_RLE = self.log2phy_RLE.copy()
        tables_RLE[:, layer] = log2phy_RE
        epochs, digests = list(self.layer_epochs), list(self.layer_digests)
        epochs[layer] = self.epoch + 1
        digests[layer] = layer_digest(layer, phy2log_RS)
        placement = self.placement.with_layer(layer, phy2log_RS)
        return LivePlacement(placement, tables_RLE, self.epoch + 1, tuple(epochs), tuple(digests))

    def with_table(self, rank: int, log2phy_LE: Int32) -> LivePlacement:
        """The same placement with one rank's table as that rank has it."""
        tables_RLE = self.log2phy_RLE.copy()
        tables_RLE[rank] = log2phy_LE
        return LivePlacement.of(self.placement, tables_RLE, self.epoch, self.layer_epochs)


def check_tables(log2phy_RLE: Int32, placement: Placement) -> None:
    """Raise ``PlacementError`` unless every rank's entry for each expert is a slot that holds it."""
    flat_LP = placement.phy2log_LRS.reshape(placement.layers, -1)
    outside = (log2phy_RLE < 0) | (log2phy_RLE >= flat_LP.shape[1])
    held_RLE = flat_LP[np.arange(placement.layers)[:, None], np.where(outside, 0, log2phy_RLE)]
    wrong = outside | (held_RLE != np.arange(placement.experts))
    if wrong.any():
        rank, layer, expert = (int(index) for index in np.argwhere(wrong)[0])
        slot = int(log2phy_RLE[rank, layer, expert])
        raise PlacementError(
            f"log2phy of rank {rank}, layer {layer}: expert {expert} points to slot {slot}, which does not hold it"
        )
