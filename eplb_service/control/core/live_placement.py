"""What a deployment serves right now, as its ranks have reported it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eplb_service.placement import Int32, Placement, apply_layers, combine_digests, layer_digest
from eplb_service.planner.outlook import Serving


@dataclass(frozen=True)
class LivePlacement:
    """Placement, tables and versions of all layers at one epoch.

    Parameters
    ----------
    placement
        Experts of all slots.
    log2phy_RLE
        int32 ``[R, L, E]``, the table of each source rank; ``[R, L, E, D]`` where they deal.
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
        placement.check_log2phy(log2phy_RLE)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        return cls(placement, log2phy_RLE, epoch, layer_epochs, digests)

    @property
    def serving(self) -> Serving:
        """Placement and tables, without versions."""
        return Serving(self.placement, self.log2phy_RLE)

    @cached_property
    def digest(self) -> int:
        """The placement's fingerprint, as the ranks compute it."""
        return combine_digests(self.placement.experts, self.layer_digests)

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_RE: Int32) -> LivePlacement:
        """One epoch later, with one layer switched."""
        changed = [(layer, phy2log_RS, log2phy_RE)]
        placement, tables_RLE = apply_layers(self.placement, self.log2phy_RLE, changed)
        epochs, digests = list(self.layer_epochs), list(self.layer_digests)
        epochs[layer] = self.epoch + 1
        digests[layer] = layer_digest(layer, phy2log_RS)
        return LivePlacement(placement, tables_RLE, self.epoch + 1, tuple(epochs), tuple(digests))

    def with_table(self, rank: int, log2phy_LE: Int32) -> LivePlacement:
        """The same placement with one rank's table as that rank has it."""
        tables_RLE = self.log2phy_RLE.copy()
        tables_RLE[rank] = log2phy_LE
        return LivePlacement.of(self.placement, tables_RLE, self.epoch, self.layer_epochs)
