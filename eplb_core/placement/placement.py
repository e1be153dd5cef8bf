"""Placement of logical experts in slots: the one truth, and everything that is derived from it.

``phy2log_LRS`` is the placement. ``expert_map`` and the default ``log2phy`` follow from it here and nowhere else, for
the service, the agents and the tests alike. Dimensions in names: L layers, R ranks, S slots per
rank, E logical experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.placement.tables import (
    Int32,
    PlacementError,
    check_layer,
    check_log2phy,
    check_shape,
    check_tables_follow,
    default_log2phy,
    expert_map,
)


@dataclass(frozen=True)
class Placement:
    """Logical experts of all slots of a deployment.

    Parameters
    ----------
    phy2log_LRS
        int32 ``[L, R, S]``, the logical expert in each slot; slot ``s`` of rank ``r`` has the physical id ``r*S + s``.
    experts
        E, logical experts per layer.

    Raises
    ------
    PlacementError
        Where an expert is out of range, missing, or twice on one rank.
    """

    phy2log_LRS: Int32
    experts: int

    def __post_init__(self) -> None:
        array = np.asarray(self.phy2log_LRS)
        if array.ndim != 3:
            raise PlacementError(f"a placement has the shape [layers, ranks, slots], got {list(array.shape)}")
        if array.dtype.kind not in "iu":
            raise PlacementError(f"a placement holds integers, got {array.dtype}")
        frozen = np.array(array, dtype=np.int32, order="C", copy=True)
        if not np.array_equal(frozen, array):
            raise PlacementError("a placement holds expert ids past the range of int32")
        frozen.setflags(write=False)
        object.__setattr__(self, "phy2log_LRS", frozen)
        check_shape(self.experts, self.ranks, self.slots)
        for layer in range(self.layers):
            check_layer(frozen[layer], self.experts, where=f"layer {layer}")

    @property
    def layers(self) -> int:
        """L."""
        return int(self.phy2log_LRS.shape[0])

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.phy2log_LRS.shape[1])

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return int(self.phy2log_LRS.shape[2])

    @property
    def redundant(self) -> int:
        """Slots beyond one per expert, per layer."""
        return self.ranks * self.slots - self.experts

    @classmethod
    def linear(cls, layers: int, experts: int, ranks: int, slots: int) -> Placement:
        """Return the layout that vLLM starts from: all logical experts in order, then replicas from expert 0 on.

        Parameters
        ----------
        layers, experts, ranks, slots
            L, E, R and S.

        Returns
        -------
        Placement
            The same in every layer.

        Raises
        ------
        PlacementError
            Where no placement can have this shape.
        """
        check_shape(experts, ranks, slots)
        row_RS = (np.arange(ranks * slots, dtype=np.int32) % experts).reshape(ranks, slots)
        return cls(np.broadcast_to(row_RS, (layers, ranks, slots)), experts)

    def replicas(self) -> Int32:
        """Replicas of each expert, int32 ``[L, E]``."""
        counts = [np.bincount(layer_RS.ravel(), minlength=self.experts) for layer_RS in self.phy2log_LRS]
        return np.stack(counts).astype(np.int32)

    def expert_map(self, rank: int) -> Int32:
        """Local slots of experts on one rank.

        Parameters
        ----------
        rank
            ``0..R-1``.

        Returns
        -------
        Int32
            Int32 ``[L, E]``, -1 where the rank has none.
        """
        return np.stack([expert_map(layer_RS[rank], self.experts) for layer_RS in self.phy2log_LRS])

    def default_log2phy(self, width: int = 1) -> Int32:
        """Tables by the engines' fixed rule, or that deal round the replicas.

        Parameters
        ----------
        width
            D, entries of a table for each expert.

        Returns
        -------
        Int32
            Int32 ``[R, L, E]``, or ``[R, L, E, D]`` of more than one entry.
        """
        tables: list[Int32] = []
        for layer, layer_RS in enumerate(self.phy2log_LRS):
            # Of a linear layout all layers are alike.
            alike = layer > 0 and np.array_equal(layer_RS, self.phy2log_LRS[layer - 1])
            tables.append(tables[-1] if alike else default_log2phy(layer_RS, self.experts, width))
        return np.ascontiguousarray(np.stack(tables, axis=1))

    def with_layers(self, changes: Iterable[tuple[int, Int32]]) -> Placement:
        """Replace some layers; the others are not checked again, for ranks switch between two steps.

        Parameters
        ----------
        changes
            Index of each layer and its int32 ``[R, S]``, the expert in each slot.

        Returns
        -------
        Placement
            A new one; this one stays as it is.

        Raises
        ------
        PlacementError
            Where a new layer cannot be served.
        """
        changed_LRS = self.phy2log_LRS.copy()
        for layer, phy2log_RS in changes:
            replaced_RS = np.asarray(phy2log_RS, dtype=np.int32)
            if replaced_RS.shape != (self.ranks, self.slots):
                raise PlacementError(
                    f"layer {layer}: expected the shape {[self.ranks, self.slots]}, got {list(replaced_RS.shape)}"
                )
            check_layer(replaced_RS, self.experts, where=f"layer {layer}")
            changed_LRS[layer] = replaced_RS
        changed_LRS.setflags(write=False)
        placement = object.__new__(Placement)
        object.__setattr__(placement, "phy2log_LRS", changed_LRS)
        object.__setattr__(placement, "experts", self.experts)
        return placement

    def check_log2phy(self, log2phy_RLE: Int32) -> None:
        """Check that tables fit this placement: every entry is a slot that holds its expert.

        Parameters
        ----------
        log2phy_RLE
            Int32 ``[R, L, E]``, physical id that each source rank's tokens of each expert go to; ``[R, L, E, D]``,
            those that they go to in turn, where ranks deal.

        Raises
        ------
        PlacementError
            Naming the first entry that does not fit.
        """
        expected = (self.ranks, self.layers, self.experts)
        if log2phy_RLE.ndim not in (3, 4) or log2phy_RLE.shape[:3] != expected:
            raise PlacementError(f"log2phy has the shape {list(expected)}, got {list(log2phy_RLE.shape)}")
        for layer, phy2log_RS in enumerate(self.phy2log_LRS):
            where = f"log2phy of layer {layer}"
            check_log2phy(log2phy_RLE[:, layer], phy2log_RS, where, deals=log2phy_RLE.ndim == 4)

    def digest(self) -> int:
        """A 63-bit fingerprint: equal on two hosts if, and but for chance only if, the placements are equal."""
        return combine_digests(
            self.experts, (layer_digest(layer, row) for layer, row in enumerate(self.phy2log_LRS))
        )


def apply_layers(
    placement: Placement, log2phy: Int32, changes: Iterable[tuple[int, Int32, Int32]]
) -> tuple[Placement, Int32]:
    """Placement and tables after ``changes``; what was given stays as it was.

    Parameters
    ----------
    placement, log2phy
        What serves: the placement, and int32 ``[R, L, E]`` the tables of all source ranks, or of some; ``[R, L, E, D]``
        where they deal.
    changes
        Per layer its index, int32 ``[R, S]`` its new placement, and int32 ``[R, E]`` or ``[R, E, D]`` its new tables.

    Raises
    ------
    PlacementError
        Where a new layer, or one of its tables, cannot be served.
    """
    changed = list(changes)
    switched = placement.with_layers((layer, phy2log_RS) for layer, phy2log_RS, _ in changed)
    tables = np.array(log2phy, dtype=np.int32, order="C")
    for layer, phy2log_RS, table in changed:
        check_tables_follow(tables[:, layer], table, phy2log_RS, layer)
        tables[:, layer] = table
    return switched, tables


def layer_digest(layer: int, phy2log_RS: Int32) -> int:
    """63-bit fingerprint of one layer's slots, by which ranks find out whether they have the same installed."""
    return array_digest(np.ascontiguousarray(phy2log_RS, dtype="<i4"), salt=f"layer {layer}")


def combine_digests(experts: int, layer_digests: Iterable[int]) -> int:
    """Placement fingerprint from its layers' fingerprints, so that one switched layer costs one layer's hashing."""
    return array_digest(np.fromiter(layer_digests, dtype="<i8"), salt=f"placement of {experts}")


def array_digest(array: npt.NDArray[np.generic], salt: str = "") -> int:
    """63-bit fingerprint of an array's shape, type and bytes."""
    text = f"{salt} {array.dtype.str} {array.shape} ".encode()
    digest = hashlib.blake2b(text + array.tobytes(), digest_size=8).digest()
    # It fits a signed 64-bit integer, so that ranks can compare fingerprints by an integer all-reduce.
    return int.from_bytes(digest, "little") & ((1 << 63) - 1)
