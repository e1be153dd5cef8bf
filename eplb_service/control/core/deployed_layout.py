"""The placement that a deployment serves right now, as its ranks have reported it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eplb_core.placement import (
    Int32,
    Placement,
    PlacementError,
    check_tables_follow,
    combine_digests,
    layer_digest,
    with_entries,
)
from eplb_core.planner.plan import Layout
from eplb_core.wire.agent import Hello
from eplb_service.control.core.errors import ConflictError


@dataclass(frozen=True)
class DeployedLayout:
    """Placement, tables and versions of all layers at one epoch.

    Parameters
    ----------
    placement
        Experts of all slots.
    tables_L
        For each layer int32 ``[R, E]``, the table of each source rank; ``[R, E, D]`` where they deal. A layer that does
        not switch shares its own with the epoch before: all tables of many ranks are large.
    epoch, layer_epochs, layer_digests
        Version of the whole, one more with each layer that switches; epoch and fingerprint of each layer.
    """

    placement: Placement
    tables_L: tuple[Int32, ...]
    epoch: int
    layer_epochs: tuple[int, ...]
    layer_digests: tuple[int, ...]

    @classmethod
    def of(
        cls, placement: Placement, log2phy_RLE: Int32, epoch: int, layer_epochs: tuple[int, ...]
    ) -> DeployedLayout:
        """Compute fingerprints; raises ``PlacementError`` where a table names a slot that lacks the expert."""
        placement.check_log2phy(log2phy_RLE)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        tables_L = tuple(log2phy_RLE[:, layer] for layer in range(placement.layers))
        live = cls(placement, tables_L, epoch, layer_epochs, digests)
        vars(live)["log2phy_RLE"] = log2phy_RLE
        return live

    @classmethod
    def assembled(cls, hellos: Mapping[int, Hello]) -> DeployedLayout:
        """Put together what all ranks serve, of their Hellos by rank.

        With many ranks that takes long: beside the event loop. Raises ``ConflictError`` where it is not one placement.
        """
        in_order = [hellos[rank] for rank in range(len(hellos))]
        first = in_order[0]
        phy2log_LRS = np.stack([hello.slots_LS for hello in in_order], axis=1)
        tables_RLE = np.stack([hello.log2phy_LE for hello in in_order])
        try:
            live = cls.of(
                Placement(phy2log_LRS, first.shape.experts), tables_RLE, first.epoch, first.layer_epochs
            )
        except PlacementError as error:
            raise ConflictError(f"the ranks' slots do not make a placement: {error}") from error
        if live.digest != first.digest:
            raise ConflictError(
                f"the ranks' slots together have the digest {live.digest:#x}, the ranks say {first.digest:#x}"
            )
        _check_token_groups(in_order)
        return live

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest."""
        return self.epoch, self.digest

    @property
    def serving(self) -> Layout:
        """Placement and tables, without versions."""
        return Layout(self.placement, self.log2phy_RLE)

    @cached_property
    def log2phy_RLE(self) -> Int32:
        """All tables, int32 ``[R, L, E]``, or ``[R, L, E, D]`` where ranks deal.

        Put together when first asked for, which takes long with many ranks: by who plans, not on the event loop.
        """
        return np.stack(self.tables_L, axis=1)

    @cached_property
    def digest(self) -> int:
        """The placement's fingerprint, as the ranks compute it."""
        return combine_digests(self.placement.experts, self.layer_digests)

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_RE: Int32) -> DeployedLayout:
        """Return the placement one epoch later, with one layer switched."""
        placement = self.placement.with_layers([(layer, phy2log_RS)])
        tables, epochs, digests = list(self.tables_L), list(self.layer_epochs), list(self.layer_digests)
        check_tables_follow(tables[layer], log2phy_RE, phy2log_RS, layer)
        tables[layer] = log2phy_RE
        epochs[layer] = self.epoch + 1
        digests[layer] = layer_digest(layer, phy2log_RS)
        return DeployedLayout(placement, tuple(tables), self.epoch + 1, tuple(epochs), tuple(digests))


def _check_token_groups(hellos: Sequence[Hello]) -> None:
    first_of: dict[int, Hello] = {}
    for hello in hellos:
        first = first_of.setdefault(hello.token_group, hello)
        differs = np.flatnonzero(with_entries(first.log2phy_LE != hello.log2phy_LE, 1).any(axis=1))
        if differs.size:
            raise ConflictError(
                f"ranks {first.rank} and {hello.rank} see the same tokens (token group {hello.token_group}) but their "
                f"log2phy differ in layer {differs[0]}"
            )
