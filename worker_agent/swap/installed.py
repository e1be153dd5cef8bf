"""What this rank serves right now: the placement of all ranks, its epoch, and this rank's tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from eplb_service.placement import (
    Int32,
    Placement,
    apply_layers,
    array_digest,
    check_log2phy,
    combine_digests,
    layer_digest,
)


@dataclass(frozen=True)
class Installed:
    """An immutable snapshot; each committed layer makes a new one, so any thread may read it at any time.

    Parameters
    ----------
    rank
        The rank that this is.
    placement
        Slots of all ranks.
    log2phy_LE
        This rank's tables, int32 ``[L, E]``, or ``[L, E, D]`` where it deals.
    epoch, layer_epochs
        Version of the placement, and the version at which each layer last changed.
    layer_digests
        Fingerprint of each layer; ``digest`` combines them.
    """

    rank: int
    placement: Placement
    log2phy_LE: Int32
    epoch: int
    layer_epochs: tuple[int, ...]
    layer_digests: tuple[int, ...]

    @classmethod
    def first(cls, rank: int, placement: Placement, log2phy_LE: Int32) -> Installed:
        """The placement that a rank starts with, epoch 0.

        Raises ``PlacementError`` where a table points to a slot that does not hold its expert.
        """
        for layer, phy2log_RS in enumerate(placement.phy2log_LRS):
            where = f"layer {layer}: log2phy of rank {rank}"
            check_log2phy(log2phy_LE[layer], phy2log_RS, where, deals=log2phy_LE.ndim == 3)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        return cls(rank, placement, log2phy_LE, 0, (0,) * placement.layers, digests)

    @cached_property
    def digest(self) -> int:
        """The placement's fingerprint, equal on all ranks of a healthy group."""
        return combine_digests(self.placement.experts, self.layer_digests)

    @cached_property
    def version_digest(self) -> int:
        """Fingerprint of placement and epochs: differs too where two ranks differ by a switch of tables alone."""
        version = np.array([self.digest, self.epoch, *self.layer_epochs], dtype="<i8")
        return array_digest(version, salt="version")

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_E: Int32) -> Installed:
        """The snapshot after one more committed layer."""
        changed = [(layer, phy2log_RS, log2phy_E[None])]
        placement, log2phy_1LE = apply_layers(self.placement, self.log2phy_LE[None], changed)
        return replace(
            self,
            placement=placement,
            log2phy_LE=log2phy_1LE[0],
            epoch=self.epoch + 1,
            layer_epochs=_replaced(self.layer_epochs, layer, self.epoch + 1),
            layer_digests=_replaced(self.layer_digests, layer, layer_digest(layer, phy2log_RS)),
        )


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
