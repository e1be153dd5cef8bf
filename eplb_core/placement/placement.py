"""Placement of logical experts in slots, and the tables, maps and digests that follow from it.

``phy2log_LRS`` is the placement. The service, the agents and the tests all use this module to derive ``expert_map`` and
the default ``log2phy`` from it. The suffix of a name gives its dimensions: L layers, R ranks, S slots per rank, E
logical experts.
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
    """Logical expert in each slot of a deployment. Instances are immutable and valid.

    Parameters
    ----------
    phy2log_LRS
        int32 ``[L, R, S]``, the logical expert in each slot. Slot ``s`` of rank ``r`` has the physical id ``r*S + s``.
        The array is copied.
    experts
        E, logical experts per layer.

    Raises
    ------
    PlacementError
        If an expert is out of range, is missing, or appears twice on one rank.

    Examples
    --------
    One layer with three experts on two ranks. Expert 0 has two replicas:

    >>> placement = Placement(np.array([[[0, 1], [2, 0]]]), experts=3)
    >>> placement.replicas()
    array([[2, 1, 1]], dtype=int32)
    >>> placement.expert_map(rank=1)
    array([[ 1, -1,  0]], dtype=int32)
    """

    phy2log_LRS: Int32
    experts: int

    def __post_init__(self) -> None:
        array = np.asarray(self.phy2log_LRS)
        if array.ndim != 3:
            raise PlacementError(
                f"expected a placement of shape [layers, ranks, slots], got {list(array.shape)}"
            )
        if array.dtype.kind not in "iu":
            raise PlacementError(f"expected a placement of integers, got {array.dtype}")
        frozen = np.array(array, dtype=np.int32, order="C", copy=True)
        if not np.array_equal(frozen, array):
            raise PlacementError("the placement has expert ids outside the int32 range")
        frozen.setflags(write=False)
        object.__setattr__(self, "phy2log_LRS", frozen)
        check_shape(self.experts, self.ranks, self.slots)
        for layer in range(self.layers):
            check_layer(frozen[layer], self.experts, where=f"layer {layer}")

    @property
    def layers(self) -> int:
        """L, number of layers."""
        return int(self.phy2log_LRS.shape[0])

    @property
    def ranks(self) -> int:
        """R, number of ranks."""
        return int(self.phy2log_LRS.shape[1])

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return int(self.phy2log_LRS.shape[2])

    @property
    def redundant(self) -> int:
        """Number of redundant slots per layer: those beyond one per expert."""
        return self.ranks * self.slots - self.experts

    @classmethod
    def linear(cls, layers: int, experts: int, ranks: int, slots: int) -> Placement:
        """Return vLLM's initial placement: all experts in order, then more replicas starting from expert 0.

        Parameters
        ----------
        layers
            L, number of layers.
        experts
            E, logical experts per layer.
        ranks
            R, number of ranks.
        slots
            S, slots per rank.

        Returns
        -------
        Placement
            The placement, which is the same in all layers.

        Raises
        ------
        PlacementError
            If no placement can have this shape.

        Examples
        --------
        >>> Placement.linear(layers=1, experts=4, ranks=3, slots=2).phy2log_LRS
        array([[[0, 1],
                [2, 3],
                [0, 1]]], dtype=int32)
        """
        check_shape(experts, ranks, slots)
        row_RS = (np.arange(ranks * slots, dtype=np.int32) % experts).reshape(ranks, slots)
        return cls(np.broadcast_to(row_RS, (layers, ranks, slots)), experts)

    def replicas(self) -> Int32:
        """Return the number of replicas of each expert, int32 ``[L, E]``."""
        counts = [np.bincount(layer_RS.ravel(), minlength=self.experts) for layer_RS in self.phy2log_LRS]
        return np.stack(counts).astype(np.int32)

    def expert_map(self, rank: int) -> Int32:
        """Return the local slot of each expert on one rank.

        Parameters
        ----------
        rank
            Index of the rank, 0 to R-1.

        Returns
        -------
        Int32
            int32 ``[L, E]``; -1 if the rank does not have the expert.
        """
        return np.stack([expert_map(layer_RS[rank], self.experts) for layer_RS in self.phy2log_LRS])

    def default_log2phy(self, width: int = 1) -> Int32:
        """Return the default tables of all layers; see ``tables.default_log2phy``.

        Parameters
        ----------
        width
            D, entries per expert.

        Returns
        -------
        Int32
            int32 ``[R, L, E]``, or ``[R, L, E, D]`` if ``width`` is greater than 1.
        """
        tables: list[Int32] = []
        for layer, layer_RS in enumerate(self.phy2log_LRS):
            # All layers of a linear placement are equal, so their tables are computed only once.
            is_repeated = layer > 0 and np.array_equal(layer_RS, self.phy2log_LRS[layer - 1])
            tables.append(tables[-1] if is_repeated else default_log2phy(layer_RS, self.experts, width))
        return np.ascontiguousarray(np.stack(tables, axis=1))

    def with_layers(self, changes: Iterable[tuple[int, Int32]]) -> Placement:
        """Return a copy of the placement with some layers replaced.

        To save time, only the new layers are validated: ranks call this between steps.

        Parameters
        ----------
        changes
            Index and new placement, int32 ``[R, S]``, of each layer to replace.

        Returns
        -------
        Placement
            A new placement; this one is not modified.

        Raises
        ------
        PlacementError
            If a new layer is invalid.
        """
        changed_LRS = self.phy2log_LRS.copy()
        for layer, phy2log_RS in changes:
            new_RS = np.asarray(phy2log_RS, dtype=np.int32)
            if new_RS.shape != (self.ranks, self.slots):
                raise PlacementError(
                    f"layer {layer}: expected a placement of shape {[self.ranks, self.slots]}, got {list(new_RS.shape)}"
                )
            check_layer(new_RS, self.experts, where=f"layer {layer}")
            changed_LRS[layer] = new_RS
        changed_LRS.setflags(write=False)
        placement = object.__new__(Placement)
        object.__setattr__(placement, "phy2log_LRS", changed_LRS)
        object.__setattr__(placement, "experts", self.experts)
        return placement

    def check_log2phy(self, log2phy_RLE: Int32) -> None:
        """Check that every table entry points to a slot that holds its expert.

        Parameters
        ----------
        log2phy_RLE
            int32 ``[R, L, E]``, the physical id of the slot to which each source rank sends its tokens for each
            expert. Dealing tables are ``[R, L, E, D]``.

        Raises
        ------
        PlacementError
            If an entry is invalid; the error message names the first invalid entry.
        """
        expected = (self.ranks, self.layers, self.experts)
        if log2phy_RLE.ndim not in (3, 4) or log2phy_RLE.shape[:3] != expected:
            raise PlacementError(f"expected log2phy of shape {list(expected)}, got {list(log2phy_RLE.shape)}")
        for layer, phy2log_RS in enumerate(self.phy2log_LRS):
            where = f"log2phy of layer {layer}"
            check_log2phy(log2phy_RLE[:, layer], phy2log_RS, where, deals=log2phy_RLE.ndim == 4)

    def digest(self) -> int:
        """Return a 63-bit digest. Equal placements have equal digests on all hosts; collisions are improbable."""
        return combine_digests(
            self.experts, (layer_digest(layer, row) for layer, row in enumerate(self.phy2log_LRS))
        )


def apply_layers(
    placement: Placement, log2phy: Int32, changes: Iterable[tuple[int, Int32, Int32]]
) -> tuple[Placement, Int32]:
    """Return the placement and tables with some layers replaced. The arguments are not modified.

    Parameters
    ----------
    placement
        Current placement.
    log2phy
        int32 ``[R, L, E]`` or ``[R, L, E, D]``, current tables of some or all source ranks.
    changes
        Index, new placement (int32 ``[R, S]``) and new tables (int32 ``[R, E]`` or ``[R, E, D]``) of each layer.

    Raises
    ------
    PlacementError
        If a new layer or one of its tables is invalid.
    """
    layers = list(changes)
    new_placement = placement.with_layers((layer, phy2log_RS) for layer, phy2log_RS, _ in layers)
    tables = np.array(log2phy, dtype=np.int32, order="C")
    for layer, phy2log_RS, table in layers:
        check_tables_follow(tables[:, layer], table, phy2log_RS, layer)
        tables[:, layer] = table
    return new_placement, tables


def layer_digest(layer: int, phy2log_RS: Int32) -> int:
    """Return the 63-bit digest of one layer's placement, which ranks compare.

    Equal placements of different layers have different digests.
    """
    return array_digest(np.ascontiguousarray(phy2log_RS, dtype="<i4"), salt=f"layer {layer}")


def combine_digests(experts: int, layer_digests: Iterable[int]) -> int:
    """Combine layer digests into a placement's digest, so that a switch hashes only the changed layer."""
    return array_digest(np.fromiter(layer_digests, dtype="<i8"), salt=f"placement of {experts}")


def array_digest(array: npt.NDArray[np.generic], salt: str = "") -> int:
    """Return a 63-bit digest of an array's shape, type and bytes.

    Parameters
    ----------
    array
        Any array.
    salt
        String that is hashed as well, so that equal arrays with different meanings get different digests.
    """
    text = f"{salt} {array.dtype.str} {array.shape} ".encode()
    digest = hashlib.blake2b(text + array.tobytes(), digest_size=8).digest()
    # Ranks compare digests with an all-reduce of signed 64-bit integers, so the top bit stays 0.
    return int.from_bytes(digest, "little") & ((1 << 63) - 1)
