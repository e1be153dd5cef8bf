"""Current layout of a deployment, as reported by its ranks."""

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
    """Placement, tables and versions of all layers at one epoch (immutable).

    Parameters
    ----------
    placement
        Logical expert in each slot.
    tables_L
        Tables of each layer, int32 ``[R, E]`` with one row per source rank, or ``[R, E, D]`` for dealing tables. Tables
        for many ranks are large, so a layer that does not switch shares its tables with the previous epoch.
    epoch
        Version of the layout. Each committed layer adds one.
    layer_epochs
        Epoch of each layer's last commit.
    layer_digests
        Digest of each layer's placement.

    Examples
    --------
    Two ranks with one slot each swap their experts in the second of two layers:

    >>> placement = Placement.linear(layers=2, experts=2, ranks=2, slots=1)
    >>> layout = DeployedLayout.of(placement, placement.default_log2phy(), 0, (0, 0))
    >>> phy2log_RS = np.array([[1], [0]], dtype=np.int32)
    >>> log2phy_RE = np.array([[1, 0], [1, 0]], dtype=np.int32)
    >>> layout = layout.with_layer(1, phy2log_RS, log2phy_RE)
    >>> layout.epoch, layout.layer_epochs
    (1, (0, 1))
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
        """Return a layout, computing the digest of each layer.

        Raises ``PlacementError`` if a table assigns an expert to a slot that does not hold it.
        """
        placement.check_log2phy(log2phy_RLE)
        digests = tuple(layer_digest(layer, row) for layer, row in enumerate(placement.phy2log_LRS))
        tables_L = tuple(log2phy_RLE[:, layer] for layer in range(placement.layers))
        layout = cls(placement, tables_L, epoch, layer_epochs, digests)
        vars(layout)["log2phy_RLE"] = log2phy_RLE
        return layout

    @classmethod
    def assembled(cls, hellos: Mapping[int, Hello]) -> DeployedLayout:
        """Assemble the layout from the Hellos of all ranks, keyed by rank.

        This is slow for large groups and should not run on the event loop. Raises ``ConflictError`` if the Hellos
        contradict each other.
        """
        hellos_by_rank = [hellos[rank] for rank in range(len(hellos))]
        first = hellos_by_rank[0]
        phy2log_LRS = np.stack([hello.slots_LS for hello in hellos_by_rank], axis=1)
        log2phy_RLE = np.stack([hello.log2phy_LE for hello in hellos_by_rank])
        try:
            placement = Placement(phy2log_LRS, first.shape.experts)
            layout = cls.of(placement, log2phy_RLE, first.epoch, first.layer_epochs)
        except PlacementError as error:
            raise ConflictError(f"the ranks' slots do not form a valid placement: {error}") from error
        if layout.digest != first.digest:
            raise ConflictError(
                f"the ranks' slots have the digest {layout.digest:#x}, but the ranks report {first.digest:#x}"
            )
        _check_token_groups(hellos_by_rank)
        return layout

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
        """Tables of all layers, int32 ``[R, L, E]``, or ``[R, L, E, D]`` for dealing tables.

        The first access stacks them, which is slow for large groups and should not happen on the event loop.
        """
        return np.stack(self.tables_L, axis=1)

    @cached_property
    def digest(self) -> int:
        """Digest of the whole placement, computed in the same way as on the ranks."""
        return combine_digests(self.placement.experts, self.layer_digests)

    def with_layer(self, layer: int, phy2log_RS: Int32, log2phy_RE: Int32) -> DeployedLayout:
        """Return the layout after one layer has switched; its epoch is one higher.

        Parameters
        ----------
        layer
            Index of the layer.
        phy2log_RS
            int32 ``[R, S]``, the layer's new placement.
        log2phy_RE
            int32 ``[R, E]`` or ``[R, E, D]``, the layer's new tables.
        """
        placement = self.placement.with_layers([(layer, phy2log_RS)])
        check_tables_follow(self.tables_L[layer], log2phy_RE, phy2log_RS, layer)
        tables = list(self.tables_L)
        tables[layer] = log2phy_RE
        epochs = list(self.layer_epochs)
        epochs[layer] = self.epoch + 1
        digests = list(self.layer_digests)
        digests[layer] = layer_digest(layer, phy2log_RS)
        return DeployedLayout(placement, tuple(tables), self.epoch + 1, tuple(epochs), tuple(digests))


def _check_token_groups(hellos: Sequence[Hello]) -> None:
    """Raise ``ConflictError`` if two ranks in the same token group have different tables."""
    first_of_group: dict[int, Hello] = {}
    for hello in hellos:
        first = first_of_group.setdefault(hello.token_group, hello)
        differs = np.flatnonzero(with_entries(first.log2phy_LE != hello.log2phy_LE, 1).any(axis=1))
        if differs.size:
            raise ConflictError(
                f"ranks {first.rank} and {hello.rank} see the same tokens (token group {hello.token_group}) but "
                f"their log2phy tables differ in layer {differs[0]}"
            )
