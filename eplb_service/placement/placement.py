"""Which expert is in which slot: the one truth, and everything that is derived from it.

``phy2log_LRS`` is the placement. ``expert_map`` and the default ``log2phy`` follow from it here and nowhere else, for
the service, the agents and the tests alike. Dimensions in names: L layers, R ranks, S slots per
rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from eplb_service.placement.digests import combine_digests, layer_digest
from eplb_service.placement.validity import Int32, PlacementError, check_layer, check_log2phy, check_shape


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
        """The layout that vLLM starts from: all logical experts in order, then replicas from expert 0 on.

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
        return np.stack([replica_counts(layer_RS, self.experts) for layer_RS in self.phy2log_LRS])

    def expert_map(self, rank: int) -> Int32:
        """What ``rank`` has where.

        Parameters
        ----------
        rank
            ``0..R-1``.

        Returns
        -------
        Int32
            Int32 ``[L, E]``, local slot of each expert, -1 where the rank has none.
        """
        return np.stack([expert_map(layer_RS[rank], self.experts) for layer_RS in self.phy2log_LRS])

    def default_log2phy(self) -> Int32:
        """Tables by the engines' fixed rule (see ``default_log2phy``), int32 ``[R, L, E]``."""
        tables = [default_log2phy(layer_RS, self.experts) for layer_RS in self.phy2log_LRS]
        return np.ascontiguousarray(np.stack(tables, axis=1))

    def with_layer(self, layer: int, phy2log_RS: Int32) -> Placement:
        """This placement with one layer replaced; only that one is checked, for ranks switch between two steps.

        Parameters
        ----------
        layer
            ``0..L-1``.
        phy2log_RS
            Int32 ``[R, S]``, the expert in each slot of that layer.

        Returns
        -------
        Placement
            A new one; this one stays as it is.

        Raises
        ------
        PlacementError
            Where the new layer cannot be served.
        """
        return self.with_layers([(layer, phy2log_RS)])

    def with_layers(self, changes: Iterable[tuple[int, Int32]]) -> Placement:
        """This placement with some layers replaced; the others are not checked again.

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
        deals = log2phy_RLE.ndim == 4
        if log2phy_RLE.ndim not in (3, 4) or log2phy_RLE.shape[:3] != expected:
            raise PlacementError(f"log2phy has the shape {list(expected)}, got {list(log2phy_RLE.shape)}")
        some = log2phy_RLE.size > 0
        inside = some and log2phy_RLE.min() >= 0 and log2phy_RLE.max() < self.ranks * self.slots
        expert_E = np.arange(self.experts)[:, None] if deals else np.arange(self.experts)
        for layer, phy2log_RS in enumerate(self.phy2log_LRS):
            table_RE = log2phy_RLE[:, layer]
            # Nearly all tables fit, and that is known in half the time that it takes to say what does not.
            if not (inside and (phy2log_RS.ravel().take(table_RE) == expert_E).all()):
                check_log2phy(table_RE, phy2log_RS, f"log2phy of layer {layer}", deals=deals)

    def digest(self) -> int:
        """A 63-bit fingerprint: equal on two hosts if, and but for chance only if, the placements are equal."""
        return combine_digests(
            self.experts, (layer_digest(layer, row) for layer, row in enumerate(self.phy2log_LRS))
        )


def replica_counts(phy2log_RS: Int32, experts: int) -> Int32:
    """Replicas of each expert in one layer, int32 ``[E]``."""
    return np.bincount(phy2log_RS.ravel(), minlength=experts).astype(np.int32)


def expert_map(phy2log_S: Int32, experts: int) -> Int32:
    """Local slot of each expert on one rank of one layer, -1 where it has none, int32 ``[E]``."""
    local_E = np.full(experts, -1, dtype=np.int32)
    local_E[phy2log_S] = np.arange(phy2log_S.shape[0], dtype=np.int32)
    return local_E


def default_log2phy(phy2log_RS: Int32, experts: int) -> Int32:
    """The engines' fixed rule: source rank ``r`` uses replica ``r % k`` of an expert with ``k`` replicas.

    Returns int32 ``[R, E]``, one layer's table for every source rank; replicas count in order of physical id.
    """
    ranks = phy2log_RS.shape[0]
    flat = phy2log_RS.ravel()
    by_expert = np.argsort(flat, kind="stable").astype(np.int32)
    counts_E = replica_counts(phy2log_RS, experts)
    first_E = np.concatenate(([0], np.cumsum(counts_E)[:-1]))
    chosen_RE = np.tile(by_expert[first_E], (ranks, 1))
    # Divisions are dear, and most experts have one replica.
    several = np.flatnonzero(counts_E > 1)
    rank_R1 = np.arange(ranks, dtype=np.int32)[:, None]
    chosen_RE[:, several] = by_expert[first_E[several] + rank_R1 % counts_E[several]]
    return chosen_RE
