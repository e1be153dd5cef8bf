"""What a deployment serves right now, as its ranks have reported it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eplb_service.heat.placement_history import PlacedLayer
from eplb_service.placement import Int32, Placement, check_tables_follow, combine_digests, layer_digest
from eplb_service.planner.outlook import Serving


@dataclass(frozen=True)
class LivePlacement:
    """Placement, tables and versions of all layers at one epoch.

    Parameters
    ----------
    placement
        Experts of all slots.
    tables_L
        For each layer int32 ``[R, E]``, the table of each source rank; ``[R, E, D]`` where they deal. A layer that does
        not switch shares its own with the epoch before: all tables of many ranks are large.
    epoch
        Version of the whole; one more with each layer that switches.
    layer_epochs
        Epoch at which each layer last changed.
    layer_digests
        Fingerprint of each layer.
    """

    placement: Placement
    tables_L: tuple[Int32, ...]
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
        tables_L = tuple(log2phy_RLE[:, layer] for layer in range(placement.layers))
        live = cls(placement, tables_L, epoch, layer_epochs, digests)
        vars(live)["log2phy_RLE"] = log2phy_RLE
        return live

    @property
    def serving(self) -> Serving:
        """Placement and tables, without versions."""
        return Serving(self.placement, self.log2phy_RLE)

    @cached_property
    def log2phy_RLE(self) -> Int32:
        """All tables, int32 ``[R, L, E]``, or ``[R, L, E, D]`` where ranks deal.

        Put together when first asked for, which takes long with many ranks: by who plans, not on the event loop.
        """
        return np.stack(self.tables_L, axis=1)

    def log2phy_of(self, rank: int) -> Int32:
        """One rank's tables, int32 ``[L, E]`` or ``[L, E, D]``."""
        return np.stack([table[rank] for table in self.tables_L])

    @cached_property
    def placed_L(self) -> tuple[PlacedLayer, ...]:
        """What counts of each layer are read under."""
        return tuple(map(PlacedLayer.of, self.placement.phy2log_LRS, self.tables_L))

    @cached_property
    def digest(self) -> int:
        """The placement's fingerprint, as the ranks compute it."""
        return combine_digests(self.placement.experts, self.layer_digests)

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_RE: Int32) -> LivePlacement:
        """One epoch later, with one layer switched."""
        placement = self.placement.with_layers([(layer, phy2log_RS)])
        tables, epochs, digests = list(self.tables_L), list(self.layer_epochs), list(self.layer_digests)
        check_tables_follow(tables[layer], log2phy_RE, phy2log_RS, layer)
        tables[layer] = log2phy_RE
        epochs[layer] = self.epoch + 1
        digests[layer] = layer_digest(layer, phy2log_RS)
        return LivePlacement(placement, tuple(tables), self.epoch + 1, tuple(epochs), tuple(digests))

    def with_table(self, rank: int, log2phy_LE: Int32) -> LivePlacement:
        """The same placement with one rank's table as that rank has it."""
        tables_RLE = self.log2phy_RLE.copy()
        tables_RLE[rank] = log2phy_LE
        return LivePlacement.of(self.placement, tables_RLE, self.epoch, self.layer_epochs)
